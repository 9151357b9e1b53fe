"""Processes of test fleets, which a process that has imported what they need forks: see `local_fleets.__main__`."""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import select
import socket
import subprocess
import sys
from pathlib import Path
from typing import IO

# What a process reads as it starts: where these differ, another process forks.
_READ_AT_START = ("LD_", "PYTHON", "DASK_", "MALLOC_", "OMP_", "OPENBLAS_")
# Dask sets it before it starts a fork server, which libc reads then.
_TRIMMED = {"MALLOC_TRIM_THRESHOLD_": "65536"}

_forking: dict[tuple[tuple[str, str], ...], socket.socket] = {}


class FleetProcess:
    """The process of a fleet in *folder*: as much of `subprocess.Popen` as its tests use."""

    def __init__(self, folder: Path, env: dict[str, str], errors: IO[bytes]) -> None:
        env = {**env, **_TRIMMED}
        their_input, mine = os.pipe()
        answers, their_output = os.pipe()
        self.stdin, self.stdout = os.fdopen(mine, "wb"), os.fdopen(answers, "rb")
        line = _forks(env)
        request = json.dumps({"env": env, "folder": str(folder)}).encode()
        socket.send_fds(line, [request], [their_input, their_output, errors.fileno()])
        os.close(their_input)
        os.close(their_output)
        pid, known, _, _ = socket.recv_fds(line, 64, 1)
        self.pid = int(pid)
        self._known: int | None = known[0]

    def wait(self, seconds: float | None = None) -> None:
        """Waits until it has ended."""
        if self._known is None:
            return
        if not select.select([self._known], [], [], seconds)[0]:
            raise subprocess.TimeoutExpired("a fleet", seconds or 0)

    def close(self) -> None:
        """Closes what belongs to it here, once; it has ended."""
        for each in (self.stdin, self.stdout):
            with contextlib.suppress(BrokenPipeError):
                each.close()
        if self._known is not None:
            os.close(self._known)
            self._known = None


def _forks(env: dict[str, str]) -> socket.socket:
    """Returns the line to the process that forks fleets with this environment, once it has started."""
    key = tuple(sorted(item for item in env.items() if item[0].startswith(_READ_AT_START)))
    if key not in _forking:
        mine, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            program = [sys.executable, "-P", "-m", "local_fleets", str(theirs.fileno())]
            process = subprocess.Popen(
                program, env=env, stdin=subprocess.DEVNULL, start_new_session=True, pass_fds=[theirs.fileno()]
            )
        _forking[key] = mine
        atexit.register(process.wait, 60)
        atexit.register(mine.close)
    return _forking[key]
