"""The dashboard of a fleet's scheduler, through the connection of a client."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from running_node import RunningNode
from support import ROOT, missing
from typer.testing import CliRunner

import skyinfra as sky
from skyinfra.cli.app import app
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
def test_a_head_that_cannot_draw_says_so(node: RunningNode, tmp_path: Path) -> None:
    with node.pool() as pool:
        with pytest.raises(sky.MissingDependency, match=r"no bokeh.*\n.*skyinfra\[dashboard\]"):
            pool.dashboard()
        manifest = tmp_path / "fleet.json"
        manifest.write_text(json.dumps(pool.manifest.to_json()))
    result = CliRunner().invoke(app, ["dashboard", str(manifest)])
    assert isinstance(result.exception, sky.MissingDependency)


@pytest.mark.slow
def test_its_pages_arrive_and_go_with_the_pool(drawing_node: RunningNode) -> None:
    with drawing_node.pool() as pool:
        url = pool.dashboard()
        assert url.startswith("http://127.0.0.1:")
        for _ in range(3):
            with urllib.request.urlopen(url, timeout=60) as answer:
                page = answer.read().decode()
            assert answer.status == 200
            assert "Dask" in page
        with pytest.raises(sky.PortTaken):
            pool.dashboard(int(url.rpartition(":")[2].partition("/")[0]))
        # The large files that the page loads arrive whole.
        with urllib.request.urlopen(url.replace("/status", "/static/js/bokeh.min.js"), timeout=60) as answer:
            assert len(answer.read()) == int(answer.headers["Content-Length"]) > 500_000
        again = pool.dashboard()
        assert again != url
    for address in (url, again):
        with pytest.raises(OSError, match="refused"):
            urllib.request.urlopen(address, timeout=10)
