"""A disk that would shrink is refused before anything changes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from skyinfra.deploy.disks import refuse_smaller
from skyinfra.errors import DiskTooSmall
from skyinfra.terraform.program import Plan
from skyinfra.terraform.project import SynthesizedStack

HEAD, WORKER = "module.train.aws_instance.head", 'module.train.aws_instance.worker["train-1"]'


def stack(folder: Path, disk_gb: int, *, group: bool = False) -> SynthesizedStack:
    """A stack whose nodes have volumes of 100 GB."""
    volume = {"attributes": {"root_block_device": [{"volume_size": 100}]}}
    made = {"module": "module.train", "mode": "managed", "provider": "", "instances": [volume]}
    types = ["aws_instance", *(["aws_autoscaling_group"] if group else [])]
    state = {"version": 4, "resources": [{**made, "type": each, "name": "head"} for each in types]}
    (folder / "state").write_text(json.dumps(state))
    modules = {"train": {"disk_gb": disk_gb}}
    return SynthesizedStack("fleet", folder, (), modules, backend={"local": {"path": "state"}})


def plan(folder: Path, *changes: tuple[str, str]) -> Plan:
    return Plan(file=folder / "plan", changes=changes)


def test_a_smaller_disk_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DiskTooSmall) as caught:
        refuse_smaller(stack(tmp_path, 80), plan(tmp_path, ("update", WORKER)))
    said = str(caught.value)
    assert "train.disk_gb" in said and "have 100 GB, and a volume does not shrink" in said and "80" in said
    assert "Declare at least 100" in said


@pytest.mark.parametrize(("disk_gb", "action"), [(100, "update"), (200, "update"), (0, "update"), (80, "replace")])
def test_what_can_be_done_is_not_refused(tmp_path: Path, disk_gb: int, action: str) -> None:
    refuse_smaller(stack(tmp_path, disk_gb), plan(tmp_path, (action, HEAD)))


def test_the_head_of_a_group_has_another_disk(tmp_path: Path) -> None:
    refuse_smaller(stack(tmp_path, 80, group=True), plan(tmp_path, ("update", HEAD)))
