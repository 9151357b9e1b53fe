"""Runs a file as a program, as a task."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import selectors
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import BinaryIO, cast

from distributed import get_worker

from skyinfra.blobs.copies import Copy
from skyinfra.blobs.store import WrongContent
from skyinfra.blobs.transfer import BlobsMissing
from skyinfra.engine import deaths
from skyinfra.errors import ScriptFailed, SkyinfraError
from skyinfra.node import faults
from skyinfra.program import views
from skyinfra.program.bars import Bars
from skyinfra.protocol import failures, jobs, services
from skyinfra.protocol.calls import BESIDE, FETCH, LIMIT, PLACE, PROGRAM_GRACE_S
from skyinfra.protocol.jobs import Written
from skyinfra.protocol.shortage import STREAM
from skyinfra.worker import cancellation, inputs, secrets, shortage
from skyinfra.worker.streaming import Lines, note_progress
from skyinfra.worker.task_folder import new_folder

# Lines within that time are sent together.
_FLUSH_S = 0.05
# Between two lines of a progress bar that goes on.
_BAR_S = 5.0
_FLUSH_LINES = 500
# So many bytes of lines a second at most: the program waits, as at any pipe. The head and the client keep what they
# have not handed on.
_MOST_PER_S = 4 * 2**20
# What a line takes besides its text.
_LINE_BYTES = 64
# A single line may be of any length.
_LONGEST_WAIT_S = 1.0
# Between two checks of a script without output.
_ENDED_S = 0.5
# Files are looked through for secrets in pieces, which overlap by as much as the longest that is found for sure.
_WINDOW = 4 * 2**20
_OVERLAP = 64 * 2**10


def script(source: bytes, name: str, args: list[str], env: dict[str, str], topic: str, run_id: str) -> int:
    """Runs the program *source* as ``python -u NAME ARGS`` in a new folder; returns its exit code, -N for signal N.

    Its lines go to the *topic* of the scheduler as ``["lines", run_id, [[stream, text], ...]]``, stream being
    ``stdout`` or ``stderr``, without line ends; a last one of `shortage.STREAM`, where it failed and had said that the
    memory of its device ran out. Carriage returns end lines too, as in progress bars. Without a topic, the lines go to
    the output of the task. For the folder see `copied`; of the files that it writes there `Place.keep` tells. Raises
    `TaskTimeout` where it ran for longer than `LIMIT`, once these are kept.
    """
    key = str(get_worker().get_current_task())
    with copied(source, name, env) as place:
        command, env = [sys.executable, "-u", str(place.path), *args], {**os.environ, **place.env}
        with program(key, command, cwd=place.folder, env=env, piped=bool(topic)) as (process, group):
            with _limited(group, place.limit) as is_late:
                short = stream(process, topic, run_id)
                code = process.wait()
            if code and short and (cause := shortage.of_line(short)):
                get_worker().log_event(topic, ["lines", run_id, [[STREAM, cause]]])
            # What it left behind writes no more.
            cancellation.signal_group(group, signal.SIGKILL)
            if topic:
                place.keep(reporter(topic, run_id))
            else:
                place.keep(lambda kind, found: _report(key, kind, found), most=jobs.LARGEST_FILES)
            if is_late():
                raise failures.late(name, place.limit or 0)
            return code


@contextlib.contextmanager
def _limited(group: int, seconds: float | None) -> Iterator[Callable[[], bool]]:
    """Asks the programs of *group* to end after *seconds*, and kills them after their grace.

    Yields a function that returns whether it has asked.
    """
    late = threading.Event()

    def end() -> None:
        late.set()
        cancellation.signal_group(group, signal.SIGTERM)

    timers = []
    if seconds is not None:
        kill = functools.partial(cancellation.signal_group, group, signal.SIGKILL)
        timers = [cancellation.later(seconds, end), cancellation.later(seconds + PROGRAM_GRACE_S, kill)]
    try:
        yield late.is_set
    finally:
        for timer in timers:
            timer.cancel()


@dataclass(frozen=True)
class Place:
    """The *folder* in which a program runs, the file of the program, its variables, and what it writes there.

    fetch: which of these files its client wants; None where it does not ask. limit: for how many seconds it may run.
    """

    folder: str
    path: Path
    env: dict[str, str]
    copy: Copy
    fetch: tuple[str, ...] | None
    limit: float | None = None

    def keep(self, report: Callable[[str, Written], object], most: int | None = None) -> None:
        """Sends the files that the client wants to the head, of at most so many bytes, and tells it of all files.

        *report* gets `jobs.KEEPING` first where there are some to send, then `jobs.WRITTEN`.
        """
        if self.fetch is None:
            return
        masker = secrets.of_process()
        try:
            found, parcels = self.copy.written(
                self.fetch, most=most, refuse=lambda file: bool(masker) and masker.holds(_windows(file))
            )
            if parcels:
                report(jobs.KEEPING, replace(found, tree=None))
                inputs.send(parcels)
        except (OSError, SkyinfraError, BlobsMissing, WrongContent) as error:
            found = replace(self._left(), problem=f"{type(error).__name__}: {error}".partition("\n")[0])
        if found != Written():
            report(jobs.WRITTEN, found)

    def _left(self) -> Written:
        """Returns the files that the program wrote, none of which is kept."""
        with contextlib.suppress(OSError):
            return self.copy.written(())[0]
        return Written()


@contextlib.contextmanager
def copied(source: bytes, name: str, env: Mapping[str, str]) -> Iterator[Place]:
    """Makes a folder for the program *source*: a copy of what stands at `BESIDE` in the tree, which is removed.

    The file of the program is *name*, or at `PLACE`.
    """
    env = dict(env)
    beside, place, fetch = env.pop(BESIDE, None), env.pop(PLACE, name), env.pop(FETCH, None)
    limit = float(env.pop(LIMIT, 0)) or None
    tree = os.environ.get(views.VARIABLE)
    with new_folder() as folder:
        path, copy = Path(folder, place), Copy(Path(folder))
        with faults.raised_by_node():
            if beside is not None and tree is not None:
                copy.fill(Path(tree, beside), views.MODULES)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.unlink(missing_ok=True)
            path.write_bytes(source)
            copy.note()
        yield Place(folder, path, env, copy, None if fetch is None else tuple(json.loads(fetch)), limit)


def reporter(topic: str, run_id: str) -> Callable[[str, Written], object]:
    """Tells the client of the files that a program wrote, among the lines of the run *run_id*."""

    def report(kind: str, found: Written) -> None:
        get_worker().log_event(topic, ["lines", run_id, [[kind, json.dumps(found.to_json())]]])

    return report


def _report(key: str, kind: str, found: Written) -> None:
    """Tells the head of the files that the job of the attempt *key* wrote. A head that is older does not keep them."""
    if kind == jobs.WRITTEN:
        with contextlib.suppress(SkyinfraError, BlobsMissing):
            inputs.call_head(lambda head: services.job_written(head, key=key, written=found))


def _windows(file: Path) -> Iterator[bytes]:
    """The content of *file* in pieces, each with the end of the one before."""
    tail = b""
    with file.open("rb") as stream:
        while data := stream.read(_WINDOW):
            yield tail + data
            tail = data[-_OVERLAP:]


def detached(source: bytes, name: str, args: list[str], env: dict[str, str]) -> int:
    """Runs a program as `script` does, without a topic; returns 0. Raises `ScriptFailed` for another exit code."""
    code = script(source, name, args, env, "", "")
    if code == 0:
        return 0
    error = ScriptFailed(f"{name} {deaths.of_program(code)}", hint=deaths.remedy([code]))
    error.code = code
    raise error


# The leader of the group, a shell that waits. Its input ends with this process: the task starts again elsewhere, and
# must not run twice.
_GUARD = "trap '' HUP INT TERM; read -r _; kill -KILL 0"


@contextlib.contextmanager
def program(
    key: str,
    command: Sequence[str],
    *,
    cwd: str | None,
    env: Mapping[str, str],
    piped: bool,
    pass_fds: Sequence[int] = (),
) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """Starts the program of the task *key*; yields it with its process group, which is killed at the end of the block.

    *piped*: its output goes to pipes, see `stream`.
    """
    output = subprocess.PIPE if piped else None
    guard = ["/bin/sh", "-c", _GUARD]
    with contextlib.ExitStack() as stack:
        bare = secrets.without(os.environ)
        pipe, null = subprocess.PIPE, subprocess.DEVNULL
        with faults.raised_by_node():
            leader = subprocess.Popen(guard, stdin=pipe, stdout=null, env=bare, process_group=0)
        group = stack.enter_context(leader).pid
        stack.callback(cancellation.signal_group, group, signal.SIGKILL)
        with faults.raised_by_node():
            process = subprocess.Popen(
                command,
                cwd=cwd,
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                process_group=group,
                pass_fds=pass_fds,
            )
        stack.enter_context(process)
        # Remaining processes of the program would keep the slot's memory.
        stack.callback(cancellation.signal_group, group, signal.SIGKILL)
        cancellation.set_group(key, group)
        stack.callback(cancellation.set_group, key, None)
        yield process, group


def stream(process: subprocess.Popen[bytes], topic: str, run_id: str) -> str | None:
    """Sends the lines of both streams to the *topic* in the order of reading, until both have ended; see `script`.

    Returns the last line that says that the memory of a device ran out.
    """
    short: str | None = None
    if not topic:
        return short
    masker = secrets.of_process()
    pending: list[list[str]] = []
    flushed = time.monotonic()
    with selectors.DefaultSelector() as selector:
        for stream, file in (("stdout", process.stdout), ("stderr", process.stderr)):
            state = stream, Lines(), masker.stream(), Bars(note_progress, _BAR_S)
            selector.register(cast(BinaryIO, file), selectors.EVENT_READ, state)
        while selector.get_map():
            ended = process.poll() is not None
            ready = [item for item, _ in selector.select(timeout=_FLUSH_S if pending else _ENDED_S)]
            # It ended and has said all, and a process that it left holds its streams open.
            left = ended and not ready and not pending
            for item in list(selector.get_map().values()) if left else ready:
                data = b"" if left else os.read(item.fd, 65536)
                stream, lines, mask, bars = item.data
                shown = mask.feed(data, final=not data)
                found = bars.kept(lines.feed(shown, final=not data), final=not data)
                pending += [[stream, line] for line in found]
                if not data:
                    selector.unregister(item.fileobj)
            now = time.monotonic()
            due = not ready or now - flushed >= _FLUSH_S or len(pending) >= _FLUSH_LINES or not selector.get_map()
            if pending and due:
                short = shortage.in_lines(pending) or short
                get_worker().log_event(topic, ["lines", run_id, pending])
                if selector.get_map():
                    size = sum(len(text) + _LINE_BYTES for _, text in pending)
                    time.sleep(min(size / _MOST_PER_S, _LONGEST_WAIT_S))
                pending, flushed = [], now
    return short
