"""What the integration tests share: a project in a folder, its processes, its leftovers."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TypeVar

import psutil
from support import ROOT

T = TypeVar("T")

QUICKSTART = ROOT / "stacks" / "quickstart"
SCRIPTS = Path(sys.executable).parent


def environment(**extra: str) -> dict[str, str]:
    return {**os.environ, "PATH": f"{SCRIPTS}{os.pathsep}{os.environ['PATH']}", **extra}


def copy_quickstart(folder: Path) -> Path:
    project = folder / "quickstart"
    shutil.copytree(QUICKSTART, project, ignore=shutil.ignore_patterns("cdktf.out", ".skyinfra", "*.tfstate*"))
    return project


def skyinfra(project: Path, *arguments: str, check: bool = True, **extra: str) -> subprocess.CompletedProcess[str]:
    result = subprocess.run(
        [sys.executable, "-m", "skyinfra.cli", *arguments],
        cwd=project,
        env=environment(**extra),
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        timeout=300,
    )
    if check and result.returncode != 0:
        raise AssertionError(f"skyinfra {' '.join(arguments)}: {result.returncode}\n{result.stdout}\n{result.stderr}")
    assert "Traceback" not in result.stderr
    return result


def left(project: Path) -> set[str]:
    """What stands in the folder of the local nodes, besides the jobs that are kept."""
    folder = project / ".skyinfra"
    return {each.name for each in folder.iterdir()} - {".jobs"} if folder.exists() else set()


def status(project: Path, stack: str = "quickstart") -> dict[str, Any]:
    found = json.loads(skyinfra(project, "status", "--json").stdout)
    return next(each for each in found["stacks"] if each["stack"] == stack)


def slots_of(found: dict[str, Any]) -> list[dict[str, Any]]:
    """Returns the slots of all nodes of a stack, as `status` has them."""
    return [slot for pool in found["pools"] for node in pool.get("nodes", ()) for slot in node["slots"]]


def processes(project: Path, word: str = "") -> list[psutil.Process]:
    """Every other process that has the project's folder on its command line or as its working folder, and *word* on the
    former. Not Podman's name server: that is of all networks of the machine, and stays where it was first started."""
    found = []
    for process in psutil.process_iter():
        # It may end at any moment.
        with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            command = " ".join(process.cmdline())
            here = str(project) in command or process.cwd().startswith(str(project))
            counts = process.name() != "aardvark-dns" and process.status() != psutil.STATUS_ZOMBIE
            if here and word in command and counts and process.pid != os.getpid():
                found.append(process)
    return found


def kill(found: Iterable[psutil.Process]) -> None:
    """Kills these processes, some of which end with others of them."""
    for process in found:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


def until(what: Callable[[], T | None], *, seconds: float = 60, last: Callable[[], object] | None = None) -> T:
    """The first true answer of *what*; an assertion fails when there is none in time, with what *last* gives then."""
    deadline = time.monotonic() + seconds
    while True:
        found = what()
        if found:
            return found
        assert time.monotonic() < deadline, f"not within {seconds} s: {last() if last is not None else what}"
        time.sleep(0.2)
