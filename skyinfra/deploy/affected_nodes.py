"""The nodes that a plan replaces, destroys, or stops and starts: why, what ends with them, and the use of fleets."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from skyinfra.deploy.missing_nodes import lost_nodes
from skyinfra.errors import NodeError, SkyinfraError
from skyinfra.protocol import questions
from skyinfra.protocol.manifest import Manifest
from skyinfra.providers import machines_of
from skyinfra.terraform.program import Plan
from skyinfra.terraform.synthesized import SynthesizedStack

if TYPE_CHECKING:
    from skyinfra.client import Questions

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
# Of who asks whether a fleet is used: for the connection to a head, and for the answer of a node.
_CONNECT_S = 10.0
_ANSWER_S = 15.0
_NAMED = 3


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


@dataclass(frozen=True)
class Use:
    """The use of *fleet*. idle_s: for how long nothing has used it; None where nobody knows, infinite where no machine
    of it is there any more. what: uses it now, or why nobody knows, in words. kept_s: for how long it is kept
    (`skyinfra keep`). silent: its head or a node does not answer, which a plan may explain: their machines are gone."""

    fleet: str
    idle_s: float | None
    what: str = ""
    kept_s: float = 0.0
    silent: bool = False


def uses(stack: SynthesizedStack, plan: Plan | None = None) -> list[Use]:
    """Returns the use of each fleet of *stack*. Raises what Terraform's outputs and state raise.

    plan: of its destroy, which has asked the cloud for the machines; without one, nobody knows of machines of a cloud
    whether they are gone.
    """
    fleets, resources = stack.fleets(), stack.resources()
    found = [_use(stack, manifest, plan) for manifest in fleets.values()]
    for name in (each["name"] for each in stack.pools if each["name"] not in fleets):
        if any(each.module == name for each in resources):
            found.append(Use(f"{stack.name}/{name}", None, "it is partly deployed, without a head to ask"))
    return found


def _use(stack: SynthesizedStack, manifest: Manifest, plan: Plan | None) -> Use:
    from skyinfra.client import open_questions

    try:
        with open_questions(manifest, timeout=_CONNECT_S, patience=_CONNECT_S, any_version=True) as fleet:
            return _asked(fleet, lambda: _gone(stack, manifest, plan))
    except SkyinfraError as error:
        # Those of a group end as their head does, for themselves; what the plan says of the group does not count them.
        ended = not manifest.group_nodes or _ends(stack, manifest.pool)
        # Whoever answers at the address of a machine that is gone.
        if ended and _gone(stack, manifest, plan) >= len(manifest.nodes):
            return Use(manifest.fleet, math.inf)
        return Use(manifest.fleet, None, error.message, silent=True)


def _asked(fleet: Questions, gone: Callable[[], int]) -> Use:
    """Returns the use of a fleet whose head answers. gone: the number of its machines that are not there any more."""
    name, now = fleet.manifest.fleet, fleet.look()
    state = now.state
    if state is None or state.idle_s is None:
        return Use(name, None, f"its head does not count that (yet): `skyinfra upgrade {name}` where it is older")
    if what := _at_work(fleet):
        return Use(name, 0.0, what)
    # Those of a group come and go: the head remembers more than there are.
    nodes = dict.fromkeys([node.name for node in fleet.manifest.nodes])
    nodes |= dict.fromkeys(sorted({slot.node for slot in (*now.slots, *now.draining)}))
    answers = fleet.ask_all([*nodes], questions.USE, wait_s=_ANSWER_S)
    silent = {node: answer.message for node, answer in answers.items() if isinstance(answer, NodeError)}
    said = [answer for answer in answers.values() if not isinstance(answer, NodeError)]
    idle_s = min([state.idle_s, *(float(each["idle_s"]) for each in said)])
    kept_s = max((float(each["keep_s"]) for each in said), default=0.0)
    if silent and len(silent) > gone():
        whys = [f"{node}: {why}" for node, why in silent.items()]
        return Use(name, None, "; ".join(whys[:_NAMED]), silent=True)
    return Use(name, 0.0 if kept_s else idle_s, kept_s=kept_s)


def _at_work(fleet: Questions) -> str:
    """Returns what runs and waits on the fleet, in words; empty where nothing does."""
    work = [f"task {task.name} on {slot}" for slot, tasks in fleet.running().items() for task in tasks]
    work += [f"job {job.name}, {job.state}" for job in fleet.jobs() if not job.over]
    return _few(work)


def _few(words: Sequence[str]) -> str:
    more = f" and {len(words) - _NAMED} more" if len(words) > _NAMED else ""
    return ", ".join(words[:_NAMED]) + more


def _ends(stack: SynthesizedStack, pool: str) -> bool:
    """Returns whether the nodes of that *pool* end themselves, as it is declared."""
    declared = next((each for each in stack.pools if each["name"] == pool), {})
    return bool(declared.get("stop_after_idle") or declared.get("max_lifetime"))


def _gone(stack: SynthesizedStack, manifest: Manifest, plan: Plan | None) -> int:
    """Returns how many nodes that the state has are not there any more, as far as is known."""
    if manifest.provider in ("local", "container"):
        lost = [address for address in lost_nodes(stack) if address.startswith(f"module.{manifest.pool}.")]
        return sum("credential" not in address for address in lost)
    if plan is None or plan.run is not None:
        return 0
    # A destroy does not destroy what the cloud has not found.
    there, nodes = {address for _, address in plan.changes}, {node.id for node in manifest.nodes}
    # On Google Cloud the id of a node is no name that another machine may get.
    mine = [
        each
        for each in stack.resources()
        if each.module == manifest.pool and nodes & {each.attributes.get(name) for name in ("id", "instance_id")}
    ]
    there -= plan.stopped
    return sum(each.address not in there for each in mine if machines_of(each.type, each.attributes) is not None)
