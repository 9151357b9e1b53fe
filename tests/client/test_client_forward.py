"""Ports of nodes at ports of this machine, through the head's one port; the nodes are real."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import signal
import socket
import socketserver
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from local_fleets.running_node import RunningNode
from support import python_path
from typer.testing import CliRunner

import skyinfra as sky
from skyinfra.cli.app import app
from skyinfra.client import Pool

SERVED = b"from the node\n" * 1000


class Pages(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(SERVED)))
        self.end_headers()
        self.wfile.write(SERVED)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def web() -> Iterator[int]:
    """The port of a web server."""
    with ThreadingHTTPServer(("127.0.0.1", 0), Pages) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server.server_port
        server.shutdown()


def get(port: int) -> bytes:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/", timeout=60) as answer:
        found: bytes = answer.read()
        return found


def unused() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
        return port


@pytest.fixture
def nodes(make_node: Callable[..., RunningNode]) -> tuple[RunningNode, RunningNode]:
    """A head and another node."""
    head = make_node("n1", cpu_slots=1)
    head.boot()
    other = make_node("n2", cpu_slots=1, head=False, scheduler=head.directory.scheduler_file.read_text().strip())
    other.boot()
    return head, other


@pytest.fixture
def manifest(nodes: tuple[RunningNode, RunningNode], tmp_path: Path) -> Path:
    file = tmp_path / "fleet.json"
    with nodes[0].pool(nodes[1]) as pool:
        file.write_text(json.dumps(pool.manifest.to_json()))
    return file


def test_by_the_command_until_ctrl_c(manifest: Path, web: int) -> None:
    free, silent = unused(), unused()
    command = [
        sys.executable,
        "-m",
        "skyinfra.cli",
        "port-forward",
        str(manifest),
        "n2",
        f"{free}:{web}",
        f"0:{silent}",
    ]
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": python_path()},
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == f"127.0.0.1:{free} is port {web} of n2 until you press Ctrl-C.\n"
        nowhere = int(process.stdout.readline().split(" ")[0].rpartition(":")[2])
        assert get(free) == SERVED
        for _ in range(2):
            with pytest.raises(OSError):
                get(nowhere)
        assert get(free) == SERVED
        process.send_signal(signal.SIGINT)
        said = process.communicate(timeout=60)[1]
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 130
    assert said.count(f"a connection to port {silent} of n2 was refused: n2: nothing listens at port {silent}") == 1, (
        said
    )
    assert f"127.0.0.1:{free} to port {web} of n2: 2 connections; " in said and "KiB back" in said
    assert f"127.0.0.1:{nowhere} to port {silent} of n2: 2 connections, 2 of them refused or broken; 0 bytes" in said
    assert "Traceback" not in said
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", free), timeout=10)


@pytest.mark.slow
def test_it_listens_at_the_loopback_only_and_says_what_it_cannot(
    make_node: Callable[..., RunningNode], web: int, tmp_path: Path
) -> None:
    head = make_node("n1", cpu_slots=1)
    head.boot()
    with head.pool() as pool:
        forward = pool.forward("n1", web)
        assert get(forward.port) == SERVED
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.2", forward.port), timeout=10)
        with pytest.raises(sky.PortTaken, match=f"cannot listen on 127.0.0.1:{forward.port}"):
            pool.forward("n1", web, local=forward.port)
        (tmp_path / "fleet.json").write_text(json.dumps(pool.manifest.to_json()))
    # Another secret, another fleet: nobody forwards.
    stranger = {**json.loads((tmp_path / "fleet.json").read_text()), "secret": "fedcba9876543210" * 4}
    (tmp_path / "stranger.json").write_text(json.dumps(stranger))
    refused = CliRunner().invoke(app, ["port-forward", str(tmp_path / "stranger.json"), "n1", f"0:{web}"])
    assert isinstance(refused.exception, sky.CredentialsRefused)
    for ports, words in (("x", "expected PORT"), ("0", "expected PORT"), ("1:99999", "expected PORT")):
        wrong = CliRunner().invoke(app, ["port-forward", str(tmp_path / "fleet.json"), "n1", ports])
        assert words in str(wrong.exception)
    wrong = CliRunner().invoke(app, ["port-forward", str(tmp_path / "fleet.json"), "n2", "80"])
    assert "Did you mean n1?" in str(wrong.exception)


# What goes through ----------------------------------------------------------------------------------------------------


class Hashing(socketserver.BaseRequestHandler):
    """Gives the SHA-256 of everything that comes, once that has ended."""

    def handle(self) -> None:
        digest = hashlib.sha256()
        while data := self.request.recv(2**20):
            digest.update(data)
        self.request.sendall(digest.digest())


class Echoing(socketserver.BaseRequestHandler):
    def handle(self) -> None:
        with contextlib.suppress(OSError):
            while data := self.request.recv(2**16):
                self.request.sendall(data)


@contextlib.contextmanager
def served(handler: type[socketserver.BaseRequestHandler]) -> Iterator[int]:
    class Server(socketserver.ThreadingTCPServer):
        daemon_threads = True
        request_queue_size = 128

    with Server(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server.server_address[1]
        server.shutdown()


@pytest.fixture
def pool(nodes: tuple[RunningNode, RunningNode]) -> Iterator[Pool]:
    with nodes[0].pool(nodes[1]) as pool:
        yield pool


def sent_to(port: int, data: bytes) -> bytes:
    """The answer to *data*, after whose end it comes."""
    with socket.create_connection(("127.0.0.1", port), timeout=120) as connection:
        connection.sendall(data)
        connection.shutdown(socket.SHUT_WR)
        found = b""
        while part := connection.recv(2**20):
            found += part
        return found


@pytest.mark.slow
def test_much_goes_there_and_back_intact(pool: Pool) -> None:
    data = os.urandom(2**20) * 100
    with served(Hashing) as port:
        for node in ("n1", "n2"):
            forward = pool.forward(node, port)
            assert sent_to(forward.port, data) == hashlib.sha256(data).digest()
            assert (forward.traffic.sent, forward.traffic.received, forward.broken) == (len(data), 32, 0)
    with served(Echoing) as port:
        forward = pool.forward("n2", port)
        with socket.create_connection(("127.0.0.1", forward.port), timeout=120) as connection:

            def send() -> None:
                connection.sendall(data)
                connection.shutdown(socket.SHUT_WR)

            thread = threading.Thread(target=send)
            thread.start()
            digest, size = hashlib.sha256(), 0
            while part := connection.recv(2**20):
                digest.update(part)
                size += len(part)
            thread.join()
        assert (size, digest.digest()) == (len(data), hashlib.sha256(data).digest())


@pytest.mark.slow
def test_many_beside_one_another_and_one_that_breaks(pool: Pool) -> None:
    with served(Echoing) as port:
        forward = pool.forward("n2", port)
        broken = socket.create_connection(("127.0.0.1", forward.port), timeout=60)
        broken.sendall(b"x")
        assert broken.recv(1) == b"x"
        with contextlib.ExitStack() as stack:
            lines = [
                stack.enter_context(socket.create_connection(("127.0.0.1", forward.port), timeout=60))
                for _ in range(40)
            ]
            # Reset, as by a program that is killed.
            broken.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
            broken.close()

            def talk(line: socket.socket) -> bytes:
                found = b""
                for number in range(20):
                    line.sendall(b"%04d" % number)
                    while len(found) < 4 * (number + 1):
                        found += line.recv(4096)
                return found

            with ThreadPoolExecutor(40) as threads:
                assert set(threads.map(talk, lines)) == {b"".join(b"%04d" % number for number in range(20))}
        assert forward.connections == 41


@pytest.mark.slow
def test_a_node_that_ends_breaks_its_connections_and_no_others(
    nodes: tuple[RunningNode, RunningNode], pool: Pool
) -> None:
    with served(Echoing) as port:
        lines = []
        for node in ("n1", "n2"):
            lines.append(socket.create_connection(("127.0.0.1", pool.forward(node, port).port), timeout=60))
            lines[-1].sendall(b"x")
            assert lines[-1].recv(1) == b"x"
        nodes[1].run("stop", "--timeout", "10")
        # It must not look as if the server had ended it.
        with pytest.raises(ConnectionResetError):
            lines[1].recv(1)
        lines[0].sendall(b"y")
        assert lines[0].recv(1) == b"y"
        for each in lines:
            each.close()
