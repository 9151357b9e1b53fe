"""Every option of a task holds in every way to run one."""

from __future__ import annotations

import asyncio
import functools
import inspect
import itertools
import json
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from local_fleets.running_node import RunningNode, h100
from tasks_on_nodes.jobs import manifest_of

import skyinfra as sky
from skyinfra.client import detach_script, run_script
from skyinfra.client.pool import Pool
from skyinfra.protocol.manifest import Manifest
from skyinfra.protocol.nodeconfig import NodeConfig
from skyinfra.tasks.task import Options

# What it shares is expensive: all of it in one process.
pytestmark = pytest.mark.xdist_group("options_everywhere")

LAYOUT = (("3g.40gb", 0, 4), ("1g.10gb", 4, 1), ("1g.10gb", 5, 1))


@pytest.fixture(scope="module")
def manifest(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Manifest]:
    """A fleet of one node with three slots, of which the first one is the largest."""
    config = NodeConfig(1, "demo", "mig", "n1", "local", True, "127.0.0.1:0", accelerator=h100(LAYOUT), simulate=True)
    head = RunningNode(tmp_path_factory.mktemp("fleet") / "n1", config)
    try:
        head.boot()
        yield manifest_of(head)
    finally:
        head.stop()


@pytest.fixture(scope="module")
def pool(manifest: Manifest) -> Iterator[Pool]:
    with sky.connect(manifest, progress=False) as pool:
        yield pool


# Of this process: stays there between its tasks.
earlier: list[str] = []


def probe(path: str, what: str) -> Any:
    """Tells what it sees of an option; *path* names files for each slot, or for all."""
    info = sky.instance_info()
    before = len(earlier)
    earlier.append(path)
    if what == "hang":
        for _ in range(500):
            time.sleep(0.02)
    if what == "fail once":
        with Path(path.format(slot=info.worker)).open("a") as file:
            file.write(".")
            if file.tell() < 2:
                raise LookupError("once more")
    seen = {"flag": os.environ.get("FLAG"), "token": os.environ.get("TOKEN")}
    return {**seen, "slot": info.slot, "profile": info.profile, "earlier": before}


class Object:
    def probe(self, path: str, what: str) -> Any:
        return probe(path, what)


def in_coroutine(pool: Pool, work: Callable[[sky.AsyncPool], Any]) -> Any:
    async def main() -> Any:
        async with sky.connect_async(pool.manifest, progress=False) as own:
            return await work(own)

    return asyncio.run(main())


def compute(options: dict[str, Any]) -> Any:
    return sky.compute(**options)(probe)


def submitted(pool: Pool, options: dict[str, Any], *args: str) -> Any:
    return pool.submit(compute(options), *args).result(timeout=60)


def script(pool: Pool, options: dict[str, Any], *args: str) -> Any:
    """As a program; as a job where it is to start again: only there an exit code is an exception."""
    imports = "from __future__ import annotations\nimport json, os, sys, time\nfrom pathlib import Path"
    text = f"{imports}\nimport skyinfra as sky\nearlier = []\n{inspect.getsource(probe)}"
    with tempfile.TemporaryDirectory() as folder:
        file, found = Path(folder, "script.py"), Path(folder, "found")
        # Not as a line, in which secrets are masked.
        file.write_text(f"{text}\nPath({str(found)!r}).write_text(json.dumps(probe(*sys.argv[1:])))\n")
        settings = Options(**options)
        if settings.retries:
            return detach_script(pool, file, args, settings=settings).result(timeout=60)
        assert run_script(pool, file, args, settings=settings, on_line=on_line) == 0
        return json.loads(found.read_text())


def on_line(*_: object) -> None: ...


Way = Callable[..., Any]
WAYS: dict[str, Way] = {
    ">>": lambda pool, options, *args: compute(options)(*args) >> pool,
    ".options": lambda pool, options, *args: compute({})(*args).options(**options) >> pool,
    "@": lambda pool, options, *args: (compute(options)(*args) @ pool)[-1],
    "gather": lambda pool, options, *args: (sky.gather(compute(options)(*args), compute({})("", "")) >> pool)[0],
    "map": lambda pool, options, *args: next(pool.map(compute(options), *([each] for each in args))),
    "starmap": lambda pool, options, *args: next(pool.starmap(compute(options), [args])),
    "submit": submitted,
    "partial": lambda pool, options, path, what: pool.submit(functools.partial(compute(options), path), what).result(
        timeout=60
    ),
    "coroutine": lambda pool, options, *args: in_coroutine(pool, lambda own: own.run(compute(options)(*args))),
    "job": lambda pool, options, *args: pool.detach(compute(options)(*args)).result(timeout=60),
    "gang": lambda pool, options, *args: pool.launch(compute(options), *args, nodes=1, per_node=1, framework="none")[0],
    "gang of a task": lambda pool, options, *args: pool.launch(
        compute({})(*args).options(**options), nodes=1, per_node=1, framework="none"
    )[0],
    "gang in a coroutine": lambda pool, options, *args: in_coroutine(
        pool, lambda own: own.launch(compute(options), *args, nodes=1, per_node=1, framework="none")
    )[0],
    "script": script,
    "object": lambda pool, options, *args: sky.cls(**options)(Object)().probe(*args) >> pool,
}

# By option: its value, the argument of the probe, and what it gives or raises. Two slots of partitions are none.
OPTIONS: dict[str, tuple[object, str, object]] = {
    "timeout": (0.4, "hang", sky.TaskTimeout),
    "retries": (1, "fail once", None),
    "profile": ("3g.40gb", "", ("profile", "3g.40gb")),
    "gpu_memory_gb": (30, "", ("slot", "n1/0")),
    "slot": ("n1/2", "", ("slot", "n1/2")),
    "env": ({"FLAG": "1"}, "", ("flag", "1")),
    "secrets": (["TOKEN"], "", ("token", "a value")),
    "slots": (2, "", sky.NotSupported),
    "fresh": (True, "", ("earlier", 0)),
}


def test_no_option_is_forgotten() -> None:
    assert set(OPTIONS) == {each.name for each in fields(Options)}


# All of them in `make test-all`; in `make test` each option in two ways, and each way with one.
PAIRS = [
    pytest.param(way, option, marks=() if way in (">>", "job") or option == "env" else pytest.mark.slow)
    for way, option in itertools.product(WAYS, OPTIONS)
]


@pytest.mark.parametrize(("way", "option"), PAIRS)
def test_it_holds(
    way: str,
    option: str,
    pool: Pool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("TOKEN", "a value")
    value, what, wanted = OPTIONS[option]
    if option == "fresh":
        assert all(each["earlier"] for each in [compute({})("", "") @ pool for _ in range(2)][-1])
    path = str(tmp_path / ("starts{slot}" if way == "@" else "starts"))
    if isinstance(wanted, type) and issubclass(wanted, Exception):
        with pytest.raises(wanted):
            WAYS[way](pool, {option: value}, path, what)
        return
    found = WAYS[way](pool, {option: value}, path, what)
    if isinstance(wanted, tuple):
        name, given = wanted
        assert found[name] == given
    else:
        assert {file.read_text() for file in tmp_path.iterdir()} == {".."}


def test_retries_of_a_gang_are_for_ranks_that_raise_and_max_restarts_stands_above_them(pool, tmp_path):
    twice = compute({"retries": 1})
    with pytest.raises(LookupError):
        pool.launch(twice, str(tmp_path / "a"), "fail once", per_node=1, framework="none", max_restarts=0)
    assert (tmp_path / "a").read_text() == "."


def test_variables_of_a_launch_stand_above_those_of_the_function(pool):
    options = {"nodes": 1, "per_node": 1, "framework": "none"}
    assert pool.launch(compute({"env": {"FLAG": "1"}}), "", "", env={"FLAG": "2"}, **options)[0]["flag"] == "2"


def test_a_script_has_those_that_it_can_have(pool, tmp_path):
    script = tmp_path / "script.py"
    script.write_text("import os, skyinfra as sky\nprint(os.environ['FLAG'], sky.instance_info().profile)\n")
    lines: list[str] = []
    code = run_script(
        pool.select(profile="3g.40gb"), script, env={"FLAG": "1"}, on_line=lambda _, line: lines.append(line)
    )
    assert (code, lines) == (0, ["1 3g.40gb"])
