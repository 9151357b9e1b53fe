"""Runs a file as a program, as a task."""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import BinaryIO, cast

from distributed import get_worker

from skyinfra.errors import ScriptFailed
from skyinfra.protocol.shortage import STREAM
from skyinfra.worker import cancellation, secrets, shortage
from skyinfra.worker.bars import Bars
from skyinfra.worker.streaming import Lines
from skyinfra.worker.surroundings import laid_out

# Lines within that time are sent together.
_FLUSH_S = 0.05
# Between two lines of a progress bar that goes on.
_BAR_S = 5.0
_FLUSH_LINES = 500
# Between two checks of a script without output.
_ENDED_S = 0.5


def script(source: bytes, name: str, args: list[str], env: dict[str, str], topic: str, run_id: str) -> int:
    """Runs the program *source* as ``python -u NAME ARGS`` in a new folder; returns its exit code, -N for signal N.

    Its lines go to the *topic* of the scheduler as ``["lines", run_id, [[stream, text], ...]]``, stream being
    ``stdout`` or ``stderr``, without line ends; a last one of `shortage.STREAM`, where it failed and had said that the
    memory of its device ran out. Carriage returns end lines too, as in progress bars. Without a topic, the lines go to
    the output of the task. Where its project was synced, see `laid_out` for the folder.
    """
    key = str(get_worker().get_current_task())
    with laid_out(source, name, env) as (folder, path, env):
        command = [sys.executable, "-u", str(path), *args]
        with program(key, command, cwd=folder, env={**os.environ, **env}, piped=bool(topic)) as (process, _):
            short = stream(process, topic, run_id)
            code = process.wait()
            if code and short and (told := shortage.of_line(short)):
                get_worker().log_event(topic, ["lines", run_id, [[STREAM, told]]])
            return code


def detached(source: bytes, name: str, args: list[str], env: dict[str, str]) -> int:
    """Runs a program as `script` does, without a topic; returns 0. Raises `ScriptFailed` for another exit code."""
    code = script(source, name, args, env, "", "")
    if code == 0:
        return 0
    error = ScriptFailed(f"{name} ended with exit code {code}" if code > 0 else f"{name} ended by signal {-code}")
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
        leader = subprocess.Popen(guard, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, env=bare, process_group=0)
        group = stack.enter_context(leader).pid
        stack.callback(cancellation.signal_group, group, signal.SIGKILL)
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
            selector.register(
                cast(BinaryIO, file), selectors.EVENT_READ, (stream, Lines(), masker.stream(), Bars(every_s=_BAR_S))
            )
        while selector.get_map():
            ready = selector.select(timeout=_FLUSH_S if pending else _ENDED_S)
            if not ready and not pending and process.poll() is not None:
                break  # it ended, and a process that it left holds its streams open
            for item, _ in ready:
                data = os.read(item.fd, 65536)
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
                pending, flushed = [], now
    return short
