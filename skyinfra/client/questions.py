"""Questions to a fleet: its slots, tasks, jobs and logs. Who asks them runs nothing that the fleet answers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Self

from skyinfra import page
from skyinfra.client import files
from skyinfra.client.dashboard import Dashboard
from skyinfra.client.jobs import Job, Line
from skyinfra.engine.forwarding import Forward
from skyinfra.errors import InvalidField, NodeError, NotSupported, did_you_mean
from skyinfra.protocol import questions, services
from skyinfra.protocol.jobs import JobInfo
from skyinfra.protocol.manifest import Manifest
from skyinfra.protocol.readings import Figures, FleetHours, FleetWork, TaskRecord
from skyinfra.submission.fleet import ANSWER_S, AskedFleet, RunningTask
from skyinfra.submission.snapshot import Snapshot

# Nodes that are asked at the same time.
_AT_ONCE = 32


class Questions:
    """Asks *fleet*; a context manager. Use it from any thread."""

    def __init__(self, fleet: AskedFleet) -> None:
        self._fleet = fleet

    @property
    def manifest(self) -> Manifest:
        """The manifest of the fleet."""
        return self._fleet.manifest

    def node_names(self) -> list[str]:
        """Returns the names of the nodes: those of the manifest, then those that the head knows besides."""
        now = self.look()
        reported = now.state.slots if now.state is not None else {}
        known = [node.name for node in self.manifest.nodes]
        return list(dict.fromkeys([*known, *sorted({*reported, *(slot.node for slot in (*now.slots, *now.draining))})]))

    def named(self, node: str | None, field: str = "node") -> list[str]:
        """Returns *node*, or for None the names of all nodes. Raises `InvalidField` for an unknown one."""
        nodes = self.node_names()
        if node is None or node in nodes:
            return nodes if node is None else [node]
        hint = did_you_mean(node, nodes) or f"Nodes: {', '.join(nodes)}."
        raise InvalidField(f"{self.manifest.fleet} has no node of that name", field=field, given=node, hint=hint)

    def running(self) -> dict[str, list[RunningTask]]:
        """Returns the tasks that run on each slot, by its name, as the head knows it: about a second old."""
        found = self._fleet.from_head(self._fleet.connection.running())
        return {slot: [RunningTask(*each) for each in tasks] for slot, tasks in found.items()}

    def keep(self, seconds: float) -> float:
        """Keeps the fleet from being idle for so many seconds from now on; 0: no longer. Raises `FleetUnreachable`."""
        return self._fleet.from_head(self._fleet.connection.keep(seconds))

    def look(self) -> Snapshot:
        """Returns the fleet as its head describes it now. Raises `FleetUnreachable`."""
        return self._fleet.look()

    def dashboard(
        self,
        port: int = 0,
        *,
        browser: bool = False,
        price: str = "",
        usd_per_hour: float | None = None,
        spent: page.Spent | None = None,
    ) -> str:
        """Opens the fleet page on this machine until the pool is closed; returns its address.

        It shows nodes, GPUs with their partitions, tasks, jobs and logs, and leads to the scheduler's own pages. Its
        connections go through that of this pool: no port of the fleet has to be open for it. The address holds a
        token, without which other accounts of this machine get nothing there. port: where to listen; 0 is any.
        browser: whether to show it in the browser of this machine. price: what the fleet costs, in words;
        usd_per_hour: in USD, None where that is not known. spent: gives what it has cost. Raises `PortTaken`.
        """
        shown = page.LiveFleet(self, price, usd_per_hour, spent)
        dashboard = Dashboard(self._fleet.connection, partial(page.answer, shown))
        self._fleet.listen(dashboard, port, field="--port")
        if browser:
            dashboard.show()
        return dashboard.url

    def forward(
        self, node: str, port: int, *, local: int = 0, on_failure: Callable[[Exception], object] = lambda _: None
    ) -> Forward:
        """Forwards a port of this machine's loopback to *port* of the loopback of *node*, until the pool is closed.

        Connections go through the head's one port: no other port of the fleet has to be open. Every account of this
        machine can connect, as to any port of its loopback: what listens on the node has to ask for a password or a
        token. local: where to listen; 0 is any, which `Forward.port` tells. on_failure: gets the error of a connection
        that could not be made, such as `NodeError` where nothing listens there; it is called in another thread. Raises
        `PortTaken`.
        """
        forward = Forward(partial(self._fleet.way_to, node, port), on_failure)
        self._fleet.listen(forward, local, field="PORT", hint="Another one of this machine: LOCAL:PORT.")
        return forward

    def ask(self, node: str, question: str, *, wait_s: float = ANSWER_S, **arguments: Any) -> Any:
        """Returns the answer of the runner of *node*, by way of the head; see `skyinfra.protocol.questions`.

        Raises `NodeError` where it answers with an error, or not within *wait_s* seconds; `FleetUnreachable`.
        """
        return self._fleet.ask(node, question, wait_s=wait_s, **arguments)

    def ask_all(
        self, nodes: Sequence[str], question: str, *, wait_s: float = ANSWER_S, **arguments: Any
    ) -> dict[str, Any | NodeError]:
        """Asks several nodes at once. Returns the answer of each, or its error in place of that; see `ask`."""

        def ask_one(node: str) -> Any | NodeError:
            try:
                return self.ask(node, question, wait_s=wait_s, **arguments)
            except NodeError as error:
                return error

        if not nodes:
            return {}
        with ThreadPoolExecutor(min(_AT_ONCE, len(nodes))) as threads:
            return dict(zip(nodes, threads.map(ask_one, nodes), strict=True))

    def jobs(self) -> list[JobInfo]:
        """Returns the jobs that the head keeps, in the order of their submission: queued, running and ended ones."""
        return self._fleet.in_loop(Line(self._fleet.connection).ask(services.job_list))

    def job(self, name: str) -> Job[Any]:
        """Returns the job of that name, or id, or whose id begins so. Raises `JobNotFound`."""
        return Job(self._fleet, self._fleet.in_loop(Line(self._fleet.connection).wait(name, 0)))

    def hours(self, *, uses: bool = True) -> FleetHours | None:
        """Returns the hours of the machines and the *uses* of their slots; None of a head of an earlier version."""
        try:
            return self._fleet.in_loop(Line(self._fleet.connection).ask(services.hours, uses=uses))
        except NotSupported:
            return None

    def records(self) -> list[TaskRecord]:
        """Returns the tasks that ended last, in the order of their ends, with what they used.

        The head remembers five thousand since it started, each node what the last thousand used there; of jobs from
        before that, the journal knows. Nodes that do not answer tell nothing.
        """
        found = self._fleet.in_loop(Line(self._fleet.connection).ask(services.records))
        reported = self.ask_all(sorted({each.slot.rpartition("/")[0] for each in found}), questions.MEASURED)
        used = {key: each for answer in reported.values() if isinstance(answer, dict) for key, each in answer.items()}
        found = [replace(each, figures=Figures.read(used[each.key])) if each.key in used else each for each in found]
        since = min((each.submitted for each in found), default=float("inf"))
        return [*_earlier(self.jobs(), since), *found]

    def work(self) -> FleetWork | None:
        """Returns what waits at the head and ended there, and how far the running tasks are that call `sky.progress`.

        None where the head is of an earlier version, which does not count it.
        """
        try:
            return self._fleet.in_loop(Line(self._fleet.connection).ask(services.work))
        except NotSupported:
            return None

    def put(self, path: str | Path, remote: str | Path | None = None, node: str | None = None) -> str:
        """See `Pool.put`."""
        return self.put_on(path, remote, node)[0]

    def put_on(self, path: str | Path, remote: str | Path | None, node: str | None) -> tuple[str, list[str]]:
        """Copies as `put` does; returns the path there, and the nodes that have it now.

        A node that has no slot now and does not answer is left out, unless all are such nodes.
        """
        return files.put(self._fleet, path, remote, self.named(node))

    def get(self, remote: str | Path, path: str | Path, node: str | None = None) -> Path:
        """See `Pool.get`."""
        return files.get(self._fleet, remote, path, self.named(node))

    def close(self) -> None:
        """Leaves the fleet, which stays as it is. May be called again."""
        self._fleet.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()


def _earlier(jobs: Sequence[JobInfo], since: float) -> list[TaskRecord]:
    """Returns the records of *jobs* that ended before *since*, on which slot they ran is all that is known of it."""
    return [
        TaskRecord(job.key, job.submitted, job.started, job.ended, job.slot, figures=job.figures)
        for job in jobs
        if job.state in ("done", "failed") and job.slot and job.started and job.ended and job.ended < since
    ]
