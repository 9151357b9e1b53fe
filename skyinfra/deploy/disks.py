"""Disks of machines that run: a volume grows in place, and no cloud shrinks one."""

from __future__ import annotations

import re

from skyinfra.errors import DiskTooSmall
from skyinfra.terraform.program import Plan
from skyinfra.terraform.synthesized import SynthesizedStack

_INSTANCE = re.compile(r"module\.(?P<pool>[^.\[]+)\.aws_instance\.(?:head|worker\[.+\])")
_JOBS = re.compile(r"module\.[^.\[]+\.aws_ebs_volume\.head")
# The default of modules/aws.
_JOBS_GB = 20


def refuse_smaller(stack: SynthesizedStack, plan: Plan) -> None:
    """Raises `DiskTooSmall` where *plan* shrinks a volume in place: of an instance, or that of the jobs of a head.

    EC2 would refuse it in the middle of the deploy. What the plan replaces gets a new volume.
    """
    _refuse_smaller_of_jobs(stack, plan)
    changed = {m["pool"] for action, address in plan.changes if action == "update" and (m := _INSTANCE.match(address))}
    declared = {pool: stack.modules.get(pool, {}).get("disk_gb", 0) for pool in sorted(changed)}
    for pool, disk_gb in declared.items():
        existing = _existing(stack, pool) if disk_gb else 0
        if disk_gb and disk_gb < existing:
            raise DiskTooSmall(
                f"the volumes of the nodes have {existing} GB, and a volume does not shrink",
                field=f"{pool}.disk_gb",
                given=disk_gb,
                hint=f"Nothing was changed. Declare at least {existing}; a smaller disk comes with new nodes: "
                f"`skyinfra deploy {stack.name} --replace 'module.{pool}.terraform_data.declared[\"head\"]'`, "
                'and in the same way for `["worker"]` where the pool has more than one node.',
            )


def _refuse_smaller_of_jobs(stack: SynthesizedStack, plan: Plan) -> None:
    changed = {address for action, address in plan.changes if action == "update" and _JOBS.fullmatch(address)}
    for volume in stack.resources() if changed else ():
        declared = stack.modules.get(volume.module, {}).get("head_volume_gb") or _JOBS_GB
        existing = volume.attributes.get("size") or 0
        if volume.address in changed and declared < existing:
            raise DiskTooSmall(
                f"the volume with the jobs of the head has {existing} GB, and a volume does not shrink",
                field=f"{volume.module}.head_volume_gb",
                given=declared,
                hint=f"Nothing was changed. Declare at least {existing}; a smaller volume comes with a new head, and "
                f"ends its jobs: `skyinfra deploy {stack.name} --replace '{volume.address}'`.",
            )


def _existing(stack: SynthesizedStack, pool: str) -> int:
    """The largest root volume of the instances of a *pool*; 0 where they are a group, whose head has another disk."""
    mine = [each for each in stack.resources() if each.module == pool]
    if any(each.type == "aws_autoscaling_group" for each in mine):
        return 0
    volumes = [
        v for each in mine if each.type == "aws_instance" for v in each.attributes.get("root_block_device") or ()
    ]
    return max((volume.get("volume_size") or 0 for volume in volumes), default=0)
