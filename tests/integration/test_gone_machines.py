"""Resources that the cloud does not find any more, by a real Terraform: as with the token of another account."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from cloud_modules.droplets import PROVIDER, REQUIRED, droplets
from mock_provider.bed import Bed, served

from skyinfra.deploy.apply import planned
from skyinfra.errors import WrongAccount
from skyinfra.terraform.synthesized import SynthesizedStack

ROOT = f"""
{REQUIRED}
{PROVIDER}
module "train" {{
  source = "./train"
}}
"""


@pytest.fixture
def bed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bed]:
    with served(tmp_path, "digitalocean") as made:
        (made.folder / "stacks" / "fleet" / "train").mkdir(parents=True)
        made.folder = made.folder / "stacks" / "fleet"
        made.write(ROOT)
        made.write(REQUIRED + droplets(), "train/main.tf")
        made.run("init", "-no-color")
        made.apply()
        for name in ("TF_CLI_CONFIG_FILE", "TF_REATTACH_PROVIDERS"):
            monkeypatch.setenv(name, made.environment[name])
        yield made


def take_away(bed: Bed, *types: str) -> None:
    """Removes all resources of *types* behind Terraform's back."""
    for type in types:
        for file in bed.world.existing(type):
            (bed.world.folder / file).unlink()


@pytest.mark.parametrize("destroy", [False, True])
def test_machines_and_networks_that_are_not_found_are_not_forgotten(bed: Bed, destroy: bool) -> None:
    stack = SynthesizedStack("fleet", bed.folder, (), {}, backend={"local": {"path": "terraform.tfstate"}})
    before = [each.address for each in stack.resources()]
    take_away(bed, "digitalocean_droplet", "digitalocean_vpc")
    refused = pytest.raises(WrongAccount, match="finds none of 2 machines, and 3 of its 3 resources not at all")
    with refused as caught, planned(stack, destroy=destroy):
        pass
    assert f"skyinfra {'destroy' if destroy else 'deploy'} fleet --gone" in str(caught.value)
    assert [each.address for each in stack.resources()] == before
    with planned(stack, destroy=destroy, gone=True) as (_, plan):
        assert len(plan.changes) == (0 if destroy else 3)


def test_machines_that_were_taken_back_are_made_anew(bed: Bed) -> None:
    stack = SynthesizedStack("fleet", bed.folder, (), {}, backend={"local": {"path": "terraform.tfstate"}})
    take_away(bed, "digitalocean_droplet")
    with planned(stack) as (_, plan):
        assert [action for action, _ in plan.changes] == ["create", "create"]
