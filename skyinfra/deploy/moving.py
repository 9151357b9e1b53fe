"""Moving pools to another stack: from one state into another, so that their nodes stay, such as after a new name."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path

from skyinfra.deploy.places import refuse_moved
from skyinfra.errors import NotSupported, PoolNotFound
from skyinfra.terraform.program import Terraform
from skyinfra.terraform.synthesized import SynthesizedStack


def move(source: SynthesizedStack, target: SynthesizedStack, pool: str | None = None) -> tuple[str, ...]:
    """Moves what the state of *source* has of *pool*, or of all its pools, into that of *target*; returns their names.

    Nothing but the two states is changed: *target* is the first that is written, so that a failure in between leaves
    resources in both, and none in neither. Raises `PoolNotFound`, `NotSupported`, `PlaceChanged`, `TerraformFailed`.
    """
    resources = source.resources()
    pools = _pools(source, target, [pool] if pool else sorted({each.module for each in resources} - {""}))
    # As they are, against what the target declares of them.
    refuse_moved(target, [each for each in resources if each.module in pools])
    for each in resources:
        if each.module in pools and each.call != target.module_of(each.module):
            hint = "Give both stacks the same line of the pool in skyinfra.places.json."
            why = f"is {each.call}, and {target.name} declares it as {target.module_of(each.module)}"
            raise NotSupported(why, field="pool", given=each.module, hint=hint)
    with tempfile.TemporaryDirectory(prefix="skyinfra-") as name:
        folder = Path(name)
        here, there = folder / "source.tfstate", folder / "target.tfstate"
        terraforms = source.prepared(), target.prepared(anew=True)
        for file, terraform in zip((here, there), terraforms, strict=True):
            if text := terraform.pull_state().strip():
                file.write_text(text, encoding="utf-8")
        mover = Terraform(folder)
        for call in sorted({each.call for each in resources if each.module in pools}):
            mover.move_state(f"module.{call}", here, there)
        terraforms[1].push_state(there)
        terraforms[0].push_state(here)
    return tuple(pools)


def _pools(source: SynthesizedStack, target: SynthesizedStack, pools: Sequence[str]) -> Sequence[str]:
    """Returns *pools*. Raises `PoolNotFound`, `NotSupported` for those that cannot be moved."""
    declared = {each["name"]: each["provider"] for each in target.pools}
    deployed, taken = ({each.module for each in stack.resources()} for stack in (source, target))
    for pool in pools:
        if pool not in deployed:
            raise PoolNotFound(f"the state of {source.name} has no such pool", field="pool", given=pool)
        if pool not in declared:
            raise PoolNotFound(
                f"{target.name} declares no pool of that name",
                field="pool",
                given=pool,
                hint="Declare it there first, under the name that it has: its nodes are named after it.",
            )
        if pool in taken:
            raise NotSupported(f"{target.name} has a pool of that name already", field="pool", given=pool)
        if declared[pool] in ("local", "container"):
            hint = f"Destroy it, and deploy it anew: skyinfra destroy {source.name}"
            raise NotSupported(
                "nodes of this machine have their files in a folder of their stack", field="pool", given=pool, hint=hint
            )
    if not pools:
        raise PoolNotFound(f"the state of {source.name} has no pools", hint="Nothing was moved.")
    return pools
