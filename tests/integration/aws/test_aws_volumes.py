"""A volume that outlives fleets: the real provider against a moto server, by the command line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from moto_aws.cloud import Cloud
from moto_aws.projects import Project

pytestmark = pytest.mark.slow

PROGRAM = """
import {library} as lib
import skyinfra as sky

app = lib.App()
cloud = sky.AWS(zones=["us-east-1b"])
datasets = sky.Volume(name="datasets", provider=cloud, {fields})
if {declared}:
    sky.FleetStack(app, "data", volumes=[datasets])
    sky.FleetStack(app, "train", pools=[sky.ComputePool(
        name="one", provider=sky.AWS(), accelerator="L4", volumes={{"/data": datasets}})])
else:
    sky.FleetStack(app, "data")
app.synth()
"""


class _Fleet:
    """The project, its cloud, and the one volume in it that is no node's own."""

    def __init__(self, folder: Path, cloud: Cloud, library: str = "cdktf") -> None:
        self.project, self.cloud, self.library = Project(folder, cloud), cloud, library

    def declare(self, fields: str = "size_gb=10", *, declared: bool = True) -> None:
        program = PROGRAM.format(library=self.library, fields=fields, declared=declared)
        (self.project.folder / "main.py").write_text(program)

    def changes(self, stack: str) -> list[tuple[str, str]]:
        made = json.loads(self.project.run("plan", stack, "--json"))["changes"]
        return [(each["action"], each["address"]) for each in made]

    def deploy(self, stack: str) -> str:
        return self.project.run("deploy", stack, "--auto-approve", "--no-wait")

    def refused(self, *arguments: str) -> str:
        done = self.project.try_run(*arguments, "--auto-approve")
        assert done.returncode == 1, done.stdout
        return done.stderr

    def volume(self) -> dict[str, Any] | None:
        found = self.cloud.client("ec2").describe_volumes()["Volumes"]
        mine = [each for each in found if {"Key": "skyinfra:volume", "Value": "datasets"} in each.get("Tags", ())]
        assert len(mine) < 2
        return mine[0] if mine else None


def test_a_volume_outlives_the_fleet_that_mounts_it(cloud: Cloud, tmp_path: Path) -> None:
    before = cloud.existing()
    fleet = _Fleet(tmp_path, cloud)
    fleet.declare()
    planned = fleet.project.run("plan", "data")
    assert "volume datasets: 10 GB of gp3 in us-east-1b, $0.80 a month (us-east-1, 2025-05)" in planned
    fleet.deploy("data")
    made = fleet.volume()
    assert made is not None and (made["Size"], made["AvailabilityZone"], made["Encrypted"]) == (10, "us-east-1b", True)

    # The node stands in the zone of the volume, has it, and knows it by its id.
    assert "volume datasets at /data: 10 GB" in fleet.project.run("plan", "train")
    fleet.deploy("train")
    [node] = cloud.instances("one")
    assert node["Placement"]["AvailabilityZone"] == "us-east-1b"
    found = fleet.volume()
    assert found is not None
    [attachment] = found["Attachments"]
    assert (attachment["InstanceId"], attachment["Device"]) == (node["InstanceId"], "/dev/sdg")
    text = cloud.user_data(node["InstanceId"])
    assert made["VolumeId"] in text and "@SKYINFRA_VOLUMES@" not in text
    assert fleet.changes("data") == fleet.changes("train") == []

    # It grows in place, and no node is made anew for it. It does not shrink.
    fleet.declare("size_gb=20")
    assert fleet.changes("train") == []
    assert ("update", "aws_ebs_volume.datasets") in fleet.changes("data")
    fleet.deploy("data")
    fleet.declare("size_gb=15")
    said = fleet.refused("deploy", "data")
    assert "data.datasets.size_gb: the volume has 20 GB, and a volume does not shrink (given: 15)" in said
    fleet.declare("size_gb=20")
    assert fleet.changes("train") == []

    # The fleet goes, and the volume stays.
    said = fleet.project.run("destroy", "train", "--auto-approve")
    assert "kept: volume datasets, 20 GB of gp3 in us-east-1b, $1.60 a month" in said
    assert "`skyinfra destroy data` removes it, once it is declared with protect=False" in said
    assert cloud.instances("one") == []
    kept = fleet.volume()
    assert kept is not None and kept["VolumeId"] == made["VolumeId"] and kept["Size"] == 20

    # Neither a destroy of its own stack removes it, nor a declaration that has lost it.
    assert "data.datasets: would be removed with all that is on it" in fleet.refused("destroy", "data")
    fleet.declare(declared=False)
    assert "data.datasets: would be removed with all that is on it" in fleet.refused("deploy", "data")
    assert fleet.volume() == kept

    # What removes it is asked for.
    fleet.declare("size_gb=20, protect=False")
    assert fleet.changes("data") == [("update", "terraform_data.volumes")]
    fleet.deploy("data")
    fleet.declare(declared=False)
    fleet.deploy("data")
    assert fleet.volume() is None
    fleet.project.run("destroy", "data", "--auto-approve")
    assert cloud.existing() == before


def test_a_volume_of_somebody_else(cloud: Cloud, tmp_path: Path) -> None:
    """By its id: in the zone that is declared, or refused before anything is made. Taken away, it stays."""
    ec2 = cloud.client("ec2")
    ids = [ec2.create_volume(AvailabilityZone=f"us-east-1{zone}", Size=8)["VolumeId"] for zone in "bc"]
    before, project = cloud.existing(), Project(tmp_path, cloud)

    def declare(volumes: str) -> None:
        project.declare(
            'sky.ComputePool(name="one", accelerator="L4", provider=sky.AWS(zones=["us-east-1b"]), volumes={'
            + volumes
            + "})"
        )

    here, there = (
        f'sky.Volume(name="{name}", id="{id}", provider=sky.AWS(zones=["us-east-1b"]))'
        for name, id in zip(("here", "there"), ids, strict=True)
    )
    declare(f'"/data": {here}, "/more": {there}')
    done = project.try_run("deploy", "--auto-approve", "--no-wait")
    said = " ".join(done.stderr.split())
    assert done.returncode == 1 and f"there ({ids[1]}) is in us-east-1c, and the node in us-east-1b" in said, said
    declare(f'"/data": {here}')
    project.run("deploy", "--auto-approve", "--no-wait")
    first = cloud.instance("one-0")
    # Without it the node is made anew, as one that never had it; the volume is as it was.
    declare("")
    changes = {each["address"]: each["action"] for each in json.loads(project.run("plan", "--json"))["changes"]}
    assert changes["module.one.aws_instance.head"] == "replace"
    assert not any("aws_ebs_volume" in address for address in changes)
    project.run("deploy", "--auto-approve", "--no-wait")
    assert cloud.instance("one-0")["InstanceId"] != first["InstanceId"]
    assert "kept" not in project.run("destroy", "--auto-approve")
    found = ec2.describe_volumes(VolumeIds=ids)["Volumes"]
    assert [each["State"] for each in found] == ["available"] * 2
    assert cloud.existing() == before


def test_the_other_library(cloud: Cloud, tmp_path: Path) -> None:
    fleet = _Fleet(tmp_path, cloud, "cdktn")
    fleet.declare("size_gb=10, protect=False")
    fleet.deploy("data")
    planned = fleet.changes("train")
    assert ("create", 'module.one.aws_volume_attachment.kept["datasets"]') in planned
    fleet.project.run("destroy", "data", "--auto-approve")
    assert fleet.volume() is None
