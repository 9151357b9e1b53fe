"""Volumes in a stack that is planned: what removes or shrinks one is refused, and what stays is said."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from skyinfra.deploy.disks import cost_lines, kept_lines, refuse_removed, refuse_volumes
from skyinfra.errors import DiskTooSmall, VolumeProtected
from skyinfra.terraform.program import Plan
from skyinfra.terraform.state import read_state
from skyinfra.terraform.synthesized import SynthesizedStack

DATASETS = {"name": "datasets", "size_gb": 100, "protect": True, "kind": "gp3", "zone": "us-east-1a"}
PRICED = {**DATASETS, "usd_per_month": 8.0, "price_note": "us-east-1, 2025-05"}


def resources(*volumes: tuple[str, str, dict[str, Any]], protected: dict[str, bool] | None = None) -> Any:
    # As Terraform writes it: the value beside its type.
    kept = {"value": protected or {}, "type": ["object", dict.fromkeys(protected or {}, "bool")]}
    made = [("terraform_data", "volumes", {"input": kept}), *volumes]
    listed = [
        {"mode": "managed", "type": kind, "name": name, "provider": "", "instances": [{"attributes": attributes}]}
        for kind, name, attributes in made
    ]
    return read_state(json.dumps({"version": 4, "resources": listed}), source="test")


def stack(*volumes: dict[str, Any], pools: tuple[dict[str, Any], ...] = ()) -> SynthesizedStack:
    return SynthesizedStack("data", Path("data"), pools, {}, volumes=volumes)


SIZES = [("aws_ebs_volume", "size"), ("google_compute_disk", "size"), ("runpod_network_volume", "size")]


@pytest.mark.parametrize(("kind", "size"), SIZES)
def test_a_smaller_one_is_refused_before_it_is_planned(kind: str, size: str) -> None:
    """Google's provider would make an empty disk in its place, and EC2 refuse in the middle of the deploy."""
    existing = resources((kind, "datasets", {size: 200}))
    with pytest.raises(DiskTooSmall) as caught:
        refuse_volumes(stack(DATASETS), existing, destroy=False)
    assert "data.datasets.size_gb" in str(caught.value) and "has 200 GB" in str(caught.value)
    refuse_volumes(stack({**DATASETS, "size_gb": 300}), existing, destroy=False)


def test_a_destroy_is_refused_as_long_as_one_is_protected() -> None:
    existing = resources(("aws_ebs_volume", "datasets", {"size": 100}), protected={"datasets": True})
    for declared in ((DATASETS,), ()):  # also where the program has lost it
        with pytest.raises(VolumeProtected, match=r"data\.datasets: would be removed with all that is on it"):
            refuse_volumes(stack(*declared), existing, destroy=True)
    refuse_volumes(stack({**DATASETS, "protect": False}), existing, destroy=True)
    lifted = resources(("aws_ebs_volume", "datasets", {"size": 100}), protected={"datasets": False})
    refuse_volumes(stack(), lifted, destroy=True)
    # The volume of the head's jobs is a fleet's own.
    refuse_volumes(stack(), resources(), destroy=True)


@pytest.mark.parametrize("action", ["delete", "replace"])
def test_a_plan_that_removes_one_is_refused(action: str) -> None:
    existing = resources(("aws_ebs_volume", "datasets", {"size": 100}), protected={"datasets": True})
    plan = Plan(file=Path("plan"), changes=((action, "aws_ebs_volume.datasets"),))
    with pytest.raises(VolumeProtected) as caught:
        refuse_removed(stack(), existing, plan)
    assert "protect=False" in str(caught.value) and "skyinfra deploy data" in str(caught.value)
    refuse_removed(stack({**DATASETS, "protect": False}), existing, plan)
    refuse_removed(stack(), existing, Plan(file=Path("plan"), changes=(("update", "aws_ebs_volume.datasets"),)))


def test_what_is_said_of_them() -> None:
    assert list(cost_lines([PRICED])) == [
        "volume datasets: 100 GB of gp3 in us-east-1a, $8.00 a month (us-east-1, 2025-05)"
    ]
    mine = {**PRICED, "path": "/data", "stack": "data"}
    theirs = {"name": "old", "kind": "gp3", "zone": "us-east-1a", "path": "/old"}
    first, second = kept_lines(stack(pools=({"name": "one", "volumes": [mine, theirs]},)))
    assert first.startswith("kept: volume datasets, 100 GB of gp3 in us-east-1a, $8.00 a month")
    assert "`skyinfra destroy data` removes it" in first
    assert second.endswith("price not known. No stack of this project made it.")
    assert kept_lines(stack(pools=({"name": "one"},))) == []
