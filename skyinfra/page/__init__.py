"""The fleet page: nodes with their GPUs drawn, tasks, jobs and logs, for the browser of who is connected.

`answer` gives each of its files and documents. `skyinfra.client.dashboard` serves them, and admits nobody else.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
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

PATH = "/fleet"
# A node that does not answer within it is shown as one that does not answer.
_WAIT_S = 5.0
_LINES = 500
_FILES = {
    PATH: ("fleet.html", "text/html"),
    f"{PATH}/fleet.js": ("fleet.js", "text/javascript"),
    f"{PATH}/fleet.css": ("fleet.css", "text/css"),
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


class Asked(Protocol):
    """The fleet that is asked; see `skyinfra.client.questions.Questions`."""

    @property
    def manifest(self) -> Manifest: ...
    def look(self) -> Look: ...
    def node_names(self) -> list[str]: ...
    def running(self) -> Mapping[str, Sequence[Running]]: ...
    def jobs(self) -> list[JobInfo]: ...
    def ask(self, node: str, question: str, *, wait_s: float = ..., **arguments: Any) -> Any: ...
    def ask_all(
        self, nodes: Sequence[str], question: str, *, wait_s: float = ..., **arguments: Any
    ) -> dict[str, Any]: ...


@dataclass(frozen=True)
class Answer:
    """The answer to a request: HTTP status, media type and body."""

    status: int
    kind: str
    body: bytes


def answer(asked: Asked, path: str, query: Mapping[str, Sequence[str]], price: str = "") -> Answer:
    """Returns the file or document at *path*; status 404 where there is none. Blocks while the fleet is asked.

    query: values by name; of ``/fleet/log`` the ``node``, and the ``task`` (its key) where not the runner's log is
    wanted. price: what the fleet costs, in words.
    """
    if path in _FILES:
        name, kind = _FILES[path]
        content = resources.files(__name__).joinpath(name).read_bytes()
        # The rules of the look of each profile stand in no file of the page: they are those of all drawings.
        content += palette.css().encode() if kind == "text/css" else b""
        return Answer(200, f"{kind}; charset=utf-8", content)
    try:
        if path == f"{PATH}/state":
            return _document(state(asked, price))
        if path == f"{PATH}/log":
            return _document(log(asked, *(query.get(name, [""])[-1] for name in ("node", "task"))))
    except SkyinfraError as error:
        return _document({"problem": str(error)}, 503)
    return Answer(404, "text/plain; charset=utf-8", b"There is no such page.\n")


def _document(value: Mapping[str, object], status: int = 200) -> Answer:
    return Answer(status, "application/json", json.dumps(printable_tree(value)).encode())


def state(asked: Asked, price: str = "") -> dict[str, object]:
    """Returns the fleet as JSON values: its nodes with their GPUs and slots, jobs, and what is missing."""
    look, tasks, names = asked.look(), asked.running(), asked.node_names()
    readings = asked.ask_all(names, questions.METRICS, wait_s=_WAIT_S)
    manifest, reported = asked.manifest, look.state
    sick = reported.sick if reported else {}
    machines = {node.name: node for node in manifest.nodes}
    nodes: list[dict[str, object]] = []
    for name in names:
        found = readings[name]
        used = {} if isinstance(found, NodeError) else {each["slot"]["slot"]: each for each in found}
        slots = [_slot(slot, tasks, used, going=False) for slot in look.slots if slot.node == name]
        slots += [
            _slot(slot, tasks, used, going=slot.slot not in sick, sick=slot.slot in sick)
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
        "nodes": nodes,
        "jobs": [{**job.to_json(), "key": job.key} for job in asked.jobs()],
        "changes": [
            {"at": each.at, "node": each.node, "gpu": each.gpu, "layout": each.layout, "why": each.why}
            for each in changes
        ],
    }


def _problem(name: str, reported: FleetState | None, found: object) -> str | None:
    if reported and name in reported.failed:
        return f"step {reported.failed[name].step} failed: {reported.failed[name].error}"
    if reported and name in reported.out_of_service:
        return f"leaves: {reported.out_of_service[name]}"
    if reported and (sick := reported.sick_nodes().get(name)):
        return f"is sick, and takes no tasks on {sick}"
    return found.message if isinstance(found, NodeError) else None


def _slot(
    slot: InstanceInfo,
    tasks: Mapping[str, Sequence[Running]],
    used: Mapping[str, Any],
    *,
    going: bool,
    sick: bool = False,
) -> dict[str, Any]:
    reading = {key: value for key, value in used.get(slot.slot, {}).items() if key != "slot"}
    running = [{"key": each.key, "name": each.name, "seconds": each.seconds} for each in tasks.get(slot.slot, ())]
    tone = palette.tone(slot.profile, slot.size, slot.units).css_class
    return {**slot.to_json(), "tone": tone, "going": going, "sick": sick, "tasks": running, "reading": reading}


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


def log(asked: Asked, node: str, task: str) -> dict[str, object]:
    """Returns the last lines of what the task printed, or of the runner of *node*. Raises `NodeError`."""
    source = "task" if task else "runner"
    found = asked.ask(node, questions.LOG, wait_s=_WAIT_S, source=source, task=task, lines=_LINES)
    return {"node": node, "task": task, "text": undressed(str(found["text"])) if found is not None else ""}
