"""The main thread of the process of a slot executes its tasks; Dask runs in another thread of the process.

So signals reach the task, as in a program, and those that end it wake it wherever it waits.
"""

from __future__ import annotations

import os
import sys
import threading
import traceback
from collections.abc import Callable
from concurrent.futures import Executor, Future
from queue import SimpleQueue
from typing import Any

# A task that runs when its worker is closed may go on for that long, as in Dask's own threads.
_PATIENCE_S = 30.0
# And for that long when the worker is closed.
_GRACE_S = 0.5


# Dask looks for "ThreadPoolExecutor" in the name of the class: only then does it tell a task its worker.
class MainThreadPoolExecutor(Executor):
    """Executes calls in the main thread, one after the other."""

    def __init__(self) -> None:
        self._calls: SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = SimpleQueue()
        self._ended = threading.Event()

    def submit(self, function: Callable[..., Any], /, *arguments: Any, **keywords: Any) -> Future[Any]:
        """Hands a call to the main thread."""
        future: Future[Any] = Future()
        self._calls.put((future, lambda: function(*arguments, **keywords)))
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Makes `serve` end after the calls that it was given; *wait*: for that, for some time."""
        self._calls.put(None)
        if wait:
            self.ended(_PATIENCE_S)

    def ended(self, within_s: float) -> bool:
        """Returns whether `serve` ends within that time."""
        return self._ended.wait(within_s)

    def serve(self) -> None:
        """Executes calls until `shutdown`."""
        while (given := self._calls.get()) is not None:
            future, call = given
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(call())
                except BaseException as error:  # noqa: BLE001 - it belongs to the one who waits for the call
                    future.set_exception(error)
            del given, future, call
        self._ended.set()


# That of this process.
EXECUTOR = MainThreadPoolExecutor()
_used = False
_replaced = False


def admit(*, fresh: bool) -> bool:
    """Is called before a task begins. Returns whether this process has run one before. Raises `distributed.Reschedule`,
    with which its scheduler places it anew, where this process is to be replaced, and for a task that wants a *fresh*
    process where this one has run a task."""
    global _used
    before = _used
    if _replaced or (fresh and before):
        from distributed import Reschedule

        replace_after_task()
        raise Reschedule
    _used = True
    return before


def replace_after_task() -> None:
    """Replaces this process by a new one after the task that runs in it, which calls this: it is the last one."""
    global _replaced
    from distributed import get_worker

    worker = get_worker()
    _replaced = True
    # Before the news that the task has ended, after which Dask would start the next one.
    worker.loop.asyncio_loop.call_soon_threadsafe(worker.replace)


def is_rescheduled(error: BaseException) -> bool:
    """Returns whether *error* is that of `admit`, with which the task is placed anew."""
    distributed = sys.modules.get("distributed")
    return _replaced and distributed is not None and isinstance(error, distributed.Reschedule)


def is_replaced() -> bool:
    """Returns whether this process begins no other task."""
    return _replaced


def lead(dask: Callable[[], object], at_end: Callable[[], object]) -> None:
    """Runs *dask* in a thread, and the calls of `EXECUTOR` in this one, the main thread, until *dask* ends.

    Ends the process then, after *at_end*. It waits neither for threads that tasks have left, nor for a task that goes
    on.
    """
    codes = []

    def run() -> None:
        try:
            dask()
            codes.append(0)
        except BaseException:  # noqa: BLE001 - multiprocessing prints it, where it is raised in the main thread
            traceback.print_exc()
            codes.append(1)
        EXECUTOR.shutdown(wait=False)
        if not EXECUTOR.ended(_GRACE_S):
            os._exit(codes[0])

    thread = threading.Thread(target=run, name="dask", daemon=True)
    thread.start()
    EXECUTOR.serve()
    thread.join()
    at_end()
    os._exit(codes[0])
