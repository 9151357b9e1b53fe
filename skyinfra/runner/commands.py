"""Programs that clients run on this node, as the runner's user and outside of the slots: `skyinfra exec`.

A client starts a program and fetches its output again and again until its end. A program whose output nobody fetches
any more is ended, with everything that it started.
"""

from __future__ import annotations

import codecs
import contextlib
import os
import signal
import subprocess
import threading
import time
import uuid
from collections import deque
from pathlib import Path
from typing import IO, Any

from skyinfra.errors import InvalidField, NodeFailed

_ABANDONED_S = 60.0  # without a request of its client
_AT_ONCE = 16
# Characters that wait to be fetched; a program that prints more waits.
_BUFFER = 2**20
_PART = 256 * 1024
_GRACE_S = 5.0


class Commands:
    """The programs that run in *folder*."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._lock = threading.Lock()
        self._running: dict[str, _Command] = {}
        self._begun = False

    @property
    def active(self) -> bool:
        """Whether a program runs, or has run since the last call of `used`."""
        return self._begun or bool(self._running)

    def used(self) -> bool:
        """Returns whether a program runs, or has run since the last call."""
        found, self._begun = self.active, False
        return found

    def start(self, command: list[str]) -> str:
        """Starts a program and returns its id. Raises `NodeFailed`, `InvalidField`."""
        if not command or not all(isinstance(each, str) for each in command):
            raise InvalidField("no command", field="CMD")
        with self._lock:
            if len(self._running) >= _AT_ONCE:
                raise NodeFailed(f"{_AT_ONCE} commands run on this node already", hint="Wait until some have ended.")
            identity, self._begun = uuid.uuid4().hex, True
            try:
                self._running[identity] = _Command(command, self._folder)
            except (OSError, ValueError) as error:
                reason = error.strerror if isinstance(error, OSError) else str(error)
                raise NodeFailed(f"cannot be run: {reason}", field=command[0]) from None
        threading.Thread(target=self._watch, args=(identity,), name=f"command {identity}", daemon=True).start()
        return identity

    def output(self, identity: str, longest_s: float) -> dict[str, Any]:
        """Returns the new output, ``parts`` of (stream, text), and the exit ``code`` once all output is fetched.

        Waits at most *longest_s* seconds for output. The code is negative for a signal. Raises `NodeFailed`.
        """
        return self._find(identity).take(longest_s)

    def end(self, identity: str) -> None:
        """Ends the program, if it runs: SIGTERM, and SIGKILL 5 s later."""
        with contextlib.suppress(NodeFailed):
            self._find(identity).end()

    def _find(self, identity: str) -> _Command:
        with self._lock:
            found = self._running.get(identity)
        if found is None:
            raise NodeFailed("this node does not run that command any more", hint="Its runner was started again.")
        return found

    def _watch(self, identity: str) -> None:
        command = self._running[identity]
        while not command.fetched:
            if time.monotonic() - command.asked > _ABANDONED_S:
                command.end()
                break
            time.sleep(0.2)
        with self._lock:
            del self._running[identity]


class _Command:
    """One program, in a session of its own."""

    def __init__(self, arguments: list[str], folder: Path) -> None:
        self.asked = time.monotonic()
        self.fetched = False
        self._changed = threading.Condition()
        self._parts: deque[tuple[str, str]] = deque()
        self._waiting = 0
        self._open = 2
        self._process = subprocess.Popen(
            arguments,
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        for name, stream in (("stdout", self._process.stdout), ("stderr", self._process.stderr)):
            threading.Thread(target=self._read, args=(name, stream), daemon=True).start()

    def take(self, wait_s: float) -> dict[str, Any]:
        self.asked = time.monotonic()
        until = self.asked + wait_s
        with self._changed:
            self._changed.wait_for(lambda: self._parts or not self._open, wait_s)
            parts, size = [], 0
            while self._parts and size < _PART:
                parts.append(self._parts.popleft())
                size += len(parts[-1][1])
            self._waiting -= size
            self._changed.notify_all()
            ended = not self._open and not self._parts
        self.asked = time.monotonic()
        code = None
        if ended:
            # It may go on without its output.
            with contextlib.suppress(subprocess.TimeoutExpired):
                code = self._process.wait(max(0.0, until - time.monotonic()))
        self.fetched = code is not None
        return {"parts": parts, "code": code}

    def end(self) -> None:
        self._signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_GRACE_S)
        # What it started may go on without it.
        self._signal(signal.SIGKILL)
        with self._changed:
            self._waiting = -(2**62)  # nobody fetches what is still to come
            self._changed.notify_all()

    def _signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)

    def _read(self, name: str, stream: IO[bytes]) -> None:
        decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        with stream:
            while data := os.read(stream.fileno(), 65536):
                text = decoder.decode(data)
                with self._changed:
                    self._changed.wait_for(lambda: self._waiting < _BUFFER)
                    self._parts.append((name, text))
                    self._waiting += len(text)
                    self._changed.notify_all()
        with self._changed:
            self._open -= 1
            self._changed.notify_all()
