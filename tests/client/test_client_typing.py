"""What editors and type checkers see, and what importing costs."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import skyinfra

ROOT = Path(skyinfra.__file__).parent.parent

SNIPPET = """
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
    train("a")
    name(3)
"""

REVEALED = [
    "skyinfra.client.task.Task[float]",
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
]


@pytest.mark.slow
def test_types_survive_the_decorator_and_the_operators(tmp_path):
    (tmp_path / "snippet.py").write_text(SNIPPET)
    checked = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", "--no-incremental", "--follow-imports=silent", "snippet.py"],
        cwd=tmp_path,
        env={**os.environ, "MYPYPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    own = [line for line in checked.stdout.splitlines() if line.startswith("snippet.py")]
    assert re.findall(r'Revealed type is "(.*)"', "\n".join(own).replace("builtins.", "")) == REVEALED
    errors = [line for line in own if "error:" in line]
    assert len(errors) == 2
    assert 'Argument 1 to "__call__" of "Compute"' in errors[0]


def test_declaring_tasks_imports_no_dask():
    program = "import sys, skyinfra as sky\n@sky.compute\ndef f(): ...\nf()\nprint('distributed' in sys.modules)"
    printed = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert printed.stdout.strip() == "False"
