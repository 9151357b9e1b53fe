"""The Dask worker of one slot, and the Nanny that keeps it alive.

The Nanny runs in the runner's process and starts the worker in a process of its own, whose environment names the
slot's device before anything is imported there. The runner itself never imports a library that opens a device.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
from pathlib import Path
from typing import Any

from distributed import Nanny, Worker, WorkerPlugin
from distributed.core import Status
from distributed.security import Security

from skyinfra.engine import dask_private, settings
from skyinfra.protocol import services
from skyinfra.protocol.instance import NODE_DIRECTORY, STARTUP_KEY, VARIABLE, InstanceInfo
from skyinfra.worker import cancellation, output, stateful

# A worker that cannot reach the scheduler for that long ends; its Nanny ends with it and is made anew.
_DEATH_TIMEOUT_S = 60
# A client that lost the head comes back within 30 s, or tells its user that the fleet is gone.
_ABANDONED_S = 45.0
# A report to the scheduler takes milliseconds.
_REPORT_S = 0.5
# 0 is a process of no special kind, 1000 the one that ends first whatever it takes: see proc_pid_oom_score_adj(5).
_OOM_SCORE = 500
THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


class SlotWorker(Worker):  # type: ignore[misc]
    """A worker that tells the scheduler which slot it is.

    ``scheduler_info(n_workers=-1)["workers"][ADDRESS]["skyinfra"]`` of any client is the slot's `InstanceInfo`.
    *packages* is the folder of what the node installed for tasks; it comes first on the import path. The process
    becomes the leader of a process group, so that what its tasks start can be ended with it, however it ends.
    """

    def __init__(self, *arguments: Any, slot: InstanceInfo, packages: Path, **keywords: Any) -> None:
        self.slot = slot
        self._heartbeat: asyncio.Task[Any] | None = None
        settings.quiet()
        output.keep_logging()
        os.setpgrp()
        _end_first()
        if packages.is_dir():
            sys.path.insert(0, str(packages))
        super().__init__(*arguments, plugins=[_AbandonedTasks(), _Objects()], **keywords)
        self.handlers.update([services.drain.by(self.drain)])

    async def get_startup_information(self) -> dict[str, Any]:
        """What travels with the registration."""
        return {**await super().get_startup_information(), STARTUP_KEY: self.slot.to_json()}

    async def heartbeat(self) -> None:
        """Reports to the scheduler."""
        self._heartbeat = asyncio.current_task()
        try:
            await super().heartbeat()
        finally:
            self._heartbeat = None

    async def close(self, *arguments: Any, **keywords: Any) -> Any:
        """Ends the worker. Dask would cut off a report on its way and log how that failed."""
        self.periodic_callbacks["heartbeat"].stop()
        if self._heartbeat not in (None, asyncio.current_task()):
            await asyncio.wait({self._heartbeat}, timeout=_REPORT_S)
        return await super().close(*arguments, **keywords)

    def drain(self, on: bool) -> dict[str, Any]:
        """Takes the worker out of service, or back into it; what it still has to do.

        A paused worker starts nothing; the scheduler gives it no task, and places those anew that it was given and has
        not started. Those may still have been on their way, so this is called again and again. ``running``: the keys
        of the tasks that have started. ``kept``: how many results lie here that their clients have yet to fetch.
        """
        now, wanted = (Status.running, Status.paused) if on else (Status.paused, Status.running)
        if self.status == now:
            self.status: Status = wanted
        if self.status == Status.paused:
            dask_private.give_back_waiting(self)
        return {"running": dask_private.running(self), "kept": len(self.data)}


def _end_first() -> None:
    """Has the kernel end this process, or what its tasks start, before the runner where memory runs out."""
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text(str(_OOM_SCORE), encoding="ascii")


class _AbandonedTasks(WorkerPlugin):  # type: ignore[misc]
    """Stops running tasks whose client is gone: the scheduler has forgotten them and takes their slot for a free one.

    A client that was only cut off sends the task again under its key; it is left alone then.
    """

    def setup(self, worker: Worker) -> None:
        self._worker = worker

    def transition(self, key: Any, start: str, finish: str, **_: Any) -> None:
        if (start, finish) == ("executing", "released"):
            asyncio.get_running_loop().call_later(_ABANDONED_S, self._stop, key)

    def _stop(self, key: Any) -> None:
        if dask_private.is_cancelled(self._worker, key):
            cancellation.stop(str(key))


class _Objects(WorkerPlugin):  # type: ignore[misc]
    """Lets the objects that tasks have left in the process go when it ends."""

    async def teardown(self, worker: Worker) -> None:
        await asyncio.to_thread(stateful.release_all)


def environment(
    slot: InstanceInfo,
    *,
    directory: Path,
    packages: Path,
    variables: dict[str, str],
    confine: dict[str, str],
    threads: int,
) -> dict[str, str]:
    """The variables of the worker process of *slot*, which its tasks and their subprocesses inherit.

    *variables*: those of the declared image; the device (*confine*) and the slot's description stand above them.
    *threads*: how many CPU threads numerical libraries start, unless the image says otherwise.
    """
    path = [str(packages)] if packages.is_dir() else []
    inherited = variables.get("PYTHONPATH", os.environ.get("PYTHONPATH", ""))
    path.extend([inherited] if inherited else [])
    return {
        **dict.fromkeys(THREAD_VARIABLES, str(threads)),
        **variables,
        **({"PYTHONPATH": os.pathsep.join(path)} if path else {}),
        **confine,
        VARIABLE: json.dumps(slot.to_json()),
        NODE_DIRECTORY: str(directory),
    }


def resources(slot: InstanceInfo) -> dict[str, float]:
    """What the scheduler may place on *slot*: 1 of each of its labels. Tasks ask for one of them."""
    labels = ["slot", f"slot:{slot.slot}", f"node:{slot.node}"]
    if slot.profile:
        labels.append(f"profile:{slot.profile}")
    if slot.accelerator:
        labels.append(f"accel:{slot.accelerator}")
    return dict.fromkeys(labels, 1.0)


def nanny(
    slot: InstanceInfo,
    *,
    scheduler: str,
    host: str,
    security: Security,
    env: dict[str, str],
    packages: Path,
    scratch: Path,
) -> Nanny:
    """A Nanny for *slot*, not started. *scheduler*: ``tls://HOST:PORT``. *host*: where this node is reached."""
    return Nanny(
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
    )
