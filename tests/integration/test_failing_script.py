"""A script whose task fails: what the person in front of the terminal reads, with whichever versions are installed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from support import first_fast, python_path
from terraform_projects.commands import environment

SCRIPT = """\
import skyinfra as sky


class Refused(ValueError):
    def __init__(self, name, code=500):
        super().__init__(f"{code}: {name}")
        self.held = open(__file__) if code == 500 else None


def deeper(x):
    if x > 0:
        raise Refused("as it should", code=x)  # this line


@sky.compute
def fail(x):
    return deeper(x)


POOL = sky.ComputePool(provider=sky.Local(simulate=True), accelerator="H100")
"""
RUN = """

if __name__ == "__main__":
    with POOL as pool:
        fail(404) >> pool
"""
DEBUGGED = """

if __name__ == "__main__":
    import pdb, sys
    with POOL as pool:
        try:
            fail(404) >> pool
        except Refused:
            pdb.post_mortem(sys.exc_info()[2])
"""
WAYS = {
    "guarded": RUN,
    "text": RUN.replace("404", "500"),
    "plain": "with POOL as pool:\n    fail(404) >> pool\n",
    "debugger": DEBUGGED,
}


@pytest.mark.parametrize("way", first_fast(WAYS))
def test_its_file_line_and_source_are_shown(tmp_path: Path, way: str) -> None:
    script = tmp_path / "script.py"
    script.write_text(f"{SCRIPT}{WAYS[way]}")
    done = subprocess.run(
        [sys.executable, str(script)],
        cwd=tmp_path,
        env=environment(PYTHONPATH=python_path()),
        input="w\nll\nq\n",
        capture_output=True,
        text=True,
        timeout=120,
    )
    text = done.stdout + done.stderr
    line = SCRIPT.splitlines().index('        raise Refused("as it should", code=x)  # this line') + 1
    if way == "debugger":
        assert f"{script}({line})deeper()" in text and "def deeper(x):" in text and "# this line" in text, text
        return
    assert done.returncode == 1
    assert f'File "{script}", line {line}, in deeper' in text and "# this line" in text, text
    assert f"Refused: {500 if way == 'text' else 404}: as it should" in text, text
    assert ("TaskFailed" in text) == (way == "text")
