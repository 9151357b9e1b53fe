"""Tells webhooks of the end of jobs, and meanwhile of nodes that become sick.

Their addresses are in the head's memory alone, as secrets are.

A head that starts anew has forgotten them: the job's record says so, and they can be given again.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import Awaitable, Callable, Collection
from dataclasses import replace
from typing import Any

from skyinfra.engine.notifications import Notice, Webhook, post, webhooks
from skyinfra.errors import NotSupported
from skyinfra.protocol.jobs import JobInfo, Notification

logger = logging.getLogger("skyinfra.runner")

# Jobs with webhooks at one time.
_MOST_JOBS = 20_000
# Webhooks that are called at one time: each has a thread, and a slow one is to stop nothing else.
_AT_ONCE = 8
# Those that are being called when the head ends may take so long.
_END_S = 3.0
_OF_NODES = {
    "sick": "that it is sick",
    "stops": "that it stops",
    "size": "that it starts no more nodes",
    "budget": "the budget",
}

Delivered = Callable[[tuple[Notification, ...]], Awaitable[None]]


class Notices:
    """The webhooks of jobs, by their ids."""

    def __init__(self) -> None:
        self._kept: dict[str, tuple[str, tuple[Webhook, ...]]] = {}
        self._room = asyncio.Semaphore(_AT_ONCE)
        self._sending: set[asyncio.Task[Any]] = set()

    def keep(self, job: str, pool: str, urls: Collection[str], known: Collection[str]) -> tuple[Notification, ...]:
        """Keeps *urls* in place of those that *job* had. *pool*: its name in the notice. *known*: ids of all jobs.

        Raises `InvalidField`, which shows none of them.
        """
        found = webhooks(urls)
        for stray in [each for each in self._kept if each not in known] if len(self._kept) >= _MOST_JOBS else []:
            del self._kept[stray]  # its client left before it submitted the job
        if len(self._kept) >= _MOST_JOBS:
            raise NotSupported("the head keeps no more webhooks", field="notify", hint="Cancel jobs.")
        self._kept[job] = pool, found
        return self.waiting(job)

    def waiting(self, job: str) -> tuple[Notification, ...]:
        """Returns the notifications to send of *job*; empty where nobody asked for one."""
        return tuple(Notification(webhook.host) for webhook in self._kept.get(job, ("", ()))[1])

    def over(self, info: JobInfo, delivered: Delivered) -> None:
        """Calls the webhooks of a job that has ended, then *delivered* with the results; returns at once."""
        pool, found = self._kept.pop(info.id, ("", ()))
        if found:
            task = asyncio.create_task(
                self._send(found, Notice.of(info, pool), delivered), name=f"notices of {info.name}"
            )
            self._sending.add(task)
            task.add_done_callback(self._sending.discard)

    def of_node(self, make: Callable[[str], Notice]) -> None:
        """Tells the webhooks of all jobs that have not ended what a node says; returns at once. make: gives the notice
        for a pool."""
        for pool, webhook in {each.url: (pool, each) for pool, found in self._kept.values() for each in found}.values():
            task = asyncio.create_task(self._post(webhook, make(pool)), name="notice of a node")
            self._sending.add(task)
            task.add_done_callback(self._sending.discard)

    async def stop(self) -> None:
        """Waits a moment for what is being sent."""
        if self._sending:
            await asyncio.wait(self._sending, timeout=_END_S)

    async def _send(self, found: tuple[Webhook, ...], notice: Notice, delivered: Delivered) -> None:
        await delivered(tuple(await asyncio.gather(*(self._post(webhook, notice) for webhook in found))))

    async def _post(self, webhook: Webhook, notice: Notice) -> Notification:
        async with self._room:
            problem = await _in_thread(lambda: post(webhook, notice))
        if problem is None:
            return Notification(webhook.host, "sent")
        what = notice.name if notice.state in _OF_NODES else f"job {notice.name}"
        logger.warning("%s: %s was not notified of %s: %s", what, webhook.host, _of(notice), problem)
        return Notification(webhook.host, "failed", problem)


def _of(notice: Notice) -> str:
    return _OF_NODES.get(notice.state, "its end")


def forgotten(info: JobInfo) -> tuple[Notification, ...]:
    """Returns the notifications of a job that a head finds when it starts: it has no address of those that wait."""
    why = f"its head started anew and has no address: `skyinfra jobs give STACK/POOL {info.name} --notify TARGET`"
    return tuple(
        replace(each, state="failed", problem=why) if each.state == "waiting" else each for each in info.notifications
    )


async def _in_thread(work: Callable[[], str | None]) -> str | None:
    """As `asyncio.to_thread`, in a thread that the end of the process does not wait for, and that is nobody else's."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[str | None] = loop.create_future()

    def finish(found: str | None) -> None:
        if not done.done():
            done.set_result(found)

    def run() -> None:
        found = work()
        with contextlib.suppress(RuntimeError):  # the loop has ended
            loop.call_soon_threadsafe(finish, found)

    threading.Thread(target=run, name="skyinfra-notice", daemon=True).start()
    return await done
