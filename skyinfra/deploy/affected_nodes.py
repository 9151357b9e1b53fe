"""The nodes that a plan replaces, destroys, or stops and starts: why, and what ends with them."""

from __future__ import annotations

import re
from dataclasses import dataclass

from skyinfra.errors import SkyinfraError
from skyinfra.protocol.manifest import Manifest
from skyinfra.providers import machines_of
from skyinfra.terraform.program import Plan
from skyinfra.terraform.synthesized import SynthesizedStack

_ADDRESS = re.compile(
    r"module\.(?P<module>(?P<pool>[^.\[]+?)(?:__[^.\[]+)?)\.(?:module\.\w+\.)?(?P<type>\w+)\.(?P<name>\w+)"
    r'(?:\["(?P<key>[^"]+)"\]|\[\d+\])?'
)
# Instances that get another machine type in place: their provider stops and starts them for it.
_RESTARTED = "aws_instance"
# What keeps the jobs of a head, of each provider.
_STATES = ("terraform_data.state", "aws_ebs_volume.head")
# Reasons of a planned change, as `terraform plan -json` names them.
_REASONS = {
    "cannot_update": "what is declared cannot be changed on a machine that runs",
    "replace_triggered_by": "its image, its software or another part of what it was made from has changed",
    "requested": "--replace asks for it",
    "tainted": "its creation had failed",
    "delete_because_each_key": "it is not declared any more",
    "delete_because_no_resource_config": "its pool is not declared any more",
    "delete_because_no_module": "its pool is not declared any more",
}
# With it begins the reason of a node that is replaced for what its pool declares, and goes on with what it has.
SICK = "it is sick"
_PATIENCE_S = 3.0

# The names of the tasks on each slot, and how many jobs have not ended.
_Running = tuple[dict[str, list[str]], int]


@dataclass(frozen=True)
class Ending:
    """A node, or the group of a pool (*node* is None), that a plan replaces, destroys, or stops and starts (update).

    tasks: the names of those that run there; None where the head did not answer. jobs: how many the head keeps that
    have not ended, where it is the head that ends. fate: what becomes of them.
    """

    pool: str
    node: str | None
    action: str
    reason: str
    tasks: tuple[str, ...] | None
    jobs: int = 0
    fate: str = ""

    def __str__(self) -> str:
        """One sentence, for a person."""
        what = f"the nodes of {self.pool} are" if self.node is None else f"{self.node} is"
        verb = {"replace": "replaced", "update": "stopped and started"}.get(self.action, "destroyed")
        if self.tasks is None:
            runs = "what runs there could not be asked"
        else:
            runs = f"ends there: {', '.join(self.tasks)}" if self.tasks else "no task runs there"
        jobs = f"; the {self.jobs} jobs of the fleet {self.fate}" if self.jobs else ""
        return f"{what} {verb}{f', for {self.reason}' if self.reason else ''}: {runs}{jobs}"


def endings(stack: SynthesizedStack, plan: Plan) -> tuple[Ending, ...]:
    """Returns the nodes that *plan* replaces, destroys, or stops and starts.

    Asks the heads of their fleets what runs there.
    """
    restarted = _restarted(stack, plan)
    found = [
        (match, address, action)
        for action, address in plan.changes
        if (action in ("replace", "delete") or address in restarted)
        and (match := _ADDRESS.fullmatch(address))
        and _is_node(match)
    ]
    fleets = stack.fleets() if found else {}
    asked = {pool: _running(fleets[pool]) for pool in {match["pool"] for match, _, _ in found} & set(fleets)}
    # What is to keep the jobs is only made now, or goes as well.
    changed = {address for action, address in plan.changes if action != "update"}
    return tuple(
        _ending(
            fleets[match["pool"]],
            match,
            action,
            restarted.get(address) or _reason(plan.reasons.get(address, "")),
            asked[match["pool"]],
            loses_jobs=any(f"module.{match['module']}.{state}" in changed for state in _STATES),
        )
        for match, address, action in found
        if match["pool"] in fleets
    )


def _reason(given: str) -> str:
    return given if given.startswith(SICK) else _REASONS.get(given, "")


def losing_pools(plan: Plan) -> set[str]:
    """Returns the pools of which *plan* replaces or destroys nodes, or what keeps their jobs."""
    gone = (_ADDRESS.fullmatch(address) for action, address in plan.changes if action in ("replace", "delete"))
    return {
        match["pool"] for match in gone if match and (_is_node(match) or f"{match['type']}.{match['name']}" in _STATES)
    }


def _restarted(stack: SynthesizedStack, plan: Plan) -> dict[str, str]:
    """Returns the reasons of the instances that *plan* gives another machine type in place, by their addresses."""
    updated = {
        address: match
        for action, address in plan.changes
        if action == "update" and (match := _ADDRESS.fullmatch(address)) and match["type"] == _RESTARTED
    }
    existing = {each.address: machines_of(each.type, each.attributes) for each in stack.resources()} if updated else {}
    reasons = {}
    for address, match in updated.items():
        pool = next((each for each in stack.pools if each["name"] == match["pool"]), None)
        machines = existing.get(address)
        if pool is None or machines is None:
            continue
        # A head besides the nodes has a machine type of its own.
        declared = (pool.get("head") if match["name"] == "head" else None) or pool["machine_types"][0]
        if machines.machine_type != declared:
            reasons[address] = f"another machine type: {machines.machine_type} becomes {declared}"
    return reasons


def _is_node(match: re.Match[str]) -> bool:
    return (match["type"], match["name"]) == ("terraform_data", "node") or machines_of(match["type"], {}) is not None


def _ending(
    manifest: Manifest, match: re.Match[str], action: str, reason: str, running: _Running | None, *, loses_jobs: bool
) -> Ending:
    head = next(node.name for node in manifest.nodes if node.head)
    node = match["key"] or (head if match["name"] == "head" else None)
    tasks = None
    if running is not None:
        named = {each.name for each in manifest.nodes}
        # The manifest does not name the nodes of a group.
        here = [
            (slot, names)
            for slot, names in sorted(running[0].items())
            if slot.rpartition("/")[0] == node or (node is None and slot.rpartition("/")[0] not in named)
        ]
        tasks = tuple(name for _, names in here for name in names)
    jobs = running[1] if running is not None and node == head else 0
    # A cloud node of 0.1.0 does not use the volume that is attached to it.
    fate = "go on with the next head" + (", unless 0.1.0 made this one" if manifest.provider == "aws" else "")
    if action == "update":
        fate = "go on when it has started"
    elif loses_jobs:
        fate = "end with its head"
    return Ending(manifest.pool, node, action, reason, tasks, jobs, fate)


def _running(manifest: Manifest) -> _Running | None:
    """The names of the tasks that run on each slot, and how many jobs have not ended; None where nobody answers."""
    from skyinfra.client import open_pool

    try:
        with open_pool(manifest, timeout=_PATIENCE_S) as pool:
            slots = {slot: [task.name for task in tasks] for slot, tasks in pool.running().items()}
            return slots, sum(job.state in ("queued", "running") for job in pool.jobs())
    except SkyinfraError:
        return None
