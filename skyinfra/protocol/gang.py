"""Gangs: the ranks of one program, which start together on a slot each and end together.

A client asks the head for slots (`gang_ask` of `skyinfra.protocol.services`); the head grants all of them or none, in
the order in which gangs asked. The client sends each rank as a task to its slot. The node (`skyinfra.worker.ranks`)
tells the head that the rank has its slot (`gang_join`); once all ranks have, every rank starts. The node reports how
the rank ended (`gang_report`). The first failure ends the gang: calls of `gang_state` return then. The client releases
the slots last (`gang_release`).
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Literal, TypedDict

from skyinfra.errors import InvalidNodeConfig, NotInTask
from skyinfra.protocol import _schema

# The variable in which a rank finds its `Gang`, as JSON.
VARIABLE = "SKYINFRA_GANG"

# The variable with the slots that a task on several of them holds.
HELD = "SKYINFRA_HELD_SLOTS"

# The variable that confines a process to NeuronCores: a range such as ``0-3``.
NEURON_CORES = "NEURON_RT_VISIBLE_CORES"
# Is set where ranks of JAX initialize `jax.distributed` before anything else.
MEETS = "SKYINFRA_JAX_DISTRIBUTED"

Framework = Literal["torch", "jax", "none"]
# Waiting: for slots. Granted: it has slots, not all ranks have arrived. Unknown: the head has no such gang any more.
Phase = Literal["waiting", "granted", "started", "over", "unknown"]
# (node, slots, how many of them), in order of preference.
Candidates = tuple[tuple[str, tuple[str, ...], int], ...]


class GangState(TypedDict):
    """A gang as the head knows it.

    members: address and port of each rank, once the gang has started. missing: the slots whose ranks have not arrived.
    first: the rank that failed first; died: its process died without a report.
    """

    phase: Phase
    slots: list[str]
    members: list[tuple[str, int]]
    missing: list[str]
    first: int | None
    died: bool


# Variables that a framework needs besides those of the gang; the image and the call may say otherwise.
DEFAULTS: dict[Framework, dict[str, str]] = {
    # Where an operation of NCCL fails, the process ends, and with it the gang; so it does where NCCL itself hangs for
    # that long (docs.pytorch.org, torch_nccl_environment_variables). The time that a single operation may take is no
    # variable: torch takes it from init_process_group(timeout=...).
    "torch": {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "1", "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC": "600"},
    # The process of a slot stays between tasks: with 75 % of its device's memory it would leave a rank too little.
    "jax": {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"},
    "none": {},
}


@dataclass(frozen=True)
class _Place:
    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    node_rank: int
    nodes: tuple[str, ...]
    slots: tuple[str, ...]


@dataclass(frozen=True)
class Gang(_Place):
    """The place of a process in its gang.

    rank: from 0, of *world_size*. local_rank: among the *local_world_size* ranks of its node. nodes: names of the
    gang's nodes; node_rank: the position of this one. slots: of all ranks, by rank. master_address, master_port: of
    rank 0's node, where rank 0 may listen (with ``SO_REUSEADDR``, as torch and JAX do). restart: how often the gang was
    started before.
    """

    master_address: str
    master_port: int
    restart: int = 0


def gang() -> Gang:
    """Returns the place of this process in its gang. Raises `NotInTask` outside of one."""
    text = os.environ.get(VARIABLE)
    if text is None:
        raise NotInTask(
            "gang() tells a rank about its gang, and this is none",
            hint="Start the function with pool.launch(function), or the script with `skyinfra run --torchrun`.",
        )
    return _schema.read(Gang, json.loads(text), path=VARIABLE, error=InvalidNodeConfig)


@dataclass(frozen=True)
class Wish:
    """The slots that a gang may have: on *nodes* of the nodes, on each as many of its slots as is said.

    gang: unique. client: Dask's name of the client; the gang ends with its connection.
    """

    gang: str
    client: str
    nodes: int
    candidates: Candidates

    @property
    def size(self) -> int:
        """The number of slots on the nodes that are preferred."""
        return sum(count for _, _, count in self.candidates[: self.nodes])


@dataclass(frozen=True)
class Rank(_Place):
    """One rank, as the client describes it to the node.

    gang: the one that was granted its slots. holds: it runs nothing, and keeps its slot for another rank. framework:
    None for a plain task that takes several slots. visible: the variables that confine it to its devices. run_id:
    names its lines on *topic*, see `skyinfra.worker.scripts`; without a topic they go to the output of the task.
    timeout: seconds, from its start on.
    """

    gang: str
    framework: Framework | None
    restart: int = 0
    max_restarts: int = 0
    holds: bool = False
    visible: dict[str, str] = field(default_factory=dict)
    env: dict[str, str] = field(default_factory=dict)
    topic: str = ""
    run_id: str = ""
    timeout: float | None = None


@dataclass(frozen=True)
class Work:
    """The work of a rank: a pickled *call*, or the program *source* with *args*. name: for messages and of its file."""

    name: str
    call: bytes | None = None
    source: bytes = b""
    args: tuple[str, ...] = ()


@dataclass(frozen=True)
class RankEnd:
    """The end of a rank: a pickled ``Outcome``, an exit code (negative for a signal), or both.

    Neither: it was ended because the gang was over. ok: it has done its work. last: the last lines that it printed,
    where it left no outcome and its output is kept on the node.
    """

    outcome: bytes | None = None
    code: int | None = None
    ok: bool = False
    last: tuple[str, ...] = ()


def environment(rank: Rank, address: str, port: int) -> dict[str, str]:
    """The variables of *rank*, whose rank 0 may listen at *address* and *port*; of a plain task, the slots it holds."""
    if rank.framework is None:
        return {HELD: ",".join(rank.slots)}
    known = {**asdict(rank), "master_address": address, "master_port": port}
    place = {each.name: known[each.name] for each in fields(Gang)}
    plain = {f"SKYINFRA_{name.upper()}": str(value) for name, value in place.items() if name not in ("nodes", "slots")}
    ours = {VARIABLE: json.dumps(place), **plain}
    of_framework = {"torch": _torch, "jax": _jax}.get(rank.framework)
    return ours if of_framework is None else ours | of_framework(rank, address, port) | _neuron(rank, address, port)


def _torch(rank: Rank, address: str, port: int) -> dict[str, str]:
    """As torchrun sets them (torch/distributed/run.py). Not TORCHELASTIC_USE_AGENT_STORE: rank 0 keeps the store."""
    return {
        "MASTER_ADDR": address,
        "MASTER_PORT": str(port),
        "RANK": str(rank.rank),
        "WORLD_SIZE": str(rank.world_size),
        "LOCAL_RANK": str(rank.local_rank),
        "LOCAL_WORLD_SIZE": str(rank.local_world_size),
        "GROUP_RANK": str(rank.node_rank),
        "GROUP_WORLD_SIZE": str(len(rank.nodes)),
        "ROLE_NAME": "default",
        "ROLE_RANK": str(rank.rank),
        "ROLE_WORLD_SIZE": str(rank.world_size),
        "TORCHELASTIC_RUN_ID": rank.gang,
        "TORCHELASTIC_RESTART_COUNT": str(rank.restart),
        "TORCHELASTIC_MAX_RESTARTS": str(rank.max_restarts),
    }


def _jax(rank: Rank, address: str, port: int) -> dict[str, str]:
    """`jax.distributed.initialize` reads the address and the devices (jax/_src/distributed.py). The number of processes
    and the index of this one are arguments of it."""
    # A rank may see the devices of the other ranks of its node too.
    grouped = rank.local_world_size > 1 and any("," in value for value in rank.visible.values())
    devices = {"JAX_LOCAL_DEVICE_IDS": str(rank.local_rank)} if grouped else {}
    return {
        **devices,
        "JAX_COORDINATOR_ADDRESS": _endpoint(address, port),
        "JAX_NUM_PROCESSES": str(rank.world_size),
        "JAX_PROCESS_ID": str(rank.rank),
    }


def _neuron(rank: Rank, address: str, port: int) -> dict[str, str]:
    """Returns the variables of a rank on NeuronCores; empty on any other slot.

    The runtime needs a port of its own; torch-xla (torch_xla/_internal/neuron.py) would take one for every gang. JAX,
    and torch-xla in the mode SPMD, have to know the number of cores of each rank (AWS Neuron documentation, "JAX
    NeuronX Environment Variables").
    """
    cores = rank.visible.get(NEURON_CORES)
    if cores is None:
        return {}
    meeting = {"NEURON_RT_ROOT_COMM_ID": _endpoint(address, port ^ 1)}
    if rank.framework == "torch" and not spmd(rank.env):
        return meeting
    first, _, last = cores.partition("-")
    count = str(int(last or first) - int(first) + 1)
    return {
        **meeting,
        "NEURON_PJRT_PROCESS_INDEX": str(rank.rank),
        "NEURON_PJRT_PROCESSES_NUM_DEVICES": ",".join([count] * rank.world_size),
    }


def spmd(env: Mapping[str, str]) -> bool:
    """Returns whether *env* makes one process of torch-xla use all of its cores, in place of one."""
    return env.get("XLA_USE_SPMD") == "1"


def _endpoint(address: str, port: int) -> str:
    return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"
