"""Executes tasks in the process of a slot.

A client ships a task as two byte strings: a header (`Header`, JSON) and the pickled call. `run` executes it and returns
an `Outcome`: the result or the exception, pickled on the node, so that Dask never handles an exception of a task.
Large calls, large results and synced files are blobs of the head, see `skyinfra.blobs.payload`.

A chunk stands for several short tasks of one message. They are executed one after the other, each with its own
arguments, output and outcome. The chunk gives tasks back, and its client sends each of them alone: those that have not
started when it takes longer than expected, and all of them where the process that had it first was lost, so that the
starts of the task that ended the process are counted.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import operator
import os
import pickle
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TypeVar, cast

from skyinfra.blobs import payload, unpicklable
from skyinfra.blobs.payload import Payload
from skyinfra.blobs.transfer import BlobsMissing
from skyinfra.engine import carried, main_thread
from skyinfra.engine.deaths import Death
from skyinfra.errors import SkyinfraError, StateDirectoryError, TaskNotPicklable, TaskTimeout, TaskTooLarge
from skyinfra.node import device, faults
from skyinfra.program import main as program
from skyinfra.protocol import failures, instance, jobs
from skyinfra.protocol.calls import ENDED, GIVEN_BACK, ITEM, SMALL_OUTCOME, Ending, Header, Item, Outcome
from skyinfra.protocol.readings import SlotReport
from skyinfra.worker import (
    attempts,
    cancellation,
    fence,
    inputs,
    interruption,
    output,
    secrets,
    shortage,
    stateful,
    streaming,
    task_folder,
)
from skyinfra.worker.secrets import Masker

F = TypeVar("F")

# Modules whose functions do their work in processes of their own.
_PROGRAMS = ("skyinfra.worker.scripts", "skyinfra.worker.ranks")

# A chunk is made to take less than half of that.
_LONGEST_S = 0.1
# A chunk sends its outcomes when they are so many bytes, and at its end.
_MOST_BYTES = 64 * 1024

# The number of tasks that have ended in this process.
_ended = 0

# Header and pickled call of a task.
Row = tuple[bytes, bytes]
# Sends an event of the client's topic: its kind, the key that it is about, and its content.
Report = Callable[[str, str, object], object]


def plain(function: F) -> F:
    """Returns *function*: stands for a decorator on nodes, where the client package is not installed."""
    return function


def named(module: str, name: str) -> object:
    """Returns *name* of a synced module: functions and classes of such modules are pickled as this call."""
    return operator.attrgetter(name)(importlib.import_module(module))


def run(header: bytes, call: bytes) -> Outcome | list[tuple[str, Outcome]] | bytes:
    """Executes the pickled *call* ``(function, args, kwargs)`` in this thread. Never raises what the task raises.

    A small outcome travels as an event of the task's topic, ``["outcome", key, pickled Outcome]``, ahead of the news
    that the task has ended: fetching the result from this process takes two more messages, and fails where the next
    task ends the process. A client whose connection broke meanwhile got no event, and does fetch it. The result of a
    chunk is its large outcomes, that of a job its `Ending` in bytes; none where it is adopted, and not here any more.
    """
    # Here, because the process of a rank needs the rest of this module alone.
    from distributed import get_worker

    task = Header.loads(header)
    if task.whole and (kept := carried.take(task.key)) is not None:
        return kept
    if task.adopted:
        return b""
    used = main_thread.admit(fresh=task.fresh)
    shortage.begin(used=used and not stateful.any_kept())
    worker = get_worker()

    def report(kind: str, key: str, content: object) -> None:
        worker.log_event(task.topic, [kind, key, content])

    def say(kind: str, content: object) -> None:
        report(kind, task.key, [worker.name, task.name, content])

    if task.chunk:
        large = _Chunk(task, call, report, str(worker.name)).run()
        faults.settle(worker)
        return large

    def give(number: int, data: bytes) -> None:
        report(ITEM, task.key, Item(number, worker.address, data))

    sender = streaming.ItemSender(task.key, give) if task.stream else None
    if task.whole:
        carried.begin(task.key)
    try:
        outcome = _execute(task, call, report, say if task.echo else None, sender)
    except BaseException:  # `_for_itself`
        carried.forget(task.key)
        raise
    _count()
    faults.settle(worker)
    if task.whole:
        ending = Ending.of(outcome).dumps()
        carried.end(task.key, ending)
    if task.fresh:
        main_thread.replace_after_task()
    if task.whole:
        return ending
    if task.topic and len(data := pickle.dumps(outcome)) <= SMALL_OUTCOME:
        report("outcome", task.key, data)
    return outcome


def slot_report() -> SlotReport:
    """Returns what this process tells the head of its tasks with each heartbeat."""
    return SlotReport(_ended, streaming.last_progress())


def _count() -> None:
    global _ended
    _ended += 1


def _execute(
    task: Header, call: bytes, report: Report, say: streaming.Send | None, sender: streaming.ItemSender | None
) -> Outcome:
    def last_words() -> None:
        if task.topic:
            report("outcome", task.key, pickle.dumps(Outcome(failure=failures.of(_late(task), below=__file__))))

    def again(death: Death | None) -> None:
        folder = Path(os.environ[instance.NODE_DIRECTORY])
        secrets.recover(task.key, masker, Path(output.file_of(task.key, folder)))
        output.end_line(output.file_of(task.key, folder))
        streaming.send_rest(task.key, folder, say, death)

    outcome: Outcome | None = None
    late, masker = False, Masker(())
    try:
        values = inputs.secrets(task.secrets)
        masker = Masker(values.values())
        held = {use.variable for use in task.secrets if use.held}
        with (
            attempts.counted(task.key, task.name, task.timeout, again, [Death(*each) for each in task.deaths]),
            output.captured(
                task.key, Path(os.environ[instance.NODE_DIRECTORY]), empty=task.whole, running=attempts.running
            ) as file,
            streaming.sending_output(file, say, lambda: task.key, masker),
            secrets.given(values, masker, task.key, held) as unmasked,
            cancellation.stoppable(task.key),
            cancellation.limited(task.key, task.timeout, last_words, unmasked) as is_late,
            interruption.task_scope(),
        ):
            try:
                outcome = _perform(task, call, masker, is_late, sender)
            finally:
                late = is_late()
            if late and outcome.failure is None:  # it ran a program, or caught what was to end it
                raise KeyboardInterrupt
            return outcome
    except BaseException as error:  # a task may raise anything, sys.exit and Ctrl-C included
        if main_thread.is_rescheduled(error):
            raise
        if isinstance(error, KeyboardInterrupt):
            # Without what it interrupted, of which nothing is asked any more: that may be what did not end.
            error = (_late(task) if late else KeyboardInterrupt()).with_traceback(error.__traceback__)
        elif _of_node(error):
            faults.note(error)
            # What a node raises after the task does not undo that.
            return outcome or faults.outcome(task.name, error, below=__file__)
        return _failed(task, error, masker)


def _perform(
    task: Header,
    call: bytes,
    masker: Masker | None = None,
    is_late: Callable[[], bool] = lambda: False,
    sender: streaming.ItemSender | None = None,
) -> Outcome:
    """Calls the pickled *call*, and keeps its result, in which no disk gets what *masker* masks. *sender*: of items.

    An exception of the task is described and pickled here: that runs code of the user, for which its time counts.
    Raises what ends a task whose time is over, and what hinders it from starting.
    """
    start = time.perf_counter()
    inputs.use_tree(task.tree)
    file = output.file_of(task.key, os.environ[instance.NODE_DIRECTORY])
    log = output.Log(file, masker.text if masker else None)
    ended: list[Outcome] = []
    try:
        with task_folder.surrounded(task.env, task.workdir, task.tree), output.logging_to(log):
            _call(task, call, start, masker, is_late, sender, ended.append)
    except Exception as error:
        if not ended:
            raise
        faults.note(error)
    return ended[0]


def _call(
    task: Header,
    call: bytes,
    start: float,
    masker: Masker | None,
    is_late: Callable[[], bool],
    sender: streaming.ItemSender | None,
    end: Callable[[Outcome], object],
) -> None:
    """Loads and calls *call*, and gives *end* the outcome. Raises what `_perform` does, and what the fence does."""
    try:
        # What modules set as they are imported stays, as they do.
        with cancellation.reachable():
            function, args, kwargs = load(task, call)
    except BaseException as error:  # noqa: BLE001 - what is unpickled may raise anything
        if (failed := faults.of_loading(error)) is not None:
            raise failed from (error if failed is not error else error.__cause__)
        # These are the same in a new process.
        stays = isinstance(error, BlobsMissing | ModuleNotFoundError | SkyinfraError)
        if isinstance(error, Exception) and not stays and inputs.has_other_code() and not stateful.any_kept():
            # What was loaded before may be why: much can be registered once in a process.
            main_thread.admit(fresh=True)
        with cancellation.reachable():
            end(_raised(task, error, masker, late=is_late()))
            return
    _for_itself(function)
    with fence.around(), cancellation.reachable():
        calling = fence.Call()
        try:
            with calling:
                result: object = function(*args, **kwargs)
                sent = None
                if sender is not None and inspect.isgenerator(result):
                    sent = sender.all(result, functools.partial(_pack_item, task, masker))
                    result = None
            outcome = _keep_result(task, result, start, masker)
            end(outcome if sent is None else replace(outcome, items=sent))
        except BaseException as error:
            calling.quiet()
            if faults.of_own(function, error):
                raise
            end(_raised(task, error, masker, late=is_late()))


def _for_itself(function: Callable[..., object]) -> None:
    """Raises `distributed.Reschedule` where *function* starts a program, which needs the device, and this process may
    hold memory of it: another one takes its place. One with objects that stay is left."""
    if getattr(function, "__module__", "") in _PROGRAMS and not stateful.any_kept() and device.is_open():
        main_thread.admit(fresh=True)


def _raised(task: Header, error: BaseException, masker: Masker | None, *, late: bool) -> Outcome:
    """Returns the outcome of a task whose function, or whose arguments as they were unpickled, raised *error*.

    late: raises KeyboardInterrupt, in whatever *error* a library may have turned it.
    """
    if faults.suspect(error):
        main_thread.replace_after_task()
    if late:
        raise KeyboardInterrupt().with_traceback(error.__traceback__) from None
    return _failed(task, error, masker)


def _of_node(error: BaseException) -> bool:
    return not isinstance(error, BlobsMissing) and faults.of_node(error)


def _failed(task: Header, error: BaseException, masker: Masker | None = None) -> Outcome:
    """Returns the outcome of a task that raised *error*, which shows none of the secrets of *masker*.

    A large exception is a blob of the head, as large results are; where the head does not take it, it travels as text.
    """
    if isinstance(error, BlobsMissing):
        return Outcome(missing=error.digests)
    failure = failures.of(error, below=__file__, shortage=shortage.of(error))
    failure = masker.failure(failure) if masker else failure
    if failure.size <= (jobs.LARGEST // 2 if task.whole else payload.INLINE):
        return Outcome(failure=failure)
    brief, packed = failure.brief(), Payload([pickle.dumps(failure)])
    with contextlib.suppress(TaskTooLarge, StateDirectoryError, BlobsMissing):
        if not task.whole:
            return Outcome(failure=brief, parts=inputs.keep(packed))
    return Outcome(failure=brief)


class _Chunk:
    """The tasks of a chunk that have not started, and the outcomes that have not been sent."""

    def __init__(self, task: Header, call: bytes, report: Report, slot: str) -> None:
        self._large: list[tuple[str, Outcome]] = []
        self._task = task
        self._report = report
        self._slot = slot
        self._lock = threading.Lock()
        self._rows: deque[Row] = deque(pickle.loads(call))  # noqa: S301 - the fleet's own, over mutual TLS
        self._unreported: list[tuple[str, bytes]] = []
        self._bytes = 0
        self._now = task

    def run(self) -> list[tuple[str, Outcome]]:
        """Executes the tasks. Returns the outcomes that are too large for an event, with their keys."""
        task = self._task
        # A task without an outcome, for whatever reason, is sent alone, and fails by itself.
        try:
            with (
                contextlib.suppress(KeyboardInterrupt),
                attempts.counted(task.key, task.name) as starts,
                output.captured(task.key, Path(os.environ[instance.NODE_DIRECTORY]), running=attempts.running) as file,
                streaming.sending_output(file, self._say if task.echo else None, lambda: self._now.key),
                cancellation.stoppable(task.key),
            ):
                if starts == 1:
                    self._execute(file)
        except Exception as error:  # noqa: BLE001 - as above
            if _of_node(error):
                faults.note(error)
        finally:
            # Of what has sent no event, the head would start all anew where this process ends next.
            self._give_back()
        return self._large

    def _say(self, kind: str, content: object) -> None:
        self._report(kind, self._now.key, [self._slot, self._now.name, content])

    def _execute(self, file: str | None) -> None:
        timer = cancellation.later(_LONGEST_S, self._give_back)
        try:
            while not main_thread.is_replaced() and (row := self._next()) is not None:
                self._now = Header.loads(row[0])
                streaming.forget_progress()
                try:
                    with interruption.task_scope():
                        outcome = _perform(self._now, row[1])
                except BaseException as error:  # noqa: BLE001 - as above
                    if main_thread.is_rescheduled(error):
                        self._unreported.append((self._now.key, GIVEN_BACK))
                        return
                    if _of_node(error):
                        faults.note(error)
                        self._unreported.append((self._now.key, GIVEN_BACK))
                        return
                    outcome = _failed(self._now, error)
                if outcome.crowded:  # alone, it gets a process of its own
                    self._unreported.append((self._now.key, GIVEN_BACK))
                    return
                self._end(outcome, file)
        finally:
            timer.cancel()
            self._give_back()

    def _next(self) -> Row | None:
        with self._lock:
            return self._rows.popleft() if self._rows else None

    def _end(self, outcome: Outcome, file: str | None) -> None:
        _count()
        if file is not None and output.written(file):
            with streaming.cutting():
                output.cut(file, self._now.key)
        if outcome.failure is not None:
            # An interrupt ends the chunk, and a client gives up at the first failure.
            self._give_back()
        data = pickle.dumps(outcome)
        with self._lock:
            if len(data) > SMALL_OUTCOME:
                self._large.append((self._now.key, outcome))
                return
            self._unreported.append((self._now.key, data))
            self._bytes += len(data)
            if self._bytes > _MOST_BYTES or not self._rows:
                self._flush()

    def _give_back(self) -> None:
        """Starts no more tasks, and sends the outcomes."""
        with self._lock:
            self._unreported += [(Header.loads(header).key, GIVEN_BACK) for header, _ in self._rows]
            self._rows.clear()
            self._flush()

    def _flush(self) -> None:
        if self._unreported:
            self._report(ENDED, self._task.key, self._unreported)
            self._unreported, self._bytes = [], 0


def _late(task: Header) -> TaskTimeout:
    return failures.late(task.name, task.timeout or 0)


def load(task: Header, call: bytes) -> tuple[Callable[..., object], tuple[object, ...], dict[str, object]]:
    """Returns the function of the pickled *call* with its arguments. Raises what unpickling raises."""
    # What the task itself is given ends with it.
    given = {*(task.env or ()), *(use.variable for use in task.secrets)}
    with inputs.importing(given):
        loaded = program.loading(lambda: inputs.load(task.parts) if task.parts else pickle.loads(call))  # noqa: S301
    return cast(tuple[Callable[..., object], tuple[object, ...], dict[str, object]], loaded)


def dump_result(task: Header, result: object) -> bytes:
    """*result*, pickled in one piece. Raises `TaskNotPicklable`."""
    return _pack_result(replace(task, whole=True), result).joined()


def _pack_item(task: Header, masker: Masker | None, item: object) -> tuple[bytes, int]:
    """Returns the pickled outcome that stands for *item*, and how many bytes that has in all."""
    outcome = _keep_result(task, item, 0.0, masker, most=SMALL_OUTCOME, what="an item")
    size = sum(part.size for part in outcome.parts) + len(outcome.result or b"")
    return pickle.dumps(outcome), size


def _keep_result(
    task: Header,
    result: object,
    start: float,
    masker: Masker | None,
    *,
    most: int = payload.INLINE,
    what: str = "the result",
) -> Outcome:
    """Returns the outcome of a task with *result*, which the head keeps where it has more bytes than *most*."""
    packed = _pack_result(task, result, what)
    small = task.whole or packed.size <= most
    if masker and (task.whole or not small) and masker.holds([*packed.pieces, *packed.buffers]):
        raise TaskNotPicklable(
            f"{what} of {task.name} holds one of its secrets, and would be kept on the head's disk",
            given=type(result).__qualname__,
            hint=f"Return what others may see; results of jobs, and what is above {most >> 10} KiB, are kept there.",
        )
    if small:
        return Outcome(result=packed.joined(), seconds=time.perf_counter() - start)
    try:
        parts = inputs.keep(packed)
    except TaskTooLarge as error:
        raise TaskTooLarge(f"{what} of {task.name}: {error.message}", field=error.field, hint=error.hint) from None
    return Outcome(parts=parts, seconds=time.perf_counter() - start)


def _pack_result(task: Header, result: object, what: str = "the result") -> Payload:
    try:
        return payload.pack(result, whole=task.whole)
    except Exception as error:  # noqa: BLE001 - __reduce__ and __getstate__ of a result may raise anything
        raise TaskNotPicklable(
            f"{what} of {task.name} cannot be pickled: {unpicklable.described(result, payload.pack, error)}",
            given=type(result).__qualname__,
            hint="Return plain values, arrays, or the path of a file.",
        ) from None
