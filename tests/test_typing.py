"""What editors and type checkers see: one run of mypy, which reads the whole of skyinfra."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest
from support import ROOT

pytestmark = pytest.mark.slow

TASKS = """
import skyinfra as sky

@sky.compute
def train(seed: int) -> float:
    return float(seed)

@sky.compute()
def name(x: str, *, y: int = 0) -> str:
    return x

def use(pool: sky.Pool) -> None:
    reveal_type(train(0))
    reveal_type(train(0) >> pool)
    reveal_type(train(0) @ pool)
    reveal_type(train.local(0))
    reveal_type(sky.gather(train(0), name("a", y=1)) >> pool)
    reveal_type(sky.gather(*[train(0)]) >> pool)
    reveal_type(sky.gather(train(0), stream=True) >> pool)
    reveal_type(pool.map(train, range(3)))
    reveal_type(pool.map(len, ["a"]))
    reveal_type(pool.submit(train(0)).result())
    reveal_type(pool.submit(train, 0).result())
    reveal_type(pool.submit(train(0), detach="a job").result())
    reveal_type(pool.submit(train, 0, detach="a job").result())
    reveal_type(pool.submit(len, "a", detach="a job"))
    reveal_type(train.options(timeout=3)(0) >> pool)
    reveal_type(pool.starmap(train, [(0,)]))
    reveal_type(pool.map(train, range(3), ordered=False))
    reveal_type(sky.wait([pool.submit(train, 0)], return_when="FIRST_COMPLETED")[0])
    reveal_type(sky.current_pool())
    train("a")
    name(3)
"""

REVEALED = [
    "skyinfra.tasks.task.Task[float]",
    "float",
    "list[float]",
    "float",
    "tuple[float, str]",
    "tuple[float, ...]",
    "typing.Iterator[float]",
    "typing.Iterator[float]",
    "typing.Iterator[int]",
    "float",
    "float",
    "float",
    "float",
    "skyinfra.client.jobs.Job[int]",
    "float",
    "typing.Iterator[float]",
    "typing.Iterator[float]",
    "set[skyinfra.submission.futures.Future[float]]",
    "skyinfra.client.pool.Pool",
]

ACCELERATORS = """
import skyinfra as sky
one: sky.Accelerator = sky.accelerators.H100(count=4, memory='80GB', mig={'3g.40gb': 1})
reveal_type(sky.accelerators.RTX_4090())
sky.accelerators.H10()
sky.accelerators.H100(colour='green')
"""


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """What mypy says of each file."""
    folder = tmp_path_factory.mktemp("typing")
    snippets = {"tasks.py": TASKS, "accelerators.py": ACCELERATORS}
    for name, text in snippets.items():
        (folder / name).write_text(text)
    command = [sys.executable, "-m", "mypy", "--strict", "--no-incremental", "--follow-imports=silent", *snippets]
    environment = {**os.environ, "MYPYPATH": str(ROOT)}
    checked = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    lines = [line.partition(".py:") for line in checked.stdout.splitlines()]
    return {name: [f"line {after}" for file, _, after in lines if f"{file}.py" == name] for name in snippets}


def test_types_survive_the_decorator_and_the_operators(said: dict[str, list[str]]) -> None:
    own = said["tasks.py"]
    assert re.findall(r'Revealed type is "(.*)"', "\n".join(own).replace("builtins.", "")) == REVEALED
    errors = [line for line in own if "error:" in line]
    assert len(errors) == 2
    assert 'Argument 1 to "__call__" of "Compute"' in errors[0]


def test_the_factories_are_known(said: dict[str, list[str]]) -> None:
    assert said["accelerators.py"][:2] == [
        'line 4: note: Revealed type is "skyinfra.accelerators.accelerator.Accelerator"',
        'line 5: error: Module has no attribute "H10"  [attr-defined]',
    ]
    assert said["accelerators.py"][2].startswith('line 6: error: Unexpected keyword argument "colour"')
    assert not any(line.startswith(("line 2:", "line 3:")) for line in said["accelerators.py"])
