"""examples/tour.py, on a node that the real runner serves."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from running_node import RunningNode, h100
from support import ROOT

from skyinfra.protocol.nodeconfig import NodeConfig


@pytest.mark.slow
def test_the_tour_shows_what_it_says(tmp_path: Path) -> None:
    layout = (("3g.40gb", 0, 4), ("3g.40gb", 4, 4))
    config = NodeConfig(1, "demo", "mig", "n1", "local", True, "127.0.0.1:0", accelerator=h100(layout), simulate=True)
    node = RunningNode(tmp_path / "n1", config)
    try:
        node.boot()
        with node.pool() as pool:
            (tmp_path / "fleet.json").write_text(json.dumps(pool.manifest.to_json()))
        done = subprocess.run(
            [sys.executable, str(ROOT / "examples" / "tour.py"), "fleet.json"],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            timeout=120,
        )
    finally:
        node.run("stop", "--timeout", "10", check=False)
    assert (done.returncode, done.stderr) == (0, "")
    for said in (
        "sky.gather(..., stream=True)         fast, then slow",
        "nap ran for more than 0.5 s and was stopped",
        "n1/",
        "| hello from a program",
        "ValueError: no data. Raised by rank 1 of fail_on_rank_1",
        "then other data (2 blobs sent) in the same process",
        "23 stops in",
    ):
        assert said in done.stdout
