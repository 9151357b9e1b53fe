"""What an image has imported before the processes of its slots are forked."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from local_fleets.running_node import RunningNode, h100, until

import skyinfra as sky
from skyinfra.node.folder import NodeDirectory
from skyinfra.protocol.nodeconfig import NodeConfig
from skyinfra.tasks import Task

TWO = (("3g.40gb", 0, 4), ("3g.40gb", 4, 4))


def config(**fields: Any) -> NodeConfig:
    return NodeConfig(
        1, "demo", "mig", "n1", "local", True, "127.0.0.1:0", accelerator=h100(TWO), simulate=True, **fields
    )


def loaded() -> tuple[bool, bool, str, str | None, int]:
    own = sys.modules.get("own_library")
    return (
        "colorsys" in sys.modules,
        own is not None,
        os.environ["CUDA_VISIBLE_DEVICES"],
        own.SEEN if own is not None else None,
        os.getppid(),
    )


def draw() -> tuple[float, float]:
    numpy, torch = map(sys.modules.get, ("numpy", "torch"))
    return numpy.random.random(), torch.default_generator.random()


def test_slots_have_what_was_imported_once_and_a_device_each(tmp_path: Path) -> None:
    node = RunningNode(tmp_path / "n1", config(env={"DEMO": "yes"}, preload=("colorsys", "own_library", "no_such_one")))
    packages = NodeDirectory(node.path).packages
    packages.mkdir()
    # Its generator has the methods of PyTorch's.
    (packages / "torch.py").write_text("import random\ndefault_generator = random.Random(1)\n")
    (packages / "own_library.py").write_text("import os\nSEEN = os.environ.get('DEMO')\n")
    try:
        node.boot()
        with node.pool() as pool:
            until(lambda: len(pool.slots()) == 2, "both slots are there")
            found = Task(loaded) @ pool
            assert [(a, b, seen) for a, b, _, seen, _ in found] == [(True, True, "yes")] * 2
            assert len({device for _, _, device, _, _ in found}) == 2
            assert "preload: no_such_one cannot be imported" in node.directory.log_file.read_text()
            before = {parent for *_, parent in found}
            # Another list: the slots start anew, from a new fork server.
            node.configure(preload=("colorsys", "numpy.random", "torch"))
            node.boot()
            until(lambda: len(pool.slots()) == 2, "both slots are there again")
            after = Task(loaded) @ pool
            assert [(a, b) for a, b, *_ in after] == [(True, False)] * 2
            assert before.isdisjoint({parent for *_, parent in after})
            ours, others = zip(*Task(draw) @ pool, strict=True)
            assert len(set(ours)) == len(set(others)) == 2, "the numbers of a process are not those of its fork server"
    finally:
        node.run("stop", "--timeout", "10", check=False)


def test_nothing_is_imported_unless_it_is_declared(tmp_path: Path) -> None:
    node = RunningNode(tmp_path / "n1", config())
    try:
        node.boot()
        with node.pool() as pool:
            assert [found[:2] for found in Task(loaded) @ pool] == [(False, False)] * 2
    finally:
        node.run("stop", "--timeout", "10", check=False)


def test_a_library_that_opens_a_device_is_not_kept(tmp_path: Path) -> None:
    (tmp_path / "greedy.py").write_text("file = open('/dev/zero')\n")
    wanted = {"modules": ["greedy", "colorsys"], "packages": str(tmp_path), "env": {"DEMO": "1"}}
    program = (
        "import os, sys\n"
        "from skyinfra.worker import preload\n"
        "if preload.VARIABLE in os.environ:\n"
        "    preload.load(os.environ[preload.VARIABLE], devices=('/dev/zero',))\n"
        "print('greedy' in sys.modules, 'colorsys' in sys.modules, os.environ.get('DEMO'))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "SKYINFRA_PRELOAD": json.dumps(wanted), "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == "False False None"
    assert "importing greedy, colorsys opens /dev/zero; nothing is preloaded" in done.stderr


@pytest.mark.parametrize("name", ["", "1a", "a b", "a;b", "-c", "a..b"])
def test_only_names_of_modules_can_be_declared(name: str) -> None:
    with pytest.raises(sky.InvalidField, match="preload"):
        sky.Image(preload=[name])
