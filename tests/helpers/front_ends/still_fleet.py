"""A fleet for the fleet page that stands still: its slots, tasks, readings and jobs are those that a test gives it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from skyinfra.errors import NodeError
from skyinfra.protocol.fleet import STATE_VERSION, FleetState
from skyinfra.protocol.instance import InstanceInfo
from skyinfra.protocol.jobs import JobInfo
from skyinfra.protocol.manifest import VERSION, Endpoint, Manifest, ManifestNode
from skyinfra.protocol.readings import Figures, FleetWork, Progress, SlotReading
from skyinfra.submission.fleet import RunningTask
from skyinfra.submission.snapshot import Snapshot

GIB = 2**30
# Placement units of an H100, and the size of profiles in them.
UNITS = 8
SIZES = {"1g.10gb": 1, "2g.20gb": 2, "3g.40gb": 4, "7g.80gb": 8}
HALVES = ("3g.40gb", "3g.40gb")


def slots_of(node: str, layouts: Sequence[Sequence[str]], *, simulated: bool = False) -> list[InstanceInfo]:
    """Returns the slots of a node whose GPUs have these profiles."""
    found: list[InstanceInfo] = []
    for gpu, layout in enumerate(layouts):
        start = 0
        for profile in layout:
            index, size = len(found), SIZES[profile]
            place = {"start": start, "size": size, "units": UNITS, "gpu": gpu, "simulated": simulated}
            uuid = f"MIG-{node}-{gpu}-{start}-{profile}"
            found.append(
                InstanceInfo(
                    node,
                    index,
                    f"{node}/{index}",
                    "partition",
                    "demo/mig",
                    profile,
                    "H100",
                    uuid=uuid,
                    visible=("CUDA_VISIBLE_DEVICES", uuid),
                    memory_gb=10.0 * size,
                    **place,  # type: ignore[arg-type]
                )
            )
            start += size
    return found


def job_of(number: int, **given: Any) -> JobInfo:
    """Returns a job, the later the larger its *number*."""
    known = {"submitted": 1_000_000.0 + number, "state": "done", **given}
    return JobInfo(f"job-{number}", f"{number:032x}", "train", "function", "me@here", 0, **known)


@dataclass
class StillFleet:
    """What the page asks, see `skyinfra.page.Asked`. answers: of a node to the question for its readings, else those
    of *readings*, by slot. logs: by the key of a task, or the name of a node."""

    slots: list[InstanceInfo] = field(default_factory=lambda: slots_of("n1", [HALVES]))
    draining: list[InstanceInfo] = field(default_factory=list)
    promised: dict[str, tuple[str, ...]] = field(default_factory=dict)
    tasks: dict[str, list[RunningTask]] = field(default_factory=dict)
    readings: dict[str, SlotReading] = field(default_factory=dict)
    answers: dict[str, NodeError] = field(default_factory=dict)
    kept_jobs: list[JobInfo] = field(default_factory=list)
    counted: FleetWork | None = None
    logs: dict[str, str] = field(default_factory=dict)
    simulated: bool = False
    asked: list[str] = field(default_factory=list)

    @property
    def manifest(self) -> Manifest:
        nodes = tuple(ManifestNode(name, name, "10.0.0.1", head=not at) for at, name in enumerate(self.node_names()))
        endpoint = Endpoint("10.0.0.1", 8786)
        return Manifest(VERSION, "demo", "mig", "aws", endpoint, nodes, (), "s" * 32, simulated=self.simulated)

    def node_names(self) -> list[str]:
        return list(dict.fromkeys([*self.promised, *(slot.node for slot in (*self.slots, *self.draining))]))

    def look(self) -> Snapshot:
        state = FleetState(STATE_VERSION, self.promised)
        return Snapshot(tuple(self.slots), tuple(self.draining), state)

    def running(self) -> Mapping[str, Sequence[RunningTask]]:
        return self.tasks

    def jobs(self) -> list[JobInfo]:
        return list(self.kept_jobs)

    def work(self) -> FleetWork | None:
        return self.counted

    def ask(self, node: str, question: str, *, wait_s: float = 0.0, **arguments: Any) -> Any:
        self.asked.append(f"{question} {node}")
        found = self.logs.get(arguments["task"] or node)
        if found is None:
            raise NodeError(f"{node} does not answer")
        return {"text": found, "offset": len(found)}

    def ask_all(self, nodes: Iterable[str], question: str, *, wait_s: float = 0.0, **arguments: Any) -> dict[str, Any]:
        return {node: self.answers.get(node) or [each.to_json() for each in self._readings(node)] for node in nodes}

    def _readings(self, node: str) -> list[SlotReading]:
        here = [slot for slot in (*self.slots, *self.draining) if slot.node == node]
        return [replace(self.readings.get(slot.slot, SlotReading(slot)), slot=slot) for slot in here]


def busy_fleet() -> StillFleet:
    """A fleet with something of everything."""
    slots = [*slots_of("n1", [HALVES, ("1g.10gb",) * 3]), *slots_of("n2", [("7g.80gb",), ("2g.20gb", "1g.10gb")])]
    work = FleetWork(7200.0, 3, 10.0, (0, 1, 2) * 60, (4, 5, 6) * 60, {"n1/0": Progress(37, 100, "loss 0.31")})
    tasks = {"n1/0": [RunningTask("train-1", "train", 61.0)], "n2/0": [RunningTask("serve-1", "serve", 7300.0)]}
    readings = {"n1/0": SlotReading(slots[0], 91.0, 20 * GIB, 40 * GIB, 61, 402.0)}
    jobs = [job_of(1, slot="n1/0", started=1_000_010.0, ended=1_000_190.0, figures=Figures(5, 10, 3 * GIB, 7200.0))]
    jobs += [job_of(2, state="running", slot="n1/0", started=1_000_100.0), job_of(3, state="queued")]
    logs = {"train-1": "epoch 1\nepoch 2\n", jobs[0].key: "all done\n", jobs[1].key: "step 3\n", "n1": "runner began\n"}
    return StillFleet(
        slots, draining=[], tasks=tasks, readings=readings, kept_jobs=jobs, counted=work, logs=logs,
        promised={"n1": tuple(f"n1/{number}" for number in range(6))},
    )  # fmt: skip
