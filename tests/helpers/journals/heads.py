"""A head that keeps jobs, over slots whose tasks end when a test says so."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Collection
from pathlib import Path
from typing import Any, TypeVar

from local_fleets.local_peer import LocalPeer

from journals.samples import CALL, OUTCOME, wanted
from skyinfra.head.jobs import Jobs
from skyinfra.head.journal import Journal
from skyinfra.protocol import services
from skyinfra.protocol.calls import Ending, Header, Outcome
from skyinfra.protocol.jobs import JobInfo
from skyinfra.protocol.readings import Figures
from skyinfra.protocol.rpc import Call

T = TypeVar("T")


class Slots:
    """Stands for a fleet: *count* slots, whose tasks end when the test says so. closed: jobs on slots that are none of
    them any more."""

    def __init__(self, count: int = 1, **resources: int) -> None:
        self.there: list[dict[str, float]] = [{"slot": 1.0, **resources} for _ in range(count)]
        self.started: list[str] = []
        self.adopted: list[str] = []
        self.stopped: list[str] = []
        self.closing = False
        self.closed: set[str] = set()
        self.tasks: dict[str, asyncio.Future[Outcome | None]] = {}

    def slots(self) -> list[dict[str, float]]:
        return self.there

    def running(self) -> dict[str, tuple[str, float]]:
        return dict.fromkeys(self.tasks, ("n1/0", 1.0))

    async def run(
        self, header: Header, call: bytes, resources: dict[str, int], waited: float = 0.0
    ) -> tuple[Ending, str | None] | None:
        (self.adopted if header.adopted else self.started).append(header.key.split("-")[0])
        self.tasks[header.key] = asyncio.get_running_loop().create_future()
        try:
            outcome = await self.tasks[header.key]
        except asyncio.CancelledError:
            if not self.closing:
                self.stopped.append(header.key)
            raise
        finally:
            del self.tasks[header.key]
        return None if outcome is None else (Ending.of(outcome), "n1/0")

    async def figures(self, slot: str, key: str) -> Figures | None:
        return Figures(2, memory_peak=7) if slot == "n1/0" and key.startswith("measured-") else None

    def leave(self, keys: Collection[str]) -> None:
        self.closing = True

    def in_service(self, slot: str) -> bool:
        return slot == "n1/0" and bool(self.there)

    ended = False

    def sent_to(self, key: str) -> str | None:
        return "n1/0" if key in self.tasks else None

    def on_closed_slot(self, key: str) -> bool:
        return key.split("-")[0] in self.closed

    def release(self, key: str) -> None:
        pass

    async def all_stopped(self) -> None:
        pass

    async def close(self) -> None:
        pass

    def end(self, name: str, outcome: Outcome = OUTCOME) -> None:
        (task,) = [task for key, task in self.tasks.items() if key.startswith(f"{name}-")]
        task.set_result(outcome)


class Head:
    """The jobs of a head, asked as clients ask."""

    def __init__(self, folder: Path, **limits: int) -> None:
        folder.mkdir(exist_ok=True)
        self.jobs = Jobs(Journal(folder / "jobs"), **limits)

    async def ask(self, call: Call[..., T], **arguments: Any) -> T:
        return await call(LocalPeer(self.jobs.handlers), **arguments)

    async def submit(self, name: str, *, identity: str | None = None, **fields: Any) -> JobInfo:
        submission = wanted(name, identity or os.urandom(16).hex(), **fields)
        await self.ask(services.job_part, job=submission.id, offset=0, data=CALL)
        return await self.ask(services.job_submit, submission=submission)

    async def info(self, name: str, wait_s: float = 0) -> JobInfo:
        return await self.ask(services.job_wait, job=name, wait_s=wait_s)


def on_head(
    folder: Path, test: Callable[[Head, Slots], Awaitable[None]], slots: Slots | None = None, **limits: int
) -> None:
    """Runs *test* with a head whose jobs stand in *folder*."""

    async def run() -> None:
        head, fleet = Head(folder, **limits), slots or Slots()
        await head.jobs.load()
        head.jobs.start(fleet)  # type: ignore[arg-type]
        try:
            await asyncio.wait_for(test(head, fleet), 30)
            head.jobs.check()
        finally:
            await head.jobs.stop()

    asyncio.run(run())


async def until(condition: Callable[[], bool]) -> None:
    """Waits for *condition*; `on_head` limits how long."""
    while not condition():
        await asyncio.sleep(0.005)
