"""Notifies systemd of the service's state: sd_notify(3), over the socket in ``NOTIFY_SOCKET``."""

from __future__ import annotations

import contextlib
import os
import socket
import time

# Keep-alives within the time-out of systemd's watchdog.
_BEATS = 4
_STOPPING_S = 1.0


class Notifier:
    """Notifies systemd, if it listens. A failed notification is no error of the service."""

    def __init__(self) -> None:
        # Removed from the environment: tasks must not notify for the service.
        self._address = os.environ.pop("NOTIFY_SOCKET", "")
        patience = os.environ.pop("WATCHDOG_USEC", "")
        self._beat_s = int(patience) / 1e6 / _BEATS if patience.isdigit() and self._address else None
        self._next = 0.0
        self._status: str | None = None

    def alive(self, status: str) -> None:
        """Notifies that the service runs, with *status* in one line. Is called often.

        The first call notifies that it has started; from then on the watchdog counts. What systemd does not take now
        is sent with the next call.
        """
        beat = self._beat_s is not None and time.monotonic() >= self._next
        changes = [] if self._status is not None else ["READY=1"]
        if status != self._status:
            changes.append(f"STATUS={' '.join(status.split())[:500]}")
        if beat:
            changes.append("WATCHDOG=1")
        if changes and self._send("\n".join(changes)):
            self._status = status
            self._next = time.monotonic() + self._beat_s if beat and self._beat_s else self._next

    def stopping(self) -> None:
        """Notifies that the service ends."""
        self._send("STOPPING=1", _STOPPING_S)

    def _send(self, text: str, seconds: float = 0.0) -> bool:
        """Returns whether it was taken within *seconds*: the service does not wait for a systemd that is busy."""
        if not self._address:
            return True
        # An abstract address begins with a null byte, which systemd writes as @.
        address = "\0" + self._address[1:] if self._address.startswith("@") else self._address
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as line:
            line.settimeout(seconds)
            line.connect(address)
            line.sendall(text.encode())
            return True
        return False
