"""The fleet page: nodes with their GPUs drawn, tasks, jobs and logs, for the browser of who is connected.

`answer` gives each of its files and documents, those of a fleet that runs (`LiveFleet`) or of what was kept of one that
is gone (`KeptFleet`). `skyinfra.client.dashboard` serves them, and admits nobody else. What is not known is null in the
documents, never 0.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import resources
from typing import Any, Protocol

from skyinfra.errors import NodeError, SkyinfraError
from skyinfra.errors.printable import printable_tree, undressed
from skyinfra.mig import palette
from skyinfra.protocol import questions
from skyinfra.protocol.fleet import FleetState
from skyinfra.protocol.instance import InstanceInfo
from skyinfra.protocol.jobs import JobInfo
from skyinfra.protocol.manifest import Manifest
from skyinfra.protocol.readings import FleetWork

PATH = "/fleet"
# A node that does not answer within it is shown as one that does not answer.
_WAIT_S = 5.0
_LINES = 500
# Of the jobs, the newest; all of them make a page slow.
MOST_JOBS = 200
# What the page shows of a slot and of its reading, of which a large fleet has thousands.
_SHOWN = ("slot", "worker", "kind", "profile", "accelerator", "gpu", "uuid", "start", "size", "units", "shared_by")
_READ = ("utilization", "memory_used", "memory_total", "temperature", "power")
_FILES = {
    PATH: ("text/html", "fleet.html"),
    f"{PATH}/fleet.js": ("text/javascript", "parts.js", "fleet.js"),
    f"{PATH}/fleet.css": ("text/css", "fleet.css"),
}
# Nothing of another host, nothing inline: what a task prints cannot become part of the page.
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'"
)


class Look(Protocol):
    """The fleet at one moment; see `skyinfra.submission.snapshot.Snapshot`."""

    @property
    def slots(self) -> tuple[InstanceInfo, ...]: ...
    @property
    def draining(self) -> tuple[InstanceInfo, ...]: ...
    @property
    def state(self) -> FleetState | None: ...


class Running(Protocol):
    """A task that runs; see `skyinfra.submission.fleet.RunningTask`."""

    @property
    def key(self) -> str: ...
    @property
    def name(self) -> str: ...
    @property
    def seconds(self) -> float: ...


class KeptJob(Protocol):
    """A job that is kept for after its fleet; see `skyinfra.deploy.kept.KeptJob`."""

    @property
    def info(self) -> JobInfo: ...
    @property
    def kept(self) -> float: ...
    @property
    def where(self) -> str: ...
    @property
    def note(self) -> str | None: ...
    @property
    def simulated(self) -> bool | None: ...
    def logs(self, lines: int = ...) -> str: ...


class Asked(Protocol):
    """The fleet that is asked; see `skyinfra.client.questions.Questions`."""

    @property
    def manifest(self) -> Manifest: ...
    def look(self) -> Look: ...
    def node_names(self) -> list[str]: ...
    def running(self) -> Mapping[str, Sequence[Running]]: ...
    def jobs(self) -> list[JobInfo]: ...
    def work(self) -> FleetWork | None: ...
    def ask(self, node: str, question: str, *, wait_s: float = ..., **arguments: Any) -> Any: ...
    def ask_all(
        self, nodes: Sequence[str], question: str, *, wait_s: float = ..., **arguments: Any
    ) -> dict[str, Any]: ...


# Returns what a fleet has cost, see `skyinfra.deploy.spending.fleet_spent`; None where that is not known.
Spent = Callable[[], dict[str, Any] | None]


@dataclass(frozen=True)
class Answer:
    """The answer to a request: HTTP status, media type and body."""

    status: int
    kind: str
    body: bytes


class Source(Protocol):
    """Where the documents of the page come from. Its methods raise `SkyinfraError`."""

    def state(self) -> dict[str, object]: ...
    def log(self, node: str, task: str) -> dict[str, object]: ...


@dataclass(frozen=True)
class LiveFleet:
    """A fleet that runs. price: what it costs, in words; usd_per_hour: in USD, None where that is not known.
    spent: gives what it has cost."""

    asked: Asked
    price: str = ""
    usd_per_hour: float | None = None
    spent: Spent | None = None

    def state(self) -> dict[str, object]:
        """See `state`."""
        return state(self.asked, self.price, self.usd_per_hour, self.spent)

    def log(self, node: str, task: str) -> dict[str, object]:
        """Returns the last lines of what the task printed, or of the runner of *node*. Raises `NodeError`."""
        source = "task" if task else "runner"
        ask = partial(self.asked.ask, node, questions.LOG, wait_s=_WAIT_S, source=source, task=task)
        found = questions.last_lines(ask, _LINES)
        return {"node": node, "task": task, "text": undressed(str(found["text"])) if found is not None else ""}


@dataclass(frozen=True)
class KeptFleet:
    """The jobs that are kept of a fleet, which is not there. why: why not, in words. spent: what is kept of what it has
    cost, see `skyinfra.deploy.kept.kept_spent`."""

    fleet: str
    kept: Sequence[KeptJob]
    why: str
    spent: Mapping[str, Any] | None = None

    def state(self) -> dict[str, object]:
        """Returns what `state` does, as far as it is kept: the jobs, and what it has cost."""
        last = max(self.kept, key=lambda each: each.kept)
        kept = {"at": last.kept, "where": last.where, "why": self.why}
        jobs = _jobs([each.info for each in self.kept], notes={each.info.id: each.note for each in self.kept})
        rest: dict[str, object] = {
            "provider": None,
            "simulated": last.simulated,
            "price": "",
            "spent": self.spent,
            "nodes": [],
            "changes": [],
        }
        return {"fleet": self.fleet, "kept": kept, **rest, **jobs}

    def log(self, node: str, task: str) -> dict[str, object]:
        """Returns the last lines of what a job printed, as far as they are kept. Raises `NodeError`."""
        found = next((each for each in self.kept if each.info.key == task), None)
        if found is None:
            raise NodeError(f"{self.why}: this log is not kept", hint="The logs of jobs are.")
        return {"node": node, "task": task, "text": undressed(found.logs(_LINES))}


def answer(source: Source, path: str, query: Mapping[str, Sequence[str]]) -> Answer:
    """Returns the file or document at *path*; status 404 where there is none. Blocks while the fleet is asked.

    query: values by name; of ``/fleet/log`` the ``node``, and the ``task`` (its key) where not the runner's log is
    wanted.
    """
    if path in _FILES:
        kind, *names = _FILES[path]
        content = b"".join(resources.files(__name__).joinpath(name).read_bytes() for name in names)
        # The rules of the look of each profile stand in no file of the page: they are those of all drawings.
        content += palette.css().encode() if kind == "text/css" else b""
        return Answer(200, f"{kind}; charset=utf-8", content)
    try:
        if path == f"{PATH}/state":
            return _document(source.state())
        if path == f"{PATH}/log":
            return _document(source.log(*(query.get(name, [""])[-1] for name in ("node", "task"))))
    except SkyinfraError as error:
        return _document({"problem": str(error)}, 503)
    return Answer(404, "text/plain; charset=utf-8", b"There is no such page.\n")


def _document(value: Mapping[str, object], status: int = 200) -> Answer:
    text = json.dumps(_finite(printable_tree(value)), separators=(",", ":"), allow_nan=False)
    return Answer(status, "application/json", text.encode())


def _finite(value: object) -> object:
    """Returns a tree of JSON values with null for numbers that are none: no browser reads them."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(each) for key, each in value.items()}
    return [_finite(each) for each in value] if isinstance(value, list) else value


def state(
    asked: Asked, price: str = "", usd_per_hour: float | None = None, spent: Spent | None = None
) -> dict[str, object]:
    """Returns the fleet as JSON values: its nodes with their GPUs and slots, jobs, and what is missing."""
    look, tasks, names, work = asked.look(), asked.running(), asked.node_names(), asked.work()
    progress = {slot: each.to_json() for slot, each in work.progress.items()} if work else {}
    readings = asked.ask_all(names, questions.METRICS, wait_s=_WAIT_S)
    manifest, reported = asked.manifest, look.state
    sick = reported.sick if reported else {}
    machines = {node.name: node for node in manifest.nodes}
    nodes: list[dict[str, object]] = []
    for name in names:
        found = readings[name]
        used = {} if isinstance(found, NodeError) else {each["slot"]["slot"]: each for each in found}
        slots = [_slot(slot, tasks, used, progress, going=False) for slot in look.slots if slot.node == name]
        slots += [
            _slot(slot, tasks, used, progress, going=slot.slot not in sick, sick=slot.slot in sick)
            for slot in look.draining
            if slot.node == name
        ]
        there = {slot["slot"] for slot in slots}
        machine = machines.get(name)
        nodes.append(
            {
                "name": name,
                "head": bool(machine and machine.head),
                "machine": machine and machine.machine_type,
                "zone": machine and machine.zone,
                "problem": _problem(name, reported, found),
                "missing": [slot for slot in (reported.slots.get(name, ()) if reported else ()) if slot not in there],
                "gpus": _gpus(slots),
            }
        )
    changes = reported.follow.changes if reported and reported.follow else ()
    return {
        "fleet": manifest.fleet,
        "provider": manifest.provider,
        "simulated": manifest.simulated,
        "price": price,
        "usd_per_hour": usd_per_hour,
        "work": work and {name: value for name, value in work.to_json().items() if name != "progress"},
        "spent": spent() if spent is not None else None,
        "nodes": nodes,
        "changes": [
            {name: getattr(each, name) for name in ("at", "node", "gpu", "before", "layout", "why")} for each in changes
        ],
        **_jobs(asked.jobs()),
    }


def _jobs(jobs: Sequence[JobInfo], notes: Mapping[str, str | None] | None = None) -> dict[str, object]:
    """Returns the newest jobs, the newest first, and how many there are, and are queued, in all. notes: by id."""
    newest = sorted(jobs, key=lambda job: job.submitted, reverse=True)[:MOST_JOBS]
    return {
        "jobs": [{**job.to_json(), "key": job.key, "note": (notes or {}).get(job.id)} for job in newest],
        "jobs_in_all": len(jobs),
        "jobs_queued": sum(job.state == "queued" for job in jobs),
    }


def _problem(name: str, reported: FleetState | None, found: object) -> str | None:
    if reported and name in reported.failed:
        return f"step {reported.failed[name].step} failed: {reported.failed[name].error}"
    if reported and name in reported.out_of_service:
        return f"leaves: {reported.out_of_service[name]}"
    if reported and (sick := reported.sick_nodes().get(name)):
        return f"is sick, and takes no tasks on {sick}"
    if reported and name in reported.stops:
        return reported.stops[name]
    return found.message if isinstance(found, NodeError) else None


def _slot(
    slot: InstanceInfo,
    tasks: Mapping[str, Sequence[Running]],
    used: Mapping[str, Any],
    progress: Mapping[str, Any],
    *,
    going: bool,
    sick: bool = False,
) -> dict[str, Any]:
    known = used.get(slot.slot, {})
    running = [
        {"key": each.key, "name": each.name, "seconds": each.seconds, "progress": progress.get(slot.slot)}
        for each in tasks.get(slot.slot, ())
    ]
    tone = palette.tone(slot.profile, slot.size, slot.units).css_class
    shown: dict[str, Any] = {name: getattr(slot, name) for name in _SHOWN}
    reading = {name: known.get(name) for name in _READ}
    return {**shown, "tone": tone, "going": going, "sick": sick, "tasks": running, "reading": reading}


def _gpus(slots: Iterable[dict[str, Any]]) -> list[dict[str, object]]:
    """Returns the slots by the accelerator that they stand on, in the order of their places; CPU slots together."""
    by_gpu: dict[int | None, list[dict[str, Any]]] = {}
    for slot in slots:
        by_gpu.setdefault(slot.get("gpu"), []).append(slot)
    return [
        {
            "gpu": gpu,
            "accelerator": here[0].get("accelerator"),
            "units": max((slot.get("units") or 0 for slot in here), default=0) or None,
            "slots": sorted(here, key=lambda slot: (slot.get("start") or 0, slot["worker"])),
        }
        for gpu, here in sorted(by_gpu.items(), key=lambda each: (each[0] is None, each[0] or 0))
    ]
