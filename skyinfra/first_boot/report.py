"""Telling of a failed first boot, to whoever has the fleet secret and to nobody else.

Whoever listens speaks first, so that a peer that expects TLS notices at once: one line with a nonce. Then either the
other side asks, with a nonce of its own, and gets the failure; or it tells the failure of its own node. Both are one
line with an HMAC-SHA256 over the nonces and the text, under a key that is derived from the fleet secret for this alone:

    listener  skyinfra-boot 1 NONCE
    asking    ask NONCE HMAC              and gets    HMAC JSON
    telling   tell HMAC JSON              and gets    ok

The text is signed, not hidden: it holds the name of a step and the last lines of its output, never a secret.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import os
import secrets
import socket
import threading
import time
from pathlib import Path
from typing import Any, Callable

from .programs import read, read_json

_GREETING = "skyinfra-boot 1 "
_LABEL = b"skyinfra boot report, version 1"
LARGEST = 2**16
_ANSWER_S = 5.0
_REPEAT_S = 15.0
_POLL_S = 1.0
# Connections that are open at once, a quarter of them from one address; a new one takes the place of the oldest.
_AT_ONCE = 64
_LONGEST_S = 10.0


def key(secret: str) -> bytes:
    """HKDF-SHA256 of the fleet secret, for reports alone."""
    first = hmac.new(b"skyinfra", secret.encode(), "sha256").digest()
    return hmac.new(first, _LABEL + b"\1", "sha256").digest()


def sign(signing: bytes, *parts: str) -> str:
    """The HMAC of *parts*, of which only the last may hold a space or a line's end."""
    return hmac.new(signing, " ".join(parts).encode(), "sha256").hexdigest()


def greeting() -> tuple[str, str]:
    """A nonce, and the line that a listener begins with."""
    nonce = secrets.token_hex(16)
    return nonce, f"{_GREETING}{nonce}\n"


def send(address: str, port: int, secret: str, failure: dict[str, Any], *, timeout: float = _ANSWER_S) -> bool:
    """Tells the listener at *address* of a *failure*; whether it took it."""
    with contextlib.suppress(OSError, ValueError), connected(address, port, timeout) as stream:
        text = json.dumps(failure)
        mac = sign(key(secret), "tell", greeted(stream), text)
        stream.write(f"tell {mac} {text}\n".encode())
        stream.flush()
        return read_line(stream) == "ok"
    return False


def run(path: str, *, seconds: float = float("inf")) -> int:
    """Tells of the failure of this node for as long as there is one, at most that long."""
    boot, until = read_json(path), time.monotonic() + seconds
    failed = Path(boot["failure"])
    while time.monotonic() < until and failed.exists():
        if not Path(_secret_file(boot)).exists():
            # It has not been fetched yet, and without it nobody believes this node.
            time.sleep(_POLL_S)
            continue
        # Read anew: another step may fail now, and a node of a group may have got its name.
        config, failure = read_json(boot["node"]), read_json(boot["failure"])
        end = min(until, time.monotonic() + _REPEAT_S)
        # The port has to be free for the runner, once nothing has failed any more.
        spread(config, _secret(boot), failure, lambda end=end: time.monotonic() < end and failed.exists())  # type: ignore[misc]
    return 0


def spread(config: dict[str, Any], secret: str, failure: dict[str, Any], running: Callable[[], bool]) -> None:
    """As long as *running* says so: answers with *failure* where the head listens, or tells the head of it."""
    host, _, port = str(config["scheduler"]).rpartition(":")
    if config["head"]:
        _serve(host.strip("[]"), int(port), key(secret), failure, running)
    else:
        send(host.strip("[]"), int(port) + 1, secret, failure)
        while running():
            time.sleep(_POLL_S)


def _serve(host: str, port: int, signing: bytes, failure: dict[str, Any], running: Callable[[], bool]) -> None:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((host, port))
        except OSError as error:
            # The runner has it, or what is wrong with this machine is more than its steps.
            print(f"cannot listen on port {port}: {error.strerror}", flush=True)
            time.sleep(_POLL_S)
            return
        listener.listen()
        listener.settimeout(_POLL_S)
        peers: list[tuple[str, float, socket.socket]] = []
        while running():
            # Closed ones have no number.
            peers = [peer for peer in peers if peer[2].fileno() >= 0]
            _hang_up([peer for peer in peers if time.monotonic() > peer[1]])
            with contextlib.suppress(OSError):
                connection, (address, *_) = listener.accept()
                # Who says nothing, or little by little, keeps nobody else waiting.
                same = [peer for peer in peers if peer[0] == address]
                _hang_up(same[:1] if len(same) >= _AT_ONCE // 4 else peers[:1] if len(peers) >= _AT_ONCE else [])
                peers.append((address, time.monotonic() + _LONGEST_S, connection))
                arguments = (connection, signing, failure)
                threading.Thread(target=_answer, args=arguments, daemon=True).start()


def _hang_up(peers: list[tuple[str, float, socket.socket]]) -> None:
    """Ends the waiting for *peers*, whose threads close the connections."""
    for peer in peers:
        with contextlib.suppress(OSError):
            peer[2].shutdown(socket.SHUT_RDWR)


def _answer(connection: socket.socket, signing: bytes, failure: dict[str, Any]) -> None:
    # What hangs up, or is no text, is none of ours.
    with contextlib.suppress(OSError, ValueError), connection:
        connection.settimeout(_ANSWER_S)
        stream = connection.makefile("rwb")
        with contextlib.closing(stream):
            _converse(stream, signing, failure)


def _converse(stream: Any, signing: bytes, failure: dict[str, Any]) -> None:
    """Whoever shows no knowledge of the secret gets nothing."""
    nonce, line = greeting()
    stream.write(line.encode())
    stream.flush()
    verb, own, mac = read_line(stream).split(" ")
    if verb == "ask" and hmac.compare_digest(mac.encode(), sign(signing, "ask", nonce, own).encode()):
        text = json.dumps(failure)
        stream.write(f"{sign(signing, 'told', nonce, own, text)} {text}\n".encode())
        stream.flush()


class connected:  # noqa: N801 - a context manager
    """A stream to a listener."""

    def __init__(self, address: str, port: int, timeout: float) -> None:
        self._connection = socket.create_connection((address, port), timeout=timeout)
        self._stream = self._connection.makefile("rwb")

    def __enter__(self) -> Any:
        return self._stream

    def __exit__(self, *error: object) -> None:
        # What a peer that hung up was to get cannot be flushed.
        with contextlib.suppress(OSError):
            self._stream.close()
        self._connection.close()


def greeted(stream: Any) -> str:
    line = read_line(stream)
    if not line.startswith(_GREETING):
        raise ValueError("not a node that tells of its first boot")
    return line[len(_GREETING) :]


def read_line(stream: Any) -> str:
    data: bytes = stream.readline(LARGEST)
    return data.decode().rstrip("\n")


def _secret(boot: dict[str, Any]) -> str:
    return read(_secret_file(boot)).strip()


def _secret_file(boot: dict[str, Any]) -> str:
    folder = os.environ.get("CREDENTIALS_DIRECTORY")
    return str(Path(folder, "secret")) if folder else str(boot["secret"])
