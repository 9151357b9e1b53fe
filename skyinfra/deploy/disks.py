"""Disks of machines that run, and volumes that outlive fleets: what shrinks or removes one is refused.

A disk grows in place, and no cloud shrinks one.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from skyinfra.errors import DiskTooSmall, VolumeProtected
from skyinfra.offers import usd
from skyinfra.providers import kinds, read
from skyinfra.terraform.program import Plan
from skyinfra.terraform.state import Resource
from skyinfra.terraform.synthesized import SynthesizedStack

_INSTANCE = re.compile(r"module\.(?P<pool>[^.\[]+?)(?:__[^.\[]+)?\.aws_instance\.(?:head|worker\[.+\])")
_JOBS = re.compile(r"module\.[^.\[]+\.aws_ebs_volume\.head")
# The default of modules/aws.
_JOBS_GB = 20
# By the resource: the argument with the size.
_SIZES = {
    data.volume.resource: next(name for name, value in data.volume.arguments.items() if value == "{size_gb}")
    for data in map(read, kinds())
    if data.volume is not None
}


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
                hint=f"Nothing was changed. Declare at least {existing}; a smaller one comes with new nodes: `skyinfra "
                f"deploy {stack.name} --replace 'module.{stack.module_of(pool)}.terraform_data.declared[\"head\"]'`, "
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


def refuse_volumes(stack: SynthesizedStack, resources: Sequence[Resource], *, destroy: bool) -> None:
    """Raises `VolumeProtected` where a destroy of *stack* would remove volumes, `DiskTooSmall` where one shrinks.

    A cloud refuses to shrink a disk in the middle of a deploy, or makes an empty one in its place.
    """
    declared = {volume["name"]: volume for volume in stack.volumes}
    existing = [each for each in resources if not each.module and each.type in _SIZES]
    protected = _protected(resources) | {name: volume["protect"] for name, volume in declared.items()}
    kept = [each.name for each in existing if protected.get(each.name)]
    if destroy and kept:
        raise _refused(stack, kept)
    for each in existing:
        wanted = declared.get(each.name, {}).get("size_gb")
        has = each.attributes.get(_SIZES[each.type])
        if not destroy and wanted and has and wanted < has:
            raise DiskTooSmall(
                f"the volume has {has} GB, and a volume does not shrink",
                field=f"{stack.name}.{each.name}.size_gb",
                given=wanted,
                hint=f"Nothing was changed. Declare at least {has}, or another volume, and copy the data.",
            )


def refuse_removed(stack: SynthesizedStack, resources: Sequence[Resource], plan: Plan) -> None:
    """Raises `VolumeProtected` where *plan* removes a volume that was protected when it was deployed last.

    Terraform knows of no protection where the declaration is gone.
    """
    declared = {volume["name"]: volume["protect"] for volume in stack.volumes}
    protected = _protected(resources) | declared
    gone = {address for action, address in plan.changes if action in ("delete", "replace")}
    kept = [
        each.name
        for each in resources
        if not each.module and each.type in _SIZES and each.address in gone and protected.get(each.name)
    ]
    if kept:
        raise _refused(stack, kept)


def _protected(resources: Sequence[Resource]) -> dict[str, bool]:
    """Returns by name whether a volume is protected, as the last deploy left it in the state."""
    for each in resources:
        if (each.module, each.type, each.name) == ("", "terraform_data", "volumes"):
            # A state has the value beside its type, for terraform_data takes any.
            return dict((each.attributes.get("input") or {}).get("value") or {})
    return {}


def _refused(stack: SynthesizedStack, names: Sequence[str]) -> VolumeProtected:
    return VolumeProtected(
        "would be removed with all that is on it, or made anew without it",
        field=f"{stack.name}.{', '.join(names)}",
        hint="Nothing was changed. To remove it all the same, declare sky.Volume(..., protect=False) and "
        f"`skyinfra deploy {stack.name}`; then leave it out and deploy again, or `skyinfra destroy {stack.name}`.",
    )


def cost_lines(volumes: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yields a sentence for each of the *volumes* that a stack declares or mounts: size, place and price."""
    for volume in volumes:
        path = f" at {volume['path']}" if "path" in volume else ""
        yield f"volume {volume['name']}{path}: {_described(volume)}"


def kept_lines(stack: SynthesizedStack) -> list[str]:
    """Returns a sentence for each volume that the pools of *stack* mount, which a destroy of it leaves."""
    mounted = {volume["name"]: volume for pool in stack.pools for volume in pool.get("volumes", ())}
    return [
        f"kept: volume {name}, {_described(volume)}. "
        + (
            f"`skyinfra destroy {volume['stack']}` removes it, once it is declared with protect=False."
            if "stack" in volume
            else "No stack of this project made it."
        )
        for name, volume in mounted.items()
    ]


def _described(volume: Mapping[str, Any]) -> str:
    size = f"{volume['size_gb']} GB of {volume['kind']}" if "size_gb" in volume else "of a size that is not declared"
    usd_per_month = volume.get("usd_per_month")
    price = f"{usd(usd_per_month)} a month ({volume['price_note']})" if usd_per_month else "price not known"
    return f"{size} in {volume['zone']}, {price}"
