"""The service of one node: the scheduler on the head, a worker per slot everywhere.

It is level-triggered: `Service` compares the actual state with the desired one and changes only the difference: at the
start, on SIGHUP, for another layout or a drain, when the scheduler ended, and repeatedly after an error that may pass,
such as a process on a GPU that has to change.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from skyinfra import desired, mig
from skyinfra.desired import Desired
from skyinfra.desired import file as desired_file
from skyinfra.desired.file import DesiredFile
from skyinfra.drain import request
from skyinfra.drain.request import Drain
from skyinfra.drain.watch import DrainWatch
from skyinfra.engine import settings
from skyinfra.errors import (
    AcceleratorMissing,
    InvalidNodeConfig,
    NodeFailed,
    PartitionFailed,
    SkyinfraError,
    StateDirectoryError,
)
from skyinfra.head import start
from skyinfra.hours.machine import MachineClock
from skyinfra.idle.watch import IdleWatch
from skyinfra.node.folder import NodeDirectory, State, Status, stamp
from skyinfra.node.node import Node
from skyinfra.node.watchdog import Watched
from skyinfra.protocol.instance import NODE_CONFIG
from skyinfra.readings.figures import TaskFigures
from skyinfra.runner import metrics, watch
from skyinfra.runner.answers import Answers
from skyinfra.runner.membership import Membership
from skyinfra.runner.notify import Notifier
from skyinfra.runner.prepare import prepare
from skyinfra.runner.reconcile import Reconciler
from skyinfra.runner.supervisor import pause
from skyinfra.runner.workers import Workers
from skyinfra.worker.process import OUTLIVES_SIGTERM

logger = logging.getLogger("skyinfra.runner")

_POLL_S = 0.2
# After the grace: workers end, and their last results reach the head.
_SLACK_S = 2.0
# Errors that may pass without another configuration, and the pauses before retries; the last one repeats.
_MAY_PASS = (PartitionFailed, AcceleratorMissing, StateDirectoryError)
_RETRY_S = (2.0, 5.0, 15.0, 30.0, 60.0)


class Service:
    """Serves the node with the configuration file *path*. *partitions*: whether it may change the GPUs' layout."""

    def __init__(self, path: Path, directory: NodeDirectory, *, partitions: bool) -> None:
        self._path = path
        self._directory = directory
        self._node: Node | None = None
        self._desired: Desired | None = None
        # On the head: of the file with its own layout, and what that says.
        self._stamp: object = None
        self._kept = DesiredFile()
        self._stop = asyncio.Event()
        self._reload = asyncio.Event()
        self._workers = Workers(directory)
        self._figures = TaskFigures(directory, lambda: metrics.measure(path, cheap=True))
        self._answers = answers = Answers(path, self._workers.kill_task, self._figures.of, self._figures.all, self._use)
        self._membership = Membership(directory, self._reload, answers)
        self._reconciler = Reconciler(directory, self._workers, self._membership, self._reload, partitions)
        self._drain = DrainWatch(directory, self._membership.may_drain, self._reload)
        self._idle = IdleWatch(
            directory,
            used=self._uses,
            closed=lambda: set(self._workers) == self._workers.draining(),
            report=self._membership.report_idle,
            retire=self._membership.may_retire,
            ready=lambda: self._reconciler.phase == "serving" and (self._workers.up or self._has_no_slots),
        )
        self._declared = watch.Declared(path, directory)
        self._watched = Watched(path, directory)
        self._clock = MachineClock(directory.path)
        self._refused_tag = ""
        self._error: SkyinfraError | None = None
        self._retries = 0
        self._retry_at: float | None = None
        self._generation = 0
        self._published: Status | None = None
        self._unwritten: Status | None = None
        self._was_ready = False
        self._ending = False
        self._systemd = Notifier()

    async def run(self) -> None:
        """Serves until SIGINT or SIGTERM, after which the tasks of a node with a grace may go on for that long.

        Raises the error of the first start.

        Raises `NodeFailed` when the node's directory is removed: nothing could find this runner any more.
        """
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGINT, self._stop.set)
        loop.add_signal_handler(signal.SIGTERM, self._terminate)
        loop.add_signal_handler(signal.SIGHUP, self._reload.set)
        self._workers.share_threads()
        settings.configure(scratch=self._directory.scratch)
        os.environ[NODE_CONFIG] = str(self._path.absolute())
        # The runner that starts is the one that was waited for, or stays.
        request.end_of(self._directory, request.UPGRADE, *request.LAST)
        applying = asyncio.create_task(self._apply(anew=True))
        idling = asyncio.create_task(self._idle.run())
        measuring = asyncio.create_task(self._figures.run(self._changes_gpus))
        watching = asyncio.create_task(self._workers.watch_devices(self._changes_gpus))
        try:
            while not self._stop.is_set():
                if self._directory.lost:
                    raise NodeFailed("the node's directory was removed", field=str(self._directory.path))
                if self._node is not None and self._node.config.head:
                    self._watch_layout()
                self._drain.watch()
                if applying.done():
                    self._take_result(applying)
                    anew = self._reload.is_set() or self._membership.scheduler_ended
                    if anew or (self._retry_at is not None and time.monotonic() >= self._retry_at):
                        self._reload.clear()
                        applying = asyncio.create_task(self._apply(anew=anew))
                self._workers.check()
                if watching.done():
                    watching.result()
                self._membership.check()
                if self._node is not None:
                    self._watched.check()
                    self._membership.report(self._node, self._workers.not_started, self._watched.missing)
                    self._measure(self._node)
                self._publish()
                if self._ending and self._reconciler.phase == "drained" and self._membership.alone:
                    break
                if idling.done():
                    idling.result()
                if self._idle.by_itself:
                    break
                if self._published is not None:
                    # Configuration and secret are read, and the loop runs: from here on systemd watches it.
                    self._systemd.alive(": ".join((self._published.state, *(self._published.error or ()))))
                await pause(self._stop, _POLL_S)
        finally:
            self._systemd.stopping()
            measuring.cancel()
            watching.cancel()
            idling.cancel()
            await self._end(applying)

    def _changes_gpus(self) -> bool:
        return self._reconciler.phase == "partitioning"

    @property
    def _has_no_slots(self) -> bool:
        return self._node is not None and self._node.config.scheduler_only

    async def _uses(self) -> bool:
        return self._answers.commands.used() or self._answers.files.active or bool(await self._workers.busy(kept=False))

    def _use(self) -> dict[str, Any]:
        return self._idle.use(self._answers.commands.active or self._answers.files.active)

    def _measure(self, node: Node) -> None:
        """Measures now and then for how long the machine runs, and informs the head."""
        if self._clock.due():
            given = node.config.given
            self._membership.measured(node, self._clock.measure(node.name, node.config.provider, given=given))

    def _terminate(self) -> None:
        """Ends the service, after a drain where the node has a grace. Batch systems send the signal several times."""
        grace_s = self._node.config.grace_seconds if self._node is not None else 0
        if not grace_s:
            self._stop.set()
        elif not self._ending:
            self._ending = True
            until = time.time() + grace_s
            asyncio.get_running_loop().call_later(grace_s + _SLACK_S, self._stop.set)
            try:
                request.write(
                    self._directory,
                    Drain(request.VERSION, request.ENDING, "the node is asked to end", until, request.this_boot()),
                )
            except StateDirectoryError as error:
                logger.warning("%s", error)
                self._stop.set()

    def _watch_layout(self) -> None:
        """On the head: takes what the provider's tag declares, and notices another layout of its own."""
        try:
            self._declared.take()
        except SkyinfraError as error:
            if str(error) != self._refused_tag:
                logger.error("%s: %s", type(error).__name__, error)
            self._refused_tag = str(error)
        seen = stamp(self._directory.desired_file)
        if seen != self._stamp:
            self._stamp = seen
            kept = self._read_kept()
            if (kept.declared, kept.by_node) != (self._kept.declared, self._kept.by_node):
                self._reload.set()
            self._kept = kept

    def _read_kept(self) -> DesiredFile:
        """Returns the desired layout that the node keeps; where something has spoiled the file, it is written anew."""
        try:
            return desired_file.read(self._directory)
        except InvalidNodeConfig as error:
            logger.error("%s: %s", type(error).__name__, error)
        if self._generation:
            with contextlib.suppress(StateDirectoryError):
                desired_file.update(self._directory, **vars(self._kept))
        return self._kept

    def _take_result(self, applying: asyncio.Task[None]) -> None:
        """Handles the error of an `_apply`: the first one must give slots, a later one may leave the node as it was."""
        error = applying.exception()
        if error is None or error is self._error:
            return
        serves = self._generation > 0 or (isinstance(error, PartitionFailed) and self._workers.slots)
        if not isinstance(error, SkyinfraError) or not serves:
            raise error
        if str(error) != str(self._error):
            logger.error("%s: %s", type(error).__name__, error)
        if self._retries == 0:
            # Answers a waiting `boot`; a retry is no answer.
            self._generation += 1
        self._error = error
        if isinstance(error, _MAY_PASS):
            self._retry_at = time.monotonic() + _RETRY_S[min(self._retries, len(_RETRY_S) - 1)]

    async def _apply(self, *, anew: bool) -> None:
        """Brings the node to the desired state; ends early where that changes. *anew*: whether this is no retry."""
        self._retry_at, self._retries = None, 0 if anew else self._retries + 1
        loaded = await asyncio.to_thread(Node.load, self._path)
        if loaded.config.grace_seconds:
            os.environ[OUTLIVES_SIGTERM] = "1"
        if anew:
            self._error = None
        self._membership.obstacle = None
        found = await self._find_desired(loaded)
        node = replace(loaded, config=found.config)
        self._node, self._desired = node, found
        self._idle.update(node)
        self._membership.offer(found.layout)
        drain = await self._drain.wanted(node)
        if drain is not None:
            done = await self._reconciler.drain(node, drain)
        else:
            self._reconciler.phase = "starting"
            await prepare(node.config, self._directory)
            done = await self._reconciler.run(node)
            if done and self._error is not None:
                logger.info("what was refused is done now")
        if done:
            self._error = None
            self._reconciler.phase = "serving" if drain is None else "drained"
            self._generation += 1

    async def _find_desired(self, node: Node) -> Desired:
        handed = self._membership.layout_for(node)
        with contextlib.suppress(StateDirectoryError):
            # What a runner of the version before has kept; until it is written here, it is read there.
            await asyncio.to_thread(desired_file.update, self._directory)
        self._kept = await asyncio.to_thread(self._read_kept)
        found = await asyncio.to_thread(desired.find, node.config, node.sha256, self._directory, handed)
        if found.refused is not None and (self._desired is None or str(self._desired.refused) != str(found.refused)):
            logger.error("%s: %s", type(found.refused).__name__, found.refused)
        if found.source != "node.json":
            try:
                desired.remember(found.layout, node.sha256, self._directory)
            except StateDirectoryError as error:
                # The next boot does not know this layout before its head answers.
                logger.warning("%s", error)
        return found

    async def _end(self, applying: asyncio.Task[None]) -> None:
        self._drain.close()
        applying.cancel()
        await asyncio.wait({applying})
        if not applying.cancelled() and (error := applying.exception()) is not None:
            unknown = NodeFailed(f"{type(error).__name__}: {error}")
            self._error = error if isinstance(error, SkyinfraError) else unknown
        await self._workers.stop(self._workers)
        await self._membership.close()
        self._reconciler.phase = "failed" if self._error else "stopped"
        self._publish()

    def _publish(self) -> None:
        """Writes ``status.json`` where the status has changed."""
        status = self._status()
        if status is None or status == self._published or self._directory.lost:
            return
        try:
            self._directory.write(self._directory.status_file, status.dumps())
        except StateDirectoryError as error:
            if not self._was_ready:
                raise
            # Tasks go on; readers see the old status until there is space again.
            if status != self._unwritten:
                logger.warning("%s", error)
            self._unwritten = status
        else:
            self._published = status
            self._was_ready |= status.state == "ready"

    def _status(self) -> Status | None:
        if self._node is None or self._desired is None:
            return None
        up = self._workers.up or self._node.config.scheduler_only
        state: State = "ready" if self._reconciler.phase == "serving" and up else self._reconciler.phase
        if self._error is not None:
            state = "failed"
        error = self._error or self._membership.obstacle or self._desired.refused
        error = error or self._declared.refused or self._membership.refused
        if error is None and self._idle.problem is not None:
            error = NodeFailed(self._idle.problem)
        problem = (type(error).__name__, str(error)) if error is not None else None
        if error is None and state == "serving" and self._workers.problems:
            problem = "NodeFailed", "; ".join(self._workers.problems)
        endpoint, accelerator = self._membership.endpoint, self._node.config.accelerator
        return Status(
            fleet=self._node.config.fleet,
            node=self._node.name,
            state=state,
            config_sha256=self._node.sha256,
            pid=None if state == "stopped" else os.getpid(),
            scheduler=start.host_port(endpoint) if endpoint else None,
            simulated=self._node.config.simulate,
            error=problem,
            slots=self._workers.slots,
            generation=self._generation,
            layouts=tuple(mig.layout_text(each) or "whole" for each in accelerator.layouts)
            if accelerator is not None
            else (),
            layout_from=self._desired.source,
            waits_for=self._workers.waits_for if state == "draining" else (),
            drain_reason=self._drain.drain.why if self._drain.drain is not None else None,
            unwarned=self._directory.unwarned(),
            unwatched=self._watched.missing,
            stops=self._idle.over or self._idle.stops,
        )
