"""The dashboard of a fleet's scheduler, through the connection of a client."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from http.cookiejar import CookieJar
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from local_fleets.running_node import RunningNode
from support import ROOT, missing

import skyinfra as sky
from skyinfra.protocol import services
from skyinfra.protocol.nodeconfig import NodeConfig

CONFIG = NodeConfig(1, "demo", "mig", "n1", "local", True, "127.0.0.1:0", cpu_slots=1)


def started(folder: Path) -> Iterator[RunningNode]:
    node = RunningNode(folder / "n1", CONFIG)
    try:
        node.boot()
        yield node
    finally:
        node.run("stop", "--timeout", "10", check=False)


@pytest.fixture
def node(tmp_path: Path) -> Iterator[RunningNode]:
    yield from started(tmp_path)


@pytest.fixture
def drawing_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[RunningNode]:
    """A node whose runner has bokeh."""
    if importlib.util.find_spec("bokeh") is None:
        folder = tmp_path / "bokeh"
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-compile", "--target", str(folder), "bokeh"]
        constraints = ["--constraint", str(ROOT / "constraints.txt")]
        if subprocess.run([*command, *constraints], check=False).returncode != 0:
            missing("bokeh")
        monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), str(folder)]))
    yield from started(tmp_path)


@pytest.mark.skipif(importlib.util.find_spec("bokeh") is not None, reason="bokeh is installed")
def test_a_head_that_cannot_draw_says_so(node: RunningNode) -> None:
    with node.pool() as pool:
        url, visitor = pool.dashboard(), browser()
        with visitor.open(url, timeout=60) as answer:
            assert answer.headers["Content-Type"].startswith("text/html")
        here = url.partition("?")[0]
        with visitor.open(f"{here}/state", timeout=60) as answer:
            found = json.load(answer)
        assert found["fleet"] == "demo/mig"
        [shown] = found["nodes"]
        assert (shown["name"], shown["problem"], shown["missing"]) == ("n1", None, [])
        assert [slot["slot"] for gpu in shown["gpus"] for slot in gpu["slots"]] == ["n1/0"]
        with visitor.open(f"{here}/log?node=n1", timeout=60) as answer:
            assert "n1" in json.load(answer)["text"]
        with pytest.raises(urllib.error.HTTPError, match="404"):
            visitor.open(f"{here}/other", timeout=60)
        with pytest.raises(urllib.error.HTTPError) as refused:
            visitor.open(daskpages(url), timeout=60)
        assert refused.value.code == 501
        assert re.search(r"no bokeh.*\n.*skyinfra\[dashboard\]", refused.value.read().decode())


def daskpages(url: str) -> str:
    """The scheduler's own pages beside the fleet page at *url*."""
    return url.replace("/fleet", "/status")


def browser() -> urllib.request.OpenerDirector:
    return urllib.request.build_opener(urllib.request.HTTPCookieProcessor(CookieJar()))


@pytest.mark.slow
def test_its_pages_arrive_and_go_with_the_pool(drawing_node: RunningNode) -> None:
    with drawing_node.pool() as pool:
        url = daskpages(pool.dashboard())
        assert url.startswith("http://127.0.0.1:")
        visitor = browser()
        for _ in range(3):
            with visitor.open(url, timeout=60) as answer:
                page = answer.read().decode()
            assert answer.status == 200
            assert "Dask" in page
        with pytest.raises(sky.PortTaken):
            pool.dashboard(int(url.rpartition(":")[2].partition("/")[0]))
        # The large files that the page loads arrive whole.
        with visitor.open(url.replace("/status", "/static/js/bokeh.min.js"), timeout=60) as answer:
            assert len(answer.read()) == int(answer.headers["Content-Length"]) > 500_000
        # Nobody else of this machine gets them.
        with pytest.raises(urllib.error.HTTPError, match="403"):
            browser().open(url.partition("?")[0], timeout=60)
        again = daskpages(pool.dashboard())
        assert again != url
    for address in (url, again):
        with pytest.raises(OSError, match="refused"):
            urllib.request.urlopen(address, timeout=10)


@pytest.mark.slow
def test_no_port_of_the_head_has_its_pages(drawing_node: RunningNode) -> None:
    with drawing_node.pool() as pool, drawing_node.client() as client:
        with browser().open(daskpages(pool.dashboard()), timeout=60) as answer:
            assert "Dask" in answer.read().decode()
        ports = [client.scheduler_info()["services"]["dashboard"]]
        ports += [worker["services"]["dashboard"] for worker in client.scheduler_info()["workers"].values()]
        for port in ports:
            with pytest.raises(urllib.error.HTTPError, match="404"):
                urllib.request.urlopen(f"http://127.0.0.1:{port}/status", timeout=60)


def upgrade(host: str, origin: str, session: str, *headers: str) -> bytes:
    lines = [
        "GET /status/ws HTTP/1.1",
        f"Host: {host}",
        f"Origin: {origin}",
        "Upgrade: websocket",
        "Connection: Upgrade",
        "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==",
        "Sec-WebSocket-Version: 13",
        f"Sec-WebSocket-Protocol: bokeh, {session}",
    ]
    return "\r\n".join([*lines, *headers, "", ""]).encode()


@pytest.mark.slow
def test_its_websocket_is_for_its_own_pages(drawing_node: RunningNode) -> None:
    with drawing_node.pool() as pool:
        url = daskpages(pool.dashboard())
        host = urlsplit(url).netloc
        jar = CookieJar()
        visitor = urllib.request.build_opener(urllib.request.HTTPCookieProcessor(jar))
        with visitor.open(url, timeout=60) as answer:
            session = re.search(r'"token":"([^"]+)"', answer.read().decode())
        assert session
        [cookie] = [f"Cookie: {each.name}={each.value}" for each in jar]

        def answered(*headers: str, origin: str = f"http://{host}") -> bytes:
            with socket.create_connection(("127.0.0.1", int(host.partition(":")[2])), timeout=60) as connection:
                connection.sendall(upgrade(host, origin, session[1], *headers))
                return connection.recv(12)

        assert answered(cookie) == b"HTTP/1.1 101"
        assert answered() == b"HTTP/1.1 403"
        assert answered(cookie, origin="http://evil.example") == b"HTTP/1.1 403"

        async def at_the_head(origin: str) -> bytes:
            """What the head answers to a client that lets everything pass."""
            head = pool._fleet.connection.head
            number = await services.dashboard_open(head)
            try:
                data = upgrade(host, origin, session[1])
                assert await services.dashboard_send(head, number=number, data=data)
                return (await services.dashboard_receive(head, number=number, wait_s=15) or b"")[:12]
            finally:
                await services.dashboard_close(head, number=number)

        assert pool._fleet.in_loop(at_the_head("http://evil.example")) == b"HTTP/1.1 403"
        assert pool._fleet.in_loop(at_the_head("http://localhost:1234")) == b"HTTP/1.1 101"
