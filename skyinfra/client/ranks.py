"""The ranks of a gang: which slots they may have, what each of them sees, and why one failed."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import cast, get_args

from skyinfra.engine import deaths
from skyinfra.engine.executor import may_pass
from skyinfra.errors import GangFailed, InvalidField, NotSupported, SlotLost, counted, did_you_mean
from skyinfra.protocol.calls import Outcome, SecretUse
from skyinfra.protocol.gang import NEURON_CORES, Candidates, Framework, Rank, RankEnd, Work, spmd
from skyinfra.protocol.instance import InstanceInfo
from skyinfra.protocol.manifest import Manifest
from skyinfra.submission.snapshot import Snapshot, Target
from skyinfra.tasks import outcomes
from skyinfra.tasks.included import Included
from skyinfra.tasks.task import Options

# While a gang runs: the slots that it has, lines of a rank; None is its end.
Lines = list[list[str]]
Received = tuple[int, Lines] | list[InstanceInfo] | None


@dataclass(frozen=True)
class Launch:
    """A gang to start. Raises `InvalidField`.

    nodes, per_node: the number of nodes, and of slots on each; None is all that are there. start_within: seconds until
    all ranks must have their slots. settings: the options of the function, of which *target*, *env* and *secrets* have
    theirs already. key: of one task that takes several slots, which has no framework; name: of that task in lists.
    included: the synced files of the client. secrets: those of each rank. deliver: called with the slots of the gang,
    and with the lines of its ranks where it is *watched*; those of others stay in the output of the tasks.
    max_restarts: None is the retries of the function, for ranks that raise.
    """

    work: Work
    target: Target
    nodes: int | None
    per_node: int | None
    framework: Framework | None = None
    env: Mapping[str, str] = field(default_factory=dict)
    max_restarts: int | None = None
    start_within: float | None = None
    settings: Options = field(default_factory=Options)
    key: str | None = None
    name: str | None = None
    included: Included | None = None
    secrets: tuple[SecretUse, ...] = ()
    watched: bool = False
    deliver: Callable[[Received], object] = lambda _: None

    def __post_init__(self) -> None:
        known = get_args(Framework)
        if self.key is None and self.framework not in known:
            hint = did_you_mean(str(self.framework), known) or f"One of: {', '.join(known)}."
            raise InvalidField("no such framework", field="framework", given=self.framework, hint=hint)
        for name, number in (("nodes", self.nodes), ("per_node", self.per_node)):
            if number is not None and number < 1:
                raise InvalidField("a number from 1", field=name, given=number)
        if self.max_restarts is not None and self.max_restarts < 0:
            raise InvalidField("a number from 0", field="max_restarts", given=self.max_restarts)
        if self.start_within is not None and not 0 < self.start_within < float("inf"):
            raise InvalidField("seconds, more than 0", field="timeout", given=self.start_within)
        if self.key is None and self.settings.slots > 1:
            raise NotSupported(
                "a rank takes one slot",
                field="slots",
                given=self.settings.slots,
                hint="per_node= is the number of ranks on each node; `>> pool` runs one process on several slots.",
            )

    def restarts(self, *, raised: bool) -> int:
        """Returns how often it starts again. *raised*: by an exception, for which the function has retries."""
        if self.max_restarts is not None:
            return self.max_restarts
        return self.settings.retries if raised else 0


def candidates(now: Snapshot, manifest: Manifest, launch: Launch) -> tuple[int, Candidates]:
    """Returns the number of nodes, and (node, slots, number of slots to use) for each node that has enough.

    Raises `InvalidField`, and `SlotLost` where there is no slot at all.
    """
    by_node: dict[str, list[str]] = {}
    for slot in now.slots:
        if launch.target.takes(slot):
            by_node.setdefault(slot.node, []).append(slot.slot)
    if not by_node:
        raise SlotLost(f"there is no slot for it: {launch.target} is wanted", hint=now.instead(launch.target, manifest))
    enough = {node: slots for node, slots in by_node.items() if len(slots) >= (launch.per_node or 1)}
    hint = f"Slots that it may use: {', '.join(f'{node} has {len(slots)}' for node, slots in by_node.items())}."
    if not enough:
        raise InvalidField("no node has that many slots", field="per_node", given=launch.per_node, hint=hint)
    if launch.nodes is not None and launch.nodes > len(enough):
        which = f" with {counted(launch.per_node, 'slot')}" if launch.per_node else ""
        raise InvalidField(
            f"the fleet has {counted(len(enough), 'node')}{which}", field="nodes", given=launch.nodes, hint=hint
        )
    found = tuple((node, tuple(slots), launch.per_node or len(slots)) for node, slots in enough.items())
    return launch.nodes or len(found), found


def nodes_of(manifest: Manifest, launch: Launch) -> int | None:
    """Returns the number of nodes of *launch*: on a TPU slice of several hosts all of them, for libtpu waits for each.

    Raises `InvalidField` where fewer are asked for. Programs without a framework may have any of them.
    """
    nodes = launch.nodes
    if launch.framework in (None, "none") or not any(slot.kind == "host" for slot in manifest.slots):
        return nodes
    hosts, target = manifest.node_count, launch.target
    if nodes not in (None, hosts) or target.node is not None or target.slot is not None:
        raise InvalidField(
            f"the {hosts} hosts of a TPU slice run one program, and these would be fewer",
            field="nodes",
            given=target.slot or target.node or nodes,
            hint='Leave nodes out, or say framework="none" for a program that does not use the TPU.',
        )
    return hosts


def may_come(now: Snapshot, manifest: Manifest, launch: Launch) -> bool:
    """Returns whether slots that are missing, or that a layout change brings, would be enough."""
    target = launch.target
    if now.draining or (now.state is not None and now.state.out_of_service):
        return True
    if target.profile or target.accelerator or target.slot:
        return False
    by_node: dict[str, int] = {}
    for name in now.promised(manifest):
        node = name.rpartition("/")[0]
        if target.node in (None, node):
            by_node[node] = by_node.get(node, 0) + 1
    enough = sum(count >= (launch.per_node or 1) for count in by_node.values())
    return enough >= (launch.nodes or 1) and sum(by_node.values()) > sum(map(target.takes, now.slots))


def ranks(launch: Launch, gang: str, slots: Sequence[InstanceInfo], start: int, topic: str) -> list[Rank]:
    """Returns the ranks of the *gang* that was granted *slots*, in their order: node by node. *start*: from 0.

    A rank on a whole GPU sees all GPUs that the gang has on its node, of which its local rank picks one. On any other
    kind of slot it sees what is its own: a process can use one MIG partition. One task that takes all of them sees
    them all. torch-xla gives a rank one NeuronCore, unless it is in the mode SPMD: the first one of its slot.
    """
    framework = launch.framework
    nodes = list(dict.fromkeys(slot.node for slot in slots))
    found: list[Rank] = []
    for rank, slot in enumerate(slots):
        beside = [each for each in slots if each.node == slot.node]
        sees = beside if framework is None or slot.kind == "gpu" else [slot]
        one_core = framework == "torch" and slot.kind == "cores" and not spmd(launch.env)
        found.append(
            Rank(
                gang=gang,
                rank=rank,
                world_size=len(slots),
                local_rank=beside.index(slot),
                local_world_size=len(beside),
                node_rank=nodes.index(slot.node),
                nodes=tuple(nodes),
                slots=tuple(each.slot for each in slots),
                framework=framework,
                restart=start,
                max_restarts=launch.restarts(raised=True),
                holds=framework is None and rank > 0,
                visible=_first_cores(beside) if one_core else _visible(sees),
                env=dict(launch.env),
                topic=topic,
                run_id=f"{gang}.{rank}",
                timeout=launch.settings.timeout,
            )
        )
    return found


def shared_gpus(slots: Sequence[InstanceInfo]) -> list[str]:
    """Names the GPUs on which several of *slots* are MIG partitions, as ``GPU 0 of n1`` with the ranks there."""
    by_gpu: dict[tuple[str, int | None], list[str]] = {}
    for rank, slot in enumerate(slots):
        if slot.kind == "partition" and slot.visible is not None and slot.visible[0] == "CUDA_VISIBLE_DEVICES":
            by_gpu.setdefault((slot.node, slot.gpu), []).append(str(rank))
    return [
        f"GPU {gpu} of {node} (ranks {', '.join(on_it)})" for (node, gpu), on_it in by_gpu.items() if len(on_it) > 1
    ]


def _visible(slots: Sequence[InstanceInfo]) -> dict[str, str]:
    """Returns the variable that confines a process to the devices of *slots*."""
    pairs = [slot.visible for slot in slots if slot.visible is not None]
    if not pairs:
        return {}
    name = pairs[0][0]
    variables = {name: ",".join(value for _, value in pairs)}
    if name == "ROCR_VISIBLE_DEVICES":
        # Inside the devices that ROCR leaves, HIP counts from 0 again.
        variables["HIP_VISIBLE_DEVICES"] = ",".join(str(index) for index in range(len(pairs)))
    return variables


def _first_cores(slots: Sequence[InstanceInfo]) -> dict[str, str]:
    """The first core of each of *slots*: torch-xla wants as many as a node has ranks, and takes that of LOCAL_RANK.

    So does `remap_visible_cores` in torch_xla/_internal/neuron_utils.py.
    """
    firsts = [slot.visible[1].partition("-")[0] for slot in slots if slot.visible is not None]
    return {NEURON_CORES: ",".join(firsts)}


def explain(
    name: str, rank: int, end: RankEnd | None, slot: InstanceInfo, now: Snapshot, printed: str | None = None
) -> tuple[BaseException, bool]:
    """Returns the exception for the *rank* of *name* that failed first, and whether another start may not meet it.

    *end*: None where the rank was lost. *now*: the fleet. printed: where its output is. The exception of a program is
    the cause of a `GangFailed`.
    """
    where = f"rank {rank} of {name}, on slot {slot.slot} of node {slot.node}"
    if end is None or (end.outcome is None and end.code is None):
        lost = "Its worker process or its node ended; `skyinfra status` shows which nodes are there."
        return _failed(f"{where}, lost its slot", rank, None, _lines(printed, lost)), True
    if end.outcome is None:
        code = cast(int, end.code)
        hint = _lines(printed, deaths.remedy([code]))
        return _failed(f"{where}, {deaths.of_program(code)}", rank, code, hint), True
    outcome = cast(Outcome, pickle.loads(end.outcome))  # noqa: S301 - the fleet's own, over mutual TLS
    error = cast(BaseException, outcomes.exception(now.advised(outcome), name))
    outcomes.note(error, f"Raised by {where}.")
    if end.code is None:
        return error, may_pass(outcome)
    short = outcome.failure.shortage if outcome.failure is not None else None
    failed = _failed(
        f"{where}, {deaths.of_program(end.code)}", rank, end.code, "\n".join(now.explained(short)) if short else None
    )
    failed.__cause__ = error
    return failed, True


def exit_code(error: GangFailed) -> int:
    """Returns the exit code of the rank as a shell does: 128 plus the number of the signal that ended it."""
    if error.code is None:
        return error.exit_code
    return error.code if error.code >= 0 else 128 - error.code


def _lines(*found: str | None) -> str | None:
    return "\n".join(filter(None, found)) or None


def _failed(text: str, rank: int, code: int | None, hint: str | None) -> GangFailed:
    error = GangFailed(text, hint=hint)
    error.rank, error.code = rank, code
    return error
