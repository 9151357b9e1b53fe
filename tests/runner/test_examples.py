"""The programs of examples/, on a node that the real runner serves."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from local_fleets.running_node import RunningNode, h100
from support import ROOT

from skyinfra.protocol.nodeconfig import NodeConfig

EXAMPLES = ROOT / "examples"
CONNECT = 'sky.connect("quickstart", "mig")'
SHORT = {
    "one_task": ["one slot: n1/", "every slot: n1/0 sees MIG-", "every slot: n1/1 sees MIG-"],
    "map": ["pi is about 3.14"],
    "gang": ["rank 0 of 2 on n1/", "rank 1 of 2 on n1/"],
    "stateful": ["loaded", "predictions: [0.0, 2.0, 4.0, 6.0, 8.0]"],
    "job": ["submitted: train-20", "result: 20 epochs"],
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with fleet.json, the manifest of a fleet with two slots."""
    path = tmp_path_factory.mktemp("examples")
    layout = (("3g.40gb", 0, 4), ("3g.40gb", 4, 4))
    config = NodeConfig(1, "demo", "mig", "n1", "local", True, "127.0.0.1:0", accelerator=h100(layout), simulate=True)
    node = RunningNode(path / "n1", config)
    try:
        node.boot()
        with node.pool() as pool:
            (path / "fleet.json").write_text(json.dumps(pool.manifest.to_json()))
        yield path
    finally:
        node.run("stop", "--timeout", "10", check=False)


def printed(program: Path, folder: Path, *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, str(program), *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name == "one_task" else pytest.mark.slow) for name in SHORT]
)
def test_a_short_example_shows_what_it_says(folder: Path, name: str) -> None:
    text = (EXAMPLES / f"{name}.py").read_text()
    assert CONNECT in text
    program = folder / f"{name}.py"
    program.write_text(text.replace(CONNECT, 'sky.connect("fleet.json")'))
    out = printed(program, folder)
    for said in SHORT[name]:
        assert said in out


def test_every_example_is_tested_and_compiles() -> None:
    programs = {path.stem: path for path in EXAMPLES.glob("*.py")}
    assert set(programs) == {"tour", *SHORT}
    for path in programs.values():
        compile(path.read_text(), str(path), "exec")


@pytest.mark.slow
def test_the_tour_shows_what_it_says(folder: Path) -> None:
    out = printed(EXAMPLES / "tour.py", folder, "fleet.json")
    for said in (
        "sky.gather(..., stream=True)         fast, then slow",
        "nap ran for more than 0.5 s and was stopped",
        "n1/",
        "| hello from a program",
        "ValueError: no data. Raised by rank 1 of fail_on_rank_1",
        "then other data (2 blobs sent) in the same process",
        "23 stops in",
    ):
        assert said in out
