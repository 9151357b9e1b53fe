"""The settings of Dask in every process of ours, each with its reason."""

from __future__ import annotations

import logging
import re
import warnings
from collections.abc import Callable
from functools import cache
from pathlib import Path

import dask
from distributed.utils import get_mp_context
from distributed.versions import VersionMismatchWarning

from skyinfra.engine import clock, dask_client
from skyinfra.engine.handshakes import allow_files

_OF_DASK = re.compile(r"(dask|distributed|tornado)(\.|$)")
# Dask's defaults lose tasks or trust the network; each of these was measured.
_CONFIG = {
    # A lost node makes its tasks hop over its dying workers, and each hop counts as a failure of the task.
    "distributed.scheduler.allowed-failures": 60,
    # A silent link is noticed after 12 s instead of 28-60 s.
    "distributed.comm.timeouts.tcp": "15s",
    # Shorter, and a task that holds the GIL is started again for ever.
    "distributed.scheduler.worker-ttl": "5 minutes",
    # Scheduler and workers serve unauthenticated HTTP pages otherwise.
    "distributed.scheduler.http.routes": [],
    "distributed.worker.http.routes": [],
    # Any web page could open a websocket to the dashboard; `dask_scheduler.Pages` adds who may.
    "distributed.scheduler.dashboard.bokeh-application.allow_websocket_origin": [],
    # Tasks may start processes of their own, which children of daemonic processes may not.
    "distributed.worker.daemon": False,
    # A worker is forked from a process that has Dask loaded: 0.1 s instead of 0.6 s of CPU for each slot.
    "distributed.worker.multiprocessing-method": "forkserver",
    # For a dashboard, which there is none of: 50 wake-ups a second of every slot that waits for a task.
    "distributed.worker.profile.enabled": False,
    "distributed.admin.tick.interval": "500ms",
    "distributed.admin.system-monitor.interval": "2s",
    # Every process would keep NVML open, which holds the GPUs, and not start where users are told less than root.
    "distributed.diagnostics.nvml": False,
    # Of every connection, head and workers would keep the last thousand messages of up to 1 MB, for debugging.
    "distributed.admin.low-level-log-length": 0,
    # Returns the memory that a task gave back to the system; has to be set before a process starts.
    "distributed.nanny.pre-spawn-environ": {"MALLOC_TRIM_THRESHOLD_": 65536},
    # Calls of jobs; the warning is about Dask's own collections.
    "distributed.admin.large-graph-warning-threshold": "1 PiB",
}


def configure(*, scratch: Path) -> None:
    """Sets Dask up in this process and the workers that it will start. *scratch*: where it keeps temporary files."""
    quiet()
    clock.install()
    allow_files()
    dask.config.set(_CONFIG)
    dask.config.set({"temporary-directory": str(scratch)})
    # Dask would load numpy and pandas there, before the worker's own import path and variables are set.
    get_mp_context().set_forkserver_preload(["skyinfra.worker.process", "skyinfra.worker.preloaded"])


def quiet() -> None:
    """Leaves Dask's warnings in the log: what it says about every connection would bury the node's own lines."""
    logging.getLogger("distributed").setLevel(logging.WARNING)
    logging.getLogger("tornado.general").addFilter(_is_no_handshake)
    logging.getLogger("distributed.nanny").addFilter(_is_no_end)
    logging.getLogger("distributed.worker").addFilter(_in_one_line)


def quiet_client(thread: str) -> None:
    """Keeps what Dask logs and warns of out of the terminal of a client: its errors say what concerns a person.

    A process that uses Dask by itself keeps its messages, but for those of our *thread*.
    """
    keep = _others(thread)
    # At loggers, for handlers that come later; at handlers, for loggers that come later. None is added twice.
    for name in ("root", *filter(_OF_DASK.match, [*logging.root.manager.loggerDict])):
        logger = logging.getLogger(name)
        for each in (logger, *logger.handlers, logging.lastResort):
            if each is not None:
                each.addFilter(keep)
    # Of the packages that matter, a version that differs is refused; the rest is the user's.
    warnings.filterwarnings("ignore", category=VersionMismatchWarning)
    if not dask_client.is_used_by_others():
        warnings.filterwarnings("ignore", module=_OF_DASK.pattern)


@cache
def _others(thread: str) -> Callable[[logging.LogRecord], bool]:
    """Returns a filter that leaves out what Dask logs in *thread*, and elsewhere where nobody else uses it."""
    return lambda record: (
        _OF_DASK.match(str(record.name)) is None or (record.threadName != thread and dask_client.is_used_by_others())
    )


def _in_one_line(record: logging.LogRecord) -> bool:
    """Leaves out the traceback of a heartbeat that its head did not answer: the head is away, and the line says it."""
    if record.getMessage().startswith("Failed to communicate with scheduler during heartbeat"):
        record.exc_info = None
    return True


def _is_no_end(record: logging.LogRecord) -> bool:
    # Of a worker that ends in order: the thread that waits for a word of the Nanny finds its queue closed.
    return not record.getMessage().startswith("Worker process died unexpectedly")


def _is_no_handshake(record: logging.LogRecord) -> bool:
    """Leaves out Tornado's line about each handshake that fails: whoever reaches the port could fill the log."""
    return not record.getMessage().startswith("SSL Error on")
