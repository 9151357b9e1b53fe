"""A disk that would shrink is refused before anything changes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from skyinfra.deploy.disks import refuse_smaller
from skyinfra.errors import DiskTooSmall
from skyinfra.terraform.program import Plan
from skyinfra.terraform.synthesized import SynthesizedStack

HEAD, WORKER = "module.train.aws_instance.head", 'module.train.aws_instance.worker["train-1"]'
JOBS = "module.train.aws_ebs_volume.head"


def stack(folder: Path, disk_gb: int, *, group: bool = False, head_volume_gb: int | None = None) -> SynthesizedStack:
    """A stack whose nodes have volumes of 100 GB, and whose head has one of 40 GB for its jobs."""
    volume = {"attributes": {"root_block_device": [{"volume_size": 100}]}}
    made = {"module": "module.train", "mode": "managed", "provider": "", "instances": [volume]}
    types = ["aws_instance", *(["aws_autoscaling_group"] if group else [])]
    jobs = {**made, "type": "aws_ebs_volume", "name": "head", "instances": [{"attributes": {"size": 40}}]}
    state = {"version": 4, "resources": [jobs, *({**made, "type": each, "name": "head"} for each in types)]}
    (folder / "state").write_text(json.dumps(state))
    modules = {"train": {"disk_gb": disk_gb, "head_volume_gb": head_volume_gb}}
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


@pytest.mark.parametrize(("head_volume_gb", "given"), [(30, 30), (None, 20)])
def test_a_smaller_volume_of_the_jobs_is_refused(tmp_path: Path, head_volume_gb: int | None, given: int) -> None:
    with pytest.raises(DiskTooSmall) as caught:
        refuse_smaller(stack(tmp_path, 0, head_volume_gb=head_volume_gb), plan(tmp_path, ("update", JOBS)))
    said = str(caught.value)
    assert "train.head_volume_gb" in said and "has 40 GB, and a volume does not shrink" in said
    assert caught.value.given == given
    assert "Declare at least 40" in said and f"--replace '{JOBS}'" in said


@pytest.mark.parametrize(
    ("head_volume_gb", "change"),
    [(40, ("update", JOBS)), (50, ("update", JOBS)), (30, ("replace", JOBS)), (30, ("update", HEAD))],
)
def test_a_volume_of_the_jobs_that_grows_or_is_made_anew(
    tmp_path: Path, head_volume_gb: int, change: tuple[str, str]
) -> None:
    refuse_smaller(stack(tmp_path, 0, head_volume_gb=head_volume_gb), plan(tmp_path, change))
