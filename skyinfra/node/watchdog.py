"""The watchdog of a detached runner: starts it again where it was killed, as systemd does on cloud nodes.

The watchdog is a process of its own, so that it survives the runner. Where the runner was stopped or has failed, or
its folder is gone, the watchdog ends.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from skyinfra.errors import SkyinfraError
from skyinfra.node import detach
from skyinfra.node.folder import NodeDirectory, locked
from skyinfra.node.node import directory_of
from skyinfra.node.processes import poll

_POLL_S = 0.5
# As RestartSec of the unit. A runner that was stopped has written its status by then.
_PAUSE_S = 2.0
_START_S = 20.0
_ATTEMPTS = 3
_PATIENCE_S = 1.0
_ENDED = ("stopped", "failed")


def ensure(path: Path, *, wait_s: float) -> None:
    """Starts a watchdog for the runner of the node *path*, unless it has one. Raises `StateDirectoryError`.

    *wait_s*: how long a restarted runner may take to be ready.
    """
    directory = directory_of(path)
    if _pid(directory) is not None:
        return
    watchdog = detach.spawn(directory, "keep", path, "--wait", str(wait_s))
    # From then on, `end` finds it.
    poll(lambda: _pid(directory) is not None or watchdog.poll() is not None, _START_S)


def end(directory: NodeDirectory) -> None:
    """Ends the watchdog of *directory*, and a runner that it is starting."""
    pid = _pid(directory)
    if pid is not None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGTERM)
        poll(lambda: _pid(directory) != pid, _START_S)


def keep(path: Path, *, wait_s: float) -> None:
    """Is the watchdog: starts the runner of the node *path* whenever it was killed, until it ends otherwise."""
    # An exception undoes a start that is under way.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    directory = directory_of(path)
    with _claimed(directory) as claimed:
        while claimed and _was_killed(directory) and _starts(path, wait_s):
            pass


def _starts(path: Path, wait_s: float) -> bool:
    print("skyinfra-runner: the runner was killed; it is started again", file=sys.stderr, flush=True)
    for _ in range(_ATTEMPTS):
        try:
            detach.boot(path, wait_s=wait_s)
            return True
        except SkyinfraError as error:
            # The other lines are the end of the log, to which this is written.
            print(f"skyinfra-runner: {str(error).splitlines()[0]}", file=sys.stderr, flush=True)
            time.sleep(_PAUSE_S)
    return False


def _was_killed(directory: NodeDirectory) -> bool:
    """Waits until no runner serves the directory; returns whether the last one was killed."""
    while True:
        while directory.holder() is not None:
            time.sleep(_POLL_S)
        time.sleep(_PAUSE_S)
        if directory.holder() is None:
            status = directory.status()
            return status is not None and status.state not in _ENDED


@contextlib.contextmanager
def _claimed(directory: NodeDirectory) -> Iterator[bool]:
    """Makes this process the watchdog of *directory* within the block; yields False where it cannot."""
    try:
        stream = directory.watchdog_file.open("a")
    except OSError:  # the folder is gone
        yield False
        return
    with stream:
        # `_pid` holds the lock for a moment.
        if not poll(lambda: locked(stream, fcntl.LOCK_EX), _PATIENCE_S):
            yield False
            return
        stream.truncate(0)
        stream.write(f"{os.getpid()}\n")
        stream.flush()
        yield True


def _pid(directory: NodeDirectory) -> int | None:
    """Returns the process id of the watchdog, or None where there is none, or it has not written it yet."""
    try:
        with directory.watchdog_file.open("r") as stream:
            if locked(stream, fcntl.LOCK_SH):
                return None
        pid = directory.process_in(directory.watchdog_file)
        # The id that an earlier watchdog left may be another process now.
        return pid if pid is not None and b"keep" in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0") else None
    except (FileNotFoundError, NotADirectoryError, ProcessLookupError, ValueError):
        return None
