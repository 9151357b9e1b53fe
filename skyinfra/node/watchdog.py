"""Starting a runner in the background again that was killed, as systemd does it on cloud nodes.

The keeper is a process beside the runner, so that what ends the runner does not end it as well. A runner that was
stopped, that has failed, or whose folder is gone is left alone, and its keeper ends.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from skyinfra.errors import SkyinfraError
from skyinfra.node import detach
from skyinfra.node.folder import NodeDirectory, writing

_POLL_S = 0.5
# As RestartSec of the unit. Whoever has stopped the runner has said so by then.
_PAUSE_S = 2.0
_START_S = 20.0
_ATTEMPTS = 3
_PATIENCE_S = 1.0
_ENDED = ("stopped", "failed")


def ensure(path: Path, *, wait_s: float) -> None:
    """Makes sure that the runner of the node *path* has a keeper, which gives it *wait_s* to be ready again.

    Raises `StateDirectoryError`.
    """
    directory = NodeDirectory(path.parent)
    if _pid(directory) is not None:
        return
    with writing(directory.log_file):
        log = directory.log_file.open("ab")
    with log:
        command = detach.command("keep", path, "--wait", str(wait_s))
        keeper = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True)
    # Who stops the node finds it from now on.
    detach.poll(lambda: _pid(directory) is not None or keeper.poll() is not None, _START_S)


def end(directory: NodeDirectory) -> None:
    """Ends the keeper of the runner that serves *directory*, and what it is about to start."""
    pid = _pid(directory)
    if pid is not None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGTERM)
        detach.poll(lambda: _pid(directory) != pid, _START_S)


def keep(path: Path, *, wait_s: float) -> None:
    """Starts the runner of the node *path* whenever it was killed, until it has ended otherwise."""
    signal.signal(signal.SIGTERM, _leave)
    directory = NodeDirectory(path.parent)
    with _claimed(directory) as claimed:
        while claimed and _was_killed(directory) and _starts(path, wait_s):
            pass


def _starts(path: Path, wait_s: float) -> bool:
    print("skyinfra-runner: the runner was killed; it is started again", file=sys.stderr, flush=True)
    for _ in range(_ATTEMPTS):
        try:
            detach.boot(path, wait_s=wait_s)
        except SkyinfraError as error:
            # The rest is the end of the log, where this goes.
            print(f"skyinfra-runner: {str(error).splitlines()[0]}", file=sys.stderr, flush=True)
            time.sleep(_PAUSE_S)
        else:
            return True
    return False


def _was_killed(directory: NodeDirectory) -> bool:
    """Waits until no runner serves the directory. Whether the last one was killed."""
    while True:
        while directory.holder() is not None:
            time.sleep(_POLL_S)
        time.sleep(_PAUSE_S)
        if directory.holder() is None:
            status = directory.status()
            return status is not None and status.state not in _ENDED


def _leave(*_: object) -> None:
    # An exception: a start that is under way is taken back.
    raise SystemExit(0)


@contextlib.contextmanager
def _claimed(directory: NodeDirectory) -> Iterator[bool]:
    """Whether this process is the one keeper of *directory*, which it is until the end of the block."""
    try:
        stream = directory.keeper_file.open("a")
    except OSError:  # the folder is gone
        yield False
        return
    with stream:
        # Whoever only looks holds the lock for a moment.
        if not detach.poll(lambda: _locked(stream, fcntl.LOCK_EX), _PATIENCE_S):
            yield False
            return
        stream.truncate(0)
        stream.write(f"{os.getpid()}\n")
        stream.flush()
        yield True


def _locked(stream: IO[str], kind: int) -> bool:
    try:
        fcntl.flock(stream.fileno(), kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _pid(directory: NodeDirectory) -> int | None:
    """Process id of the keeper, or None where there is none, or it has not said it yet."""
    try:
        with directory.keeper_file.open("r") as stream:
            if _locked(stream, fcntl.LOCK_SH):
                return None
            pid = int(stream.read())
        # What an earlier one has left in the file is somebody else by now.
        return pid if b"keep" in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0") else None
    except (FileNotFoundError, NotADirectoryError, ProcessLookupError, ValueError):
        return None
