"""What is told of a failed first boot: to whoever has the fleet secret, and to nobody else."""

from __future__ import annotations

import contextlib
import json
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from first_boots.boots import OLDEST, PACKAGE, SECRET, FirstBoot

from skyinfra.first_boot import report, report_client

FAILURE = {"version": 1, "fleet": "s/p", "node": "p-0", "step": "driver", "error": "é missing", "lines": ["a", "b\n c"]}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextlib.contextmanager
def failed_head(path: Path, *, python: str = "") -> Iterator[tuple[FirstBoot, int]]:
    """A head whose first boot has failed, and which says so."""
    port = free_port()
    boot = FirstBoot(path, scheduler=f"127.0.0.1:{port}", python=python)
    boot.write()
    boot.failure.parent.mkdir()
    boot.failure.write_text(json.dumps(FAILURE))
    with subprocess.Popen(boot.command("report"), cwd=PACKAGE) as process:
        try:
            deadline = time.monotonic() + 30
            while not _listens(port):
                assert time.monotonic() < deadline and process.poll() is None
                time.sleep(0.05)
            yield boot, port
        finally:
            boot.failure.unlink(missing_ok=True)
            try:
                # It ends by itself, since nothing has failed any more.
                assert process.wait(20) == 0
            finally:
                process.kill()


def _listens(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
        return True
    return False


def test_the_key_is_hkdf_of_the_secret() -> None:
    hkdf = HKDF(algorithm=hashes.SHA256(), length=32, salt=b"skyinfra", info=b"skyinfra boot report, version 1")
    assert report.key(SECRET) == hkdf.derive(SECRET.encode())


@pytest.mark.parametrize("python", ["", pytest.param(OLDEST, marks=pytest.mark.skipif(not OLDEST, reason="no 3.8"))])
def test_who_has_the_secret_is_told(tmp_path: Path, python: str) -> None:
    with failed_head(tmp_path, python=python) as (boot, port):
        assert report_client.ask("127.0.0.1", port, SECRET) == FAILURE
        # It ended a connection before, which leaves it as it was; another failure is told next.
        assert report_client.ask("127.0.0.1", port, SECRET[::-1]) is None
        assert report_client.ask("127.0.0.1", port, SECRET) == FAILURE
        assert boot.failure.exists()


def test_nobody_else_gets_anything(tmp_path: Path) -> None:
    with failed_head(tmp_path) as (_, port):
        own = "0" * 32
        for line in (
            b"\n",
            b"GET / HTTP/1.1\r\n\r\n",
            b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\n",
            f"ask {own} {'0' * 64}\n".encode(),
            f"ask {own} {report.sign(report.key(SECRET[::-1]), 'ask', own, own)}\n".encode(),
        ):
            assert _said_after(port, line) == b""
        # What somebody has overheard is good for one connection.
        assert _said_after(port, f"ask {own} {report.sign(report.key(SECRET), 'ask', own, own)}\n".encode()) == b""


def _said_after(port: int, line: bytes) -> bytes:
    """What the listener says after its greeting, which holds nothing but a nonce."""
    with socket.create_connection(("127.0.0.1", port), timeout=10) as connection, connection.makefile("rwb") as stream:
        first = stream.readline().decode()
        assert first.startswith("skyinfra-boot 1 ") and len(first) == len("skyinfra-boot 1 ") + 33
        stream.write(line)
        stream.flush()
        connection.shutdown(socket.SHUT_WR)
        with contextlib.suppress(ConnectionError):
            return stream.read()
        return b""


def test_strangers_keep_nobody_from_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "_LONGEST_S", 2.0)
    port, ends = free_port(), threading.Event()
    serving = (report._serve, "127.0.0.1", port, report.key(SECRET), FAILURE, lambda: not ends.is_set())
    with ThreadPoolExecutor() as threads, contextlib.ExitStack() as strangers:
        served = threads.submit(*serving)
        try:
            while not _listens(port):
                assert not served.done()
            silent = [
                strangers.enter_context(socket.create_connection(("127.0.0.1", port), timeout=20)) for _ in range(100)
            ]
            assert report_client.ask("127.0.0.1", port, SECRET) == FAILURE
            # Those of one address that are too many ended at once, the others when their time was over.
            for connection in silent:
                with contextlib.suppress(ConnectionError):
                    while connection.recv(4096):
                        pass
            # So does one that sends little by little.
            with socket.create_connection(("127.0.0.1", port), timeout=20) as slow, pytest.raises(OSError):
                for _ in range(200):
                    slow.sendall(b"a")
                    time.sleep(0.1)
        finally:
            ends.set()
        served.result(timeout=20)


def test_an_answer_that_is_not_signed_is_none() -> None:
    server = (
        "import socket\n"
        "listener = socket.create_server(('127.0.0.1', 0)); print(listener.getsockname()[1], flush=True)\n"
        "connection = listener.accept()[0]; connection.sendall(b'skyinfra-boot 1 ' + b'0' * 32 + b'\\n')\n"
        "connection.recv(1000); connection.sendall(b'0' * 64 + b' {\"version\": 1}\\n')\n"
    )
    with subprocess.Popen([sys.executable, "-c", server], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        port = int(process.stdout.readline())
        assert report_client.ask("127.0.0.1", port, SECRET) is None
        process.wait(10)


def test_other_services_are_no_reports() -> None:
    assert report_client.ask("127.0.0.1", free_port(), SECRET, timeout=2) is None


def test_only_what_is_signed_for_this_connection_is_believed() -> None:
    signing, text = report.key(SECRET), json.dumps(FAILURE)
    nonce, line = report.greeting()
    assert line == f"skyinfra-boot 1 {nonce}\n"
    good = f"tell {report.sign(signing, 'tell', nonce, text)} {text}"
    assert report_client.reported(good, nonce, signing) == FAILURE
    assert report_client.reported(good, nonce[::-1], signing) is None
    assert report_client.reported(good.replace("driver", "packages"), nonce, signing) is None
    assert report_client.reported(good, nonce, report.key(SECRET[::-1])) is None
    assert report_client.reported("tell", nonce, signing) is None
