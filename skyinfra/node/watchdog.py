"""The watchdog of a detached runner: starts it again where it was killed, as systemd does on cloud nodes.

The watchdog is a process of its own, so that it survives the runner; where it is killed itself, the runner starts
another one (`Watched`). Where the runner was stopped or has failed, or its folder is gone, the watchdog
ends, and empties its file: that of one that was killed names it still.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from skyinfra.errors import SkyinfraError
from skyinfra.node import detach
from skyinfra.node.folder import NodeDirectory, locked
from skyinfra.node.node import directory_of
from skyinfra.node.processes import poll
from skyinfra.protocol.nodeconfig import NodeConfig

_POLL_S = 0.5
# As RestartSec of the unit. A runner that was stopped has written its status by then.
_PAUSE_S = 2.0
_START_S = 20.0
_ATTEMPTS = 3
_PATIENCE_S = 1.0
_ENDED = ("stopped", "failed")
# Of `Watched`: between two looks. What is started again within that long was not missing. For a runner that the
# watchdog starts again to be ready, as `boot --wait` has it.
_LOOK_S = 2.0
_MISSING_S = 10.0
# The services of a node start with its runner, in any order: for so long none of them is missing.
_BEGIN_S = 30.0
_WAIT_S = 120.0
_SERVICES = ("interrupt", "watch")
_OF_HEADS = "watch"

logger = logging.getLogger("skyinfra.runner")


def ensure(path: Path, *, wait_s: float) -> None:
    """Starts a watchdog for the runner of the node *path*, unless it has one. Raises `StateDirectoryError`.

    *wait_s*: how long a restarted runner may take to be ready.
    """
    directory = directory_of(path)
    if _pid(directory) is not None:
        return
    watchdog = start(path, wait_s=wait_s)
    # From then on, `end` finds it.
    poll(lambda: _pid(directory) is not None or watchdog.poll() is not None, _START_S)


def start(path: Path, *, wait_s: float) -> subprocess.Popen[bytes]:
    """Starts a watchdog for the runner of the node *path*, which ends where there is one.

    Raises `StateDirectoryError`.
    """
    return detach.spawn(directory_of(path), "keep", path, "--wait", str(wait_s))


def was_killed(directory: NodeDirectory) -> bool:
    """Returns whether *directory* had a watchdog, and it is gone without an end of its own."""
    try:
        with directory.watchdog_file.open("r") as stream:
            return locked(stream, fcntl.LOCK_SH) and bool(stream.read().strip())
    except OSError:
        return False


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
        try:
            yield True
        finally:
            stream.truncate(0)


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


# In the runner ------------------------------------------------------------------------------------------------------


class Watched:
    """Looks after the watchdog and the services of the node with the configuration file *path*.

    missing: which of them is missing, and what follows from that, in a sentence; None where none is.
    """

    def __init__(self, path: Path, directory: NodeDirectory) -> None:
        self.missing: str | None = None
        self._path = path
        self._directory = directory
        self._next = 0.0
        self._began = time.monotonic()
        # Since when one is missing.
        self._since: dict[str, float] = {}

    def check(self) -> None:
        """Starts a watchdog that was killed again. Is called often."""
        now = time.monotonic()
        if now < self._next:
            return
        self._next = now + _LOOK_S
        gone = {}
        if was_killed(self._directory):
            gone["watchdog"] = (
                f"its watchdog was killed{self._start()}: nothing starts the runner again if that is, too"
            )
        for service in _SERVICES if now - self._began >= _BEGIN_S else ():
            if not self._directory.own_folder_of(service) and self._expects(service):
                gone[service] = f"skyinfra-{service} does not run: `journalctl -u skyinfra-{service}` says more"
        self._since = {name: self._since.get(name, now) for name in gone}
        lasting = [gone[name] for name, since in self._since.items() if now - since >= _MISSING_S]
        self.missing = "; ".join(lasting) or None

    def _expects(self, service: str) -> bool:
        if not self._directory.has_enabled(service):
            return False
        try:
            # A machine from an image of a head has the unit too.
            return service != _OF_HEADS or NodeConfig.load(self._path).head
        except SkyinfraError:
            return False

    def _start(self) -> str:
        """Starts a watchdog; returns why it cannot be started, in words that follow others."""
        try:
            start(self._path, wait_s=_WAIT_S)
        except (SkyinfraError, OSError) as error:
            return f" and cannot be started ({str(error).splitlines()[0]})"
        logger.warning("the watchdog was killed; it is started again")
        return ""
