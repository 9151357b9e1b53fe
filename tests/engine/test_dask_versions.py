"""The oldest version of Dask that pyproject.toml admits; all other tests run with the newest."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path

import pytest
from support import ROOT, missing

# They send tasks, lose slots, reconnect, drain and keep jobs.
TESTS = (
    "tests/tasks/test_client_tasks.py",
    "tests/client/test_client_chunks.py",
    "tests/client/test_client_failures.py",
    "tests/client/test_client_forward.py",
    "tests/client/test_client_leaves_nothing.py",
    "tests/client/test_client_unsafe_answers.py",
    "tests/engine/test_dask_comms.py",
    "tests/engine/test_dask_private.py",
    "tests/engine/test_handshakes.py",
    "tests/head/test_admission.py",
    "tests/head/test_jobs_and_their_head.py",
    "tests/head/test_jobs_of_fleet.py",
)


def bounds() -> tuple[str, str]:
    """The oldest version of distributed that is admitted, and the first that is not any more."""
    needs = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    need = next(each for each in needs if each.startswith("distributed"))
    match = re.fullmatch(r"distributed>=([\d.]+),<([\d.]+)", need)
    assert match, need
    return match[1], match[2]


def numbers(version: str) -> list[int]:
    return [int(each) for each in version.split(".")]


def test_the_newest_is_the_one_that_the_tests_run_with() -> None:
    oldest, too_new = bounds()
    pinned = re.search(r"(?m)^distributed==(.*)$", (ROOT / "constraints.txt").read_text())
    assert pinned
    year, month, *_ = numbers(pinned[1])
    assert numbers(too_new) == [year, month + 1], "raise the bound with the pin"
    assert numbers(oldest) <= numbers(metadata.version("distributed")) < numbers(too_new)


@pytest.mark.slow
def test_the_oldest(tmp_path: Path) -> None:
    oldest, _ = bounds()
    # What lies below a folder of that name is no code of the user, which would be pickled by value.
    folder = ROOT / "build" / f"dask-{oldest}" / "site-packages"
    if not folder.is_dir():
        missing(f"{folder.relative_to(ROOT)} (make dask)")
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    environment["PYTHONPATH"] = os.pathsep.join([str(folder), str(ROOT)])
    version = [sys.executable, "-c", "import distributed; print(distributed.__version__)"]
    shown = subprocess.run(version, env=environment, capture_output=True, text=True, check=True, cwd=tmp_path)
    assert shown.stdout.strip() == oldest
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "not slow"]
    done = subprocess.run([*command, *TESTS], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout[-5000:]
