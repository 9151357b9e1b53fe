"""The side of who is told of a failed first boot, or asks for it. User data have no room for it, and nodes no need."""

from __future__ import annotations

import contextlib
import hmac
import json
import secrets
from typing import Any

from . import report

_ANSWER_S = 5.0


def ask(address: str, port: int, secret: str, *, timeout: float = _ANSWER_S) -> dict[str, Any] | None:
    """Returns the failure that the listener at *address* reports; None without a listener that knows the secret."""
    signing, own = report.key(secret), secrets.token_hex(16)
    with contextlib.suppress(OSError, ValueError), report.connected(address, port, timeout) as stream:
        nonce = report.greeted(stream)
        stream.write(f"ask {own} {report.sign(signing, 'ask', nonce, own)}\n".encode())
        stream.flush()
        mac, _, text = report.read_line(stream).partition(" ")
        if hmac.compare_digest(mac.encode(), report.sign(signing, "told", nonce, own, text).encode()):
            return _failure(text)
    return None


def reported(line: str, nonce: str, signing: bytes) -> dict[str, Any] | None:
    """The failure that a telling *line* is signed for; None where it is not."""
    verb, _, rest = line.strip().partition(" ")
    mac, _, text = rest.partition(" ")
    if verb != "tell" or not hmac.compare_digest(mac.encode(), report.sign(signing, "tell", nonce, text).encode()):
        return None
    return _failure(text)


def _failure(text: str) -> dict[str, Any] | None:
    failure = json.loads(text)
    return failure if isinstance(failure, dict) and failure.get("version") == 1 else None
