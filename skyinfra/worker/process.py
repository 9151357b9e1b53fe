"""The Dask worker of one slot, and the Nanny that keeps it alive.

The Nanny runs in the runner's process. It starts the worker in a process whose environment names the slot's device
before anything is imported there. The runner itself never imports a library that opens a device.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import importlib
import itertools
import json
import logging
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from distributed import Nanny, Worker, WorkerPlugin
from distributed.core import Status
from distributed.security import Security

from skyinfra.engine import carried, dask_client, dask_comms, dask_worker, main_thread, reverse_connections, settings
from skyinfra.engine.deaths import Death
from skyinfra.engine.waiting import within
from skyinfra.errors import NotSupported, SkyinfraError
from skyinfra.errors.signals import default_in_forks
from skyinfra.node import children, faults, shares
from skyinfra.protocol import calls, services
from skyinfra.protocol.instance import GPU_MEMORY, NODE_DIRECTORY, STARTUP_KEY, VARIABLE, InstanceInfo
from skyinfra.protocol.readings import REPORT
from skyinfra.worker import attempts, cancellation, output, preload, secrets, stateful

logger = logging.getLogger("skyinfra.runner")

# A worker that cannot reach the scheduler for that long ends with its Nanny; the runner starts another one.
_DEATH_TIMEOUT_S = 60
# A client that lost the head reconnects within 30 s, or reports that the fleet is gone.
_ABANDONED_S = 45.0
# A report to the scheduler takes milliseconds.
_REPORT_S = 0.5
# For which output that a task with secrets left, and that was not masked, is kept in memory.
_LEFT_S = 60.0
# The head answers in milliseconds.
_ANSWER_S = 5.0
# Between two looks whether a worker that is to be replaced has finished.
_DRAINED_S = 0.02
# Before the checks of a slot that failed, the last one again and again: the first time, and where it failed once more
# although it had passed.
_CHECKS_S = (0.0, 0.5, 1.0, 2.0, 5.0)
_LATER_CHECKS_S = (5.0, 15.0)
# A process that fails tasks, and takes none any more, ends within that long.
_REPLACED_S = 10.0
# One that is replaced may take so long for its exit, as the runner of a node may.
_ENDED_S = 30.0
_GIVE_BACK_S = 0.1
# 0 is neutral, 1000 is killed first: see proc_pid_oom_score_adj(5).
_OOM_SCORE = 500
# Is set on nodes with a grace: batch systems send SIGTERM to all processes at once, and the runner alone decides here.
OUTLIVES_SIGTERM = "SKYINFRA_OUTLIVES_SIGTERM"
THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


def _outlive(_number: int, _frame: object) -> None:
    """Does nothing: programs that tasks start inherit no handler, unlike SIG_IGN, and forks lose it as well."""


default_in_forks(_outlive)


class SlotWorker(Worker):  # type: ignore[misc]
    """A worker that sends the description of its slot to the scheduler.

    ``scheduler_info(n_workers=-1)["workers"][ADDRESS]["skyinfra"]`` of any client is the slot's `InstanceInfo`.
    *packages*: the folder with the node's packages for tasks, the first one on the import path. The process leads a
    process group, so that the processes that its tasks start can be killed with it. *group*: that of
    its slot, see `skyinfra.node.shares`.

    A job that runs goes on while the head is away, and the worker waits for the next head, see `carried`; a worker
    without one ends with its head, and another one starts.
    """

    def __init__(
        self, *arguments: Any, slot: InstanceInfo, packages: Path, group: Path | None = None, **keywords: Any
    ) -> None:
        self.slot = slot
        self._heartbeat: asyncio.Task[Any] | None = None
        self._closing: asyncio.Task[None] | None = None
        self._rejoining: asyncio.Task[None] | None = None
        self._replacing: asyncio.Task[None] | None = None
        # Whether the runner has taken it out of service; why the slot fails tasks, what of that the head knows, and the
        # checks whether it still does.
        self._drained = False
        self._fails: str | None = None
        self._said: str | None = None
        self._checking: asyncio.Task[None] | None = None
        settings.quiet()
        dask_comms.install_connections()
        output.keep_logging()
        output.own_streams()
        os.setpgrp()
        # Before anything of a task runs. Where the group is gone, the runner divides anew.
        if group is not None:
            with contextlib.suppress(OSError):
                shares.enter(group)
        # Where memory runs out, the kernel kills this process and its tasks' processes before the runner.
        with contextlib.suppress(OSError):
            Path("/proc/self/oom_score_adj").write_text(str(_OOM_SCORE), encoding="ascii")
        if packages.is_dir():
            sys.path.insert(0, str(packages))
        # A process that would fail its tasks does not become a slot; the runner starts others.
        execute = importlib.import_module("skyinfra.worker.execute")
        if (wrong := faults.check()) is not None:
            raise wrong
        executors = {"default": main_thread.EXECUTOR}
        plugins = [_AbandonedTasks(), _FailedCalls()]
        metrics = {REPORT: lambda worker: execute.slot_report().to_json()}
        super().__init__(*arguments, plugins=plugins, executor=executors, metrics=metrics, **keywords)
        # It counts for the dashboard, and fails where a worker registers again.
        self.extensions.pop("spans", None)
        self.handlers.update([services.drain.by(self.drain), services.doubt.by(self.doubt)])
        self.stream_handlers[calls.ABANDON_MESSAGE] = self._abandon

    @staticmethod
    def lead(run: Callable[[], object]) -> None:
        """Sets this process up and executes tasks, while *run*, Dask's side, runs in another thread; ends the process.

        Is called in the main thread, the only one that may set handlers of signals.
        """
        if OUTLIVES_SIGTERM in os.environ:
            signal.signal(signal.SIGTERM, _outlive)
        # As in a program: the fork server, of which this process is, is no choice of the task.
        multiprocessing.set_start_method(None, force=True)
        multiprocessing.current_process().name = "MainProcess"
        preload.seed_anew()
        cancellation.ignore_interrupts()
        output.follow_threads()
        children.adopt()
        main_thread.lead(run, _clean_up)

    async def get_startup_information(self) -> dict[str, Any]:
        """Returns what Dask sends with the registration, the slot, and the jobs that began for another head."""
        mine = {STARTUP_KEY: self.slot.to_json(), carried.KEY: carried.keys()}
        return {**await super().get_startup_information(), **mine}

    async def heartbeat(self) -> None:
        """Reports to the scheduler."""
        self._heartbeat = asyncio.current_task()
        try:
            await super().heartbeat()
        finally:
            self._heartbeat = None

    async def execute(self, key: Any, *, stimulus_id: str) -> Any:
        """Executes a task as Dask does, once the end of the one before is sent: this one may end the process."""
        await dask_worker.send_all(self)
        return dask_worker.of_present_run(self, await super().execute(key, stimulus_id=stimulus_id))

    async def close(self, *arguments: Any, **keywords: Any) -> Any:
        """Ends the worker after a running report, which Dask would cut off and log as an error."""
        if keywords.get("reason") in dask_worker.LOST and self._rejoins():
            return None
        self.periodic_callbacks["heartbeat"].stop()
        for task in (self._closing, self._rejoining, self._checking):
            if task not in (None, asyncio.current_task()):
                task.cancel()
        if self._heartbeat not in (None, asyncio.current_task()):
            await asyncio.wait({self._heartbeat}, timeout=_REPORT_S)
        return await super().close(*arguments, **keywords)

    async def start_unsafe(self) -> Any:
        """Registers at the scheduler, and leaves connections there where it cannot open them."""
        dask_client.send_soon(self.batched_stream)
        started = await super().start_unsafe()
        self._closing = asyncio.create_task(self._leave_connections())
        return started

    async def _leave_connections(self) -> None:
        # A head of another version does not know the question.
        with contextlib.suppress(NotSupported, OSError):
            if not await services.reach(self.scheduler, address=self.address):
                await reverse_connections.leave(self)

    def _rejoins(self) -> bool:
        """Returns whether the worker goes on without its head, which is gone, for the next one."""
        if not carried.keys() or self.status not in (Status.running, Status.paused):
            return False
        if self._rejoining is None or self._rejoining.done():
            self._rejoining = asyncio.create_task(self._rejoin_or_end())
        return True

    async def _rejoin_or_end(self) -> None:
        try:
            await self._rejoin()
        except Exception:
            logger.exception("slot %s: cannot wait for another head, and ends", self.slot.slot)
            await self.close(reason="skyinfra-rejoin")

    async def _rejoin(self) -> None:
        carried.lose()
        for name in ("heartbeat", "keep-alive"):
            self.periodic_callbacks[name].stop()
        # The next head would answer a report that is on its way with that it does not know this worker.
        for task in (self._closing, self._heartbeat):
            if task is not None:
                task.cancel()
        dask_worker.lose_scheduler(self)
        # A paused worker could not hand over what it carries; whoever drains it does that again.
        self.status: Status = Status.running
        await dask_worker.register_again(self)
        self._closing = asyncio.create_task(self._leave_connections())
        for key in carried.keys(lost=True):
            # A head that knows nothing of it, such as one of an earlier version, does not say so.
            asyncio.get_running_loop().call_later(_ABANDONED_S, self._abandon_lost, key)

    def _abandon_lost(self, key: str) -> None:
        if key in carried.keys(lost=True) and (self._rejoining is None or self._rejoining.done()):
            self._abandon(key)

    def _abandon(self, key: str, cancelled: bool = False, **_: object) -> None:
        """Ends the task *key*, for which nobody waits any more, where it runs; *cancelled*: or is about to."""
        carried.forget(key)
        if dask_worker.is_cancelled(self, key):
            (cancellation.stop if cancelled else cancellation.abandon)(key)

    def replace(self) -> None:
        """Makes the Nanny start a new process in place of this one, after the task that runs.

        No task is lost, or blamed for the end of the process.
        """
        if self._replacing is None:
            self.drain(True)
            self._replacing = asyncio.create_task(self._replace())

    async def _replace(self) -> None:
        # The runner may take a worker that it has drained back into service: it is drained again.
        while carried.keys(lost=True) or any(self.drain(True).values()):
            await asyncio.sleep(_DRAINED_S)
        # Until it has ended, the slot has no process: it ends whatever a library does at the exit.
        cancellation.later(_ENDED_S, partial(os._exit, 0))
        try:
            self.periodic_callbacks["heartbeat"].stop()
            with contextlib.suppress(OSError):
                await dask_worker.unregister(self)
        finally:
            await self.close(nanny=False, reason="skyinfra-replace")

    def drain(self, on: bool) -> dict[str, Any]:
        """Takes the worker out of service, or back into it; returns what it has to finish.

        A paused worker starts nothing; the scheduler gives it no task, and moves those that have not started. More of
        them may still arrive, so this is called repeatedly. ``running``: the keys of the tasks that have started.
        ``kept``: the number of results that clients have not fetched.

        One whose jobs no head has taken over yet stays in service: a paused one could not hand them over.
        """
        self._drained = on
        self._set_service()
        return {"running": dask_worker.running(self), "kept": max(len(self.data), carried.kept())}

    def _set_service(self) -> None:
        out = self._drained or self._fails is not None
        # One whose jobs no head has taken over yet stays in service.
        now, wanted = (Status.running, Status.paused) if out else (Status.paused, Status.running)
        if self.status == now and not (out and carried.keys(lost=True)):
            self.status = wanted
        if self.status == Status.paused:
            dask_worker.give_back_waiting(self)

    def fail(self, why: str, of_machine: bool, in_a_row: int) -> None:
        """Takes the slot, which has failed so many tasks in a row, out of service, before anybody hears of the task.

        Where that is of this process, a new one takes its place. Else the slot comes back when the node passes its
        checks; the second time in a row, it passes them later.
        """
        if not of_machine:
            logger.warning("slot %s: another process takes the place of this one: %s", self.slot.slot, why)
            self.replace()
            # What it lacks, its own end may need as well.
            asyncio.get_running_loop().call_later(_REPLACED_S, os._exit, 1)
            return
        self._fails = why
        self._set_service()
        if in_a_row > 1:
            self._say_failing()
        if self._checking is None:
            pauses = _CHECKS_S if in_a_row < 2 else _LATER_CHECKS_S
            self._checking = asyncio.create_task(self._check(pauses))

    def doubt(self, why: str) -> None:
        """Takes the slot out of service as its runner says that its device fails; it comes back as in `fail`."""
        if self._fails is None:
            self.fail(why, True, 2)

    async def _check(self, pauses: tuple[float, ...]) -> None:
        for pause in itertools.chain(pauses, itertools.repeat(pauses[-1])):
            await self._stay_out(pause)
            self._fails = await asyncio.wrap_future(main_thread.EXECUTOR.submit(faults.words_of_check))
            if self._fails is None:
                break
            self._say_failing()
        self._checking = None
        self._say_failing()
        self._set_service()

    async def _stay_out(self, seconds: float) -> None:
        """Waits, and gives back what arrives: the scheduler may have sent it before it knew."""
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0:
            self._set_service()
            await asyncio.sleep(min(left, _GIVE_BACK_S))

    def _say_failing(self) -> None:
        if self._fails != self._said:
            self._said = self._fails
            # An event of an open stream: it needs neither a file nor a descriptor.
            self.log_event(calls.SLOT_FAILS, self._fails)


class _AbandonedTasks(WorkerPlugin):  # type: ignore[misc]
    """Stops running tasks whose client is gone: the scheduler has forgotten them and takes their slot to be free.

    A client that reconnects sends the task again under its key; it is not stopped then.
    """

    def setup(self, worker: Worker) -> None:
        self._worker = worker

    def transition(self, key: Any, start: str, finish: str, **_: Any) -> None:
        if (start, finish) == ("executing", "released") and key not in carried.keys(lost=True):
            asyncio.get_running_loop().call_later(_ABANDONED_S, self._stop, key)
        elif (start, finish) == ("cancelled", "waiting"):
            carried.taken_over(str(key))
        elif finish == "forgotten":  # the head has its outcome, or does not want it
            carried.forget(str(key), lost=False)

    def _stop(self, key: Any) -> None:
        if dask_worker.is_cancelled(self._worker, key) and key not in carried.keys(lost=True):
            cancellation.abandon(str(key))


class _FailedCalls(WorkerPlugin):  # type: ignore[misc]
    """Takes the slot out of service where a call fails before `execute.run` has it, which raises nothing itself."""

    def setup(self, worker: SlotWorker) -> None:
        self._worker = worker

    def transition(self, key: Any, start: str, finish: str, **_: Any) -> None:
        if finish == "error":
            task = self._worker.state.tasks.get(key)
            why = f"a call failed: {task.exception_text if task is not None else 'without a word'}"
            # Not within the transition.
            asyncio.get_running_loop().call_soon(self._worker.fail, why, False, 1)


def _clean_up() -> None:
    """Drops the objects of tasks, ends the processes that still run, and does what was registered with atexit."""
    stateful.release_all()
    children.end_all()
    # Python does not do it in a process that was forked as this one.
    atexit._run_exitfuncs()
    output.flush()


def environment(
    slot: InstanceInfo,
    *,
    directory: Path,
    packages: Path,
    variables: dict[str, str],
    confine: dict[str, str],
    threads: int,
) -> dict[str, str]:
    """Returns the variables of the worker process of *slot*, which its tasks and their subprocesses inherit.

    *variables*: those of the image; the device (*confine*) and the slot's description override them. *threads*: the
    number of CPU threads of numerical libraries, unless the image sets it.
    """
    inherited = variables.get("PYTHONPATH", os.environ.get("PYTHONPATH", ""))
    path = [each for each in (str(packages) if packages.is_dir() else "", inherited) if each]
    return {
        **dict.fromkeys(THREAD_VARIABLES, str(threads)),
        **variables,
        **({"PYTHONPATH": os.pathsep.join(path)} if path else {}),
        **confine,
        VARIABLE: json.dumps(slot.to_json()),
        NODE_DIRECTORY: str(directory),
    }


def resources(slot: InstanceInfo) -> dict[str, float]:
    """Returns the Dask resources of *slot*: 1 of each of its labels, and its memory. Tasks ask for some of them."""
    labels = ["slot", f"slot:{slot.slot}", f"node:{slot.node}"]
    if slot.profile:
        labels.append(f"profile:{slot.profile}")
    if slot.accelerator:
        labels.append(f"accel:{slot.accelerator}")
    memory = {GPU_MEMORY: slot.own_memory_gb * 1000} if slot.own_memory_gb else {}
    return {**dict.fromkeys(labels, 1.0), **memory}


def nanny(
    slot: InstanceInfo,
    *,
    scheduler: str,
    host: str,
    security: Security,
    env: dict[str, str],
    packages: Path,
    scratch: Path,
    group: Path | None = None,
) -> Nanny:
    """Returns a Nanny for *slot*, not started. *scheduler*: ``tls://HOST:PORT``. *host*: this node's address.

    *group*: see `SlotWorker`.
    """
    dask_worker.lead_workers()
    made = Nanny(
        scheduler,
        name=slot.slot,
        nthreads=1,
        host=host,
        security=security,
        resources=resources(slot),
        memory_limit=0,
        # With dashboard=False the worker would still serve HTTP on every interface.
        dashboard=False,
        dashboard_address="127.0.0.1:0",
        death_timeout=_DEATH_TIMEOUT_S,
        local_directory=str(scratch),
        worker_class=SlotWorker,
        env=env,
        slot=slot,
        packages=packages,
        group=group,
    )
    dask_worker.on_exit(made, partial(_died, made, attempts.Watch(Path(env[NODE_DIRECTORY]), slot.worker, group)))
    return made


def _died(nanny: Nanny, watch: attempts.Watch, code: int) -> None:
    found = watch.ended(code)
    if found is not None:
        # It starts again at once, or on another node.
        cancellation.later(_LEFT_S, partial(secrets.discard, found[0]))
    if found is not None or code:
        nanny.loop.add_callback(_tell, nanny, *(found or ("", Death(code))))


async def _tell(nanny: Nanny, key: str, death: Death) -> None:
    """Tells the head, which counts the deaths under a task on all nodes."""
    said = {"slot": nanny.name, "key": key, "code": death.code, "out_of_memory": death.out_of_memory}
    # The head is gone, or of a version before; or this node ends, whose connections are closed (RuntimeError).
    with contextlib.suppress(OSError, TimeoutError, SkyinfraError, RuntimeError):
        await within(services.died(nanny.scheduler, **said), _ANSWER_S)
