"""A plan takes the last synthesis where nothing of what that has read has changed: each thing by itself."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

import skyinfra as sky
from skyinfra.terraform.project import Project

PROGRAM = """
import json, os, pathlib
import skyinfra
import shared

output = pathlib.Path(os.environ["CDKTF_OUTDIR"])
stack = output / "stacks" / "lab"
stack.mkdir(parents=True, exist_ok=True)
pools = pathlib.Path("../company/pools.yaml").read_text()
others = sorted(os.listdir("../company/more"))
value = [pools, others, shared.X, os.getenv("ZONE")]
(stack / "cdk.tf.json").write_text(json.dumps({"output": {"x": {"value": value}}}))
entry = {"name": "lab", "workingDirectory": "stacks/lab", "synthesizedStackPath": "stacks/lab/cdk.tf.json"}
(output / "manifest.json").write_text(json.dumps({"version": "0", "stacks": {"lab": entry}}))
with open("runs.tfstate", "a") as runs:
    runs.write("x")
"""


class Bed:
    """A project whose program reads files beside it, and what it has written."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "project"
        self.company = folder / "company"
        for each in (self.folder, self.company / "more"):
            each.mkdir(parents=True)
        (self.folder / "cdktf.json").write_text(json.dumps({"app": "python main.py"}))
        (self.folder / "main.py").write_text(PROGRAM)
        (self.folder / "tasks.py").write_text("")
        (self.company / "pools.yaml").write_text("one")
        (self.company / "shared.py").write_text("X = 1\n")

    def synthesize(self) -> None:
        Project.read(self.folder).synth()

    @property
    def same(self) -> bool:
        return Project.read(self.folder).unchanged_since() is not None


@pytest.fixture
def bed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bed:
    root = os.fspath(Path(__file__).parents[2])
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([os.fspath(tmp_path / "company"), root]))
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    return Bed(tmp_path)


def _edited(file: Path) -> None:
    file.write_text(file.read_text() + "# more\n")


CHANGES: dict[str, Callable[[Bed], object]] = {
    "the program": lambda bed: _edited(bed.folder / "main.py"),
    "a file of the project": lambda bed: _edited(bed.folder / "tasks.py"),
    "a new file of the project": lambda bed: (bed.folder / "new.py").touch(),
    "a file of the project that is gone": lambda bed: (bed.folder / "tasks.py").unlink(),
    "the command": lambda bed: (bed.folder / "cdktf.json").write_text(json.dumps({"app": "python  main.py"})),
    "a file elsewhere": lambda bed: _edited(bed.company / "pools.yaml"),
    "a file elsewhere, of the same size and age": lambda bed: _replaced(bed.company / "pools.yaml"),
    "a file elsewhere that is gone": lambda bed: (bed.company / "pools.yaml").unlink(),
    "a module elsewhere": lambda bed: _edited(bed.company / "shared.py"),
    "a file in a folder that was listed": lambda bed: (bed.company / "more" / "b").touch(),
    "what was written": lambda bed: _edited(bed.folder / "cdktf.out/stacks/lab/cdk.tf.json"),
    "what was written is gone": lambda bed: (bed.folder / "cdktf.out/manifest.json").unlink(),
    "the notes of the last synthesis": lambda bed: (bed.folder / "cdktf.out/.reads.json").write_text("[]"),
}


def _replaced(file: Path) -> None:
    found = file.stat()
    file.write_text("two")
    os.utime(file, ns=(found.st_atime_ns, found.st_mtime_ns))


def test_nothing_has_changed(bed: Bed, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not bed.same, "nothing was synthesized yet"
    bed.synthesize()
    assert bed.same
    monkeypatch.setenv("COLUMNS", "60")
    (bed.folder / "terraform.lab.tfstate").write_text("{}")
    monkeypatch.chdir(bed.company)
    assert bed.same, "another terminal, another folder, and what Terraform writes"


@pytest.mark.parametrize("change", CHANGES)
def test_what_has_changed_is_synthesized(bed: Bed, change: str) -> None:
    bed.synthesize()
    assert bed.same
    CHANGES[change](bed)
    assert not bed.same


def test_a_variable_has_changed(bed: Bed, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ZONE", "a")
    bed.synthesize()
    monkeypatch.setenv("ZONE", "b")
    assert not bed.same
    monkeypatch.delenv("ZONE")
    assert not bed.same


@pytest.mark.parametrize(
    "line",
    [
        "print('a warning')",
        "import subprocess; subprocess.run(['true'])",
        "os.system('true')",
        "import socket; socket.socket().connect_ex(('127.0.0.1', 9))",
        "import socket; socket.getaddrinfo('localhost', 80)",
        "pathlib.Path('made').write_text(str(os.getpid()))",
    ],
)
def test_a_program_whose_answers_nobody_knows_runs_each_time(bed: Bed, line: str) -> None:
    """It prints, asks another program or the network, or writes what the next run finds in the project."""
    (bed.folder / "main.py").write_text(f"{PROGRAM}\n{line}\n")
    bed.synthesize()
    assert not bed.same


def test_a_program_of_cdktf_alone_runs_each_time(bed: Bed) -> None:
    (bed.folder / "main.py").write_text(PROGRAM.replace("import skyinfra\n", ""))
    bed.synthesize()
    assert not bed.same


def test_a_failed_synthesis_is_not_taken(bed: Bed) -> None:
    bed.synthesize()
    (bed.folder / "main.py").write_text(f"{PROGRAM}\nraise SystemExit(3)\n")
    with pytest.raises(sky.AppFailed):
        bed.synthesize()
    assert not bed.same
    assert not list((bed.folder / "cdktf.out").glob(".*")), "nothing stays of it"
    (bed.folder / "main.py").write_text(PROGRAM)
    assert not bed.same
