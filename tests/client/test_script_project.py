"""The project of a script: what goes with it, what comes back, and modules that are missing."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
from checks.leaks import files_with

import skyinfra as sky
from skyinfra import InvalidInclude
from skyinfra.cli.run import ScriptOptions, run_on_slot
from skyinfra.client import Fetching, Pool, open_pool, run_script
from skyinfra.tasks.task import Options

PROJECT = {
    "train.py": "import helper, lib.deep, json, os, sys\n"
    "open('written', 'w').write('x')\n"
    "words, here = open('data/words.txt').read(), set(os.listdir('.')) - {'__pycache__'}\n"
    "print(helper.NAME, lib.deep.NAME, words, os.environ.get('HF'), sorted(here))\n",
    "helper.py": "NAME = 'beside'\n",
    "lib/__init__.py": "",
    "lib/deep.py": "NAME = 'in a package'\n",
    "lib/tool.py": "from lib import deep\nprint(deep.NAME, __file__.endswith('/tool.py'))\n",
    "data/words.txt": "words",
    "big.bin": "left behind",
    "secret.txt": "ignored by git",
    ".skyinfraignore": "*.bin\n",
    ".gitignore": "secret.txt\n",
}


@pytest.fixture
def project(tmp_path: Path) -> Path:
    root = tmp_path / "project"
    for name, text in PROJECT.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    subprocess.run(["git", "init", "-q", str(root)], check=True)
    return root


@pytest.fixture
def shipped(fleet, tmp_path, capfd):
    """`skyinfra run` of a script; gives its exit code, and what it printed."""
    manifest = tmp_path / "fleet.json"
    manifest.write_text(json.dumps(fleet.manifest.to_json()))

    def run(script: Path, **goes) -> tuple[int, str, str]:
        capfd.readouterr()
        code = run_on_slot(str(manifest), script, [], ScriptOptions(**goes))
        return code, *capfd.readouterr()

    return run


def test_the_project_goes_with_its_script(shipped, project, monkeypatch):
    monkeypatch.setenv("HF", "of this shell")
    # A manifest beside it, as Slurm's jobs have it, stays here.
    (project / "fleet.json").write_text((project.parent / "fleet.json").read_text())
    code, out, err = shipped(project / "train.py", env=("HF",))
    assert (code, err.count("\n")) == (0, 2), err
    assert "train.py wrote written (1 byte) in its copy of the folder, which is removed" in err
    assert "train.py is sent with 7 other files" in err
    seen = ["data", "helper.py", "lib", "train.py", "written"]
    hidden = [".gitignore", ".skyinfraignore"]
    assert out == f"beside in a package words of this shell {hidden + seen}\n"
    assert not (project / "written").exists()
    (project / "helper.py").write_text("NAME = 'changed'\n")
    assert shipped(project / "train.py", env=("HF=given",))[1].startswith("changed in a package words given")


def test_the_file_of_a_secret_stays_here(shipped, project, fleet):
    token = "tok-4f1c8b2e97"
    (project / "data/token").write_text(f"{token}\n")
    (project / "train.py").write_text("import os; print(os.listdir('data'), len(os.environ['TOKEN']))")
    assert shipped(project / "train.py", secret=(f"TOKEN=@{project}/data/token",))[:2] == (0, "['words.txt'] 14\n")
    assert files_with(token, fleet.root) == []
    with pytest.raises(InvalidInclude, match="is the file of a secret"):
        shipped(project / "train.py", include=(project / "data/token",))


WRITER = """
import os, sys
open("data/words.txt", "a").write(" more")      # a file of the project is the program's own
os.makedirs("out/deep", exist_ok=True)
for number in range(4): open(f"out/deep/{number}.csv", "w").write("x" * 1024 * (number + 1))
open("model.pt", "wb").write(b"w" * 3 * 2**20)
os.symlink("/etc/passwd", "link.csv")
os.makedirs(".git/hooks", exist_ok=True)
open(".git/hooks/run.csv", "w").write("!")
open("helper.py").read()
sys.exit(int(os.environ.get("CODE", "0")))
"""


def test_files_that_a_script_writes_in_its_copy_are_named_with_their_sizes(shipped, project):
    (project / "train.py").write_text(WRITER)
    for _ in range(2):  # nothing of the first run is there for the second
        _, _, err = shipped(project / "train.py")
        (line,) = [line for line in err.splitlines() if "wrote" in line]
        assert line == (
            "train.py wrote model.pt (3.0 MiB), out/deep/3.csv (4.0 KiB), out/deep/2.csv (3.0 KiB), out/deep/1.csv "
            "(2.0 KiB), out/deep/0.csv (1.0 KiB) and 2 other files (11 bytes) in its copy of the folder, which is "
            "removed; `--fetch PATTERN` brings such files here"
        )
    assert (project / "data/words.txt").read_text() == "words"
    (project / "train.py").write_text("import helper, os; os.symlink('helper.py', 'again.py')")
    assert "wrote" not in shipped(project / "train.py")[2], "links, modules that Python compiled, and what is unchanged"


def test_files_are_fetched_however_the_script_ends(shipped, project):
    (project / "train.py").write_text(WRITER)
    code, _, err = shipped(project / "train.py", fetch=("*.csv", "!0.csv", "data/"), env=("CODE=3",))
    assert code == 3
    assert "data/words.txt (10 bytes, replaced)" in err and "wrote model.pt (3.0 MiB)" in err
    found = {str(path.relative_to(project)) for path in project.rglob("*.csv")}
    assert found == {f"out/deep/{number}.csv" for number in (1, 2, 3)}, "nothing of .git, no link"
    assert (project / "data/words.txt").read_text() == "words more"
    assert "wrote no file that --fetch names (*.json)" in shipped(project / "train.py", fetch=("*.json",))[2]
    (project / "train.py").write_text("import os, signal; open('a.txt', 'w'); os.kill(os.getpid(), signal.SIGSEGV)")
    code, _, err = shipped(project / "train.py", fetch=("/a.txt",), fetch_to=project / "elsewhere")
    assert (code, (project / "elsewhere/a.txt").read_text()) == (128 + 11, "")
    assert "train.py was killed by signal 11 (SIGSEGV)" in err


def test_what_was_changed_here_meanwhile_stays(shipped, project, monkeypatch):
    (project / "train.py").write_text(WRITER)
    (project / "out/deep").mkdir(parents=True)
    (project / "out/deep/1.csv").write_text("of an earlier run, ignored by git")
    (project / ".gitignore").write_text("out/\n")
    later = time.time() + 60
    for name in ("out/deep/2.csv", "data/words.txt"):

        def change(path: Path = project / name) -> None:
            path.write_text("changed here")
            os.utime(path, (later, later))

        monkeypatch.setattr(Fetching, "take", _after(Fetching.take, change))
    _, _, err = shipped(project / "train.py", fetch=("out/", "data/"))
    assert (project / "out/deep/1.csv").stat().st_size == 2048, "it was not changed since the script was sent"
    for name in ("out/deep/2.csv", "data/words.txt"):
        assert (project / name).read_text() == "changed here"
        assert f"{name} was changed here meanwhile and stays; the fetched one is {name}.fetched" in err
    assert (project / "data/words.txt.fetched").read_text() == "words more"


def test_files_come_back_to_a_folder_that_is_named_by_way_of_another(shipped, project):
    (project / "train.py").write_text(WRITER)
    os.utime(project / "data/words.txt", (time.time() + 60,) * 2)
    _, _, err = shipped(project / "lib" / ".." / "train.py", fetch=("data/",))
    assert f"fetched to {project}: data/words.txt (10 bytes, replaced)" in err, "it is what was sent"


def _after(method, action):
    def call(*arguments):
        action()
        return method(*arguments)

    return call


@pytest.mark.parametrize(
    ("leads", "why"),
    [("../elsewhere", "leads out of the folder"), ("out", "lies below out, which is a file here")],
)
def test_nothing_is_written_outside_of_the_folder(shipped, project, tmp_path, monkeypatch, leads, why):
    (project / "train.py").write_text(WRITER)
    (tmp_path / "elsewhere").mkdir()
    # Meanwhile.
    link = _after(Fetching.take, lambda: (project / "out").symlink_to(leads))
    monkeypatch.setattr(Fetching, "take", lambda self, kind, found: link(self, kind, found) if found.tree else None)
    _, _, err = shipped(project / "train.py", fetch=("*.csv",))
    assert f"out/deep/3.csv was not fetched: it {why}" in err
    assert not list((tmp_path / "elsewhere").iterdir())
    with pytest.raises(sky.InvalidField, match="--fetch: names no files"):
        shipped(project / "train.py", fetch=("../*",))
    with pytest.raises(sky.InvalidField, match="--fetch-to: needs --fetch"):
        ScriptOptions(fetch_to=tmp_path)


@pytest.mark.parametrize("slots", [1, 2])
def test_files_of_a_script_that_is_interrupted_are_fetched(fleets, project, slots):
    (project / "train.py").write_text(
        "import time\nopen('best.pt', 'w').write('best')\n"
        "try:\n    print('written', flush=True)\n    time.sleep(600)\n"
        "finally:\n    open('last.pt', 'w').write('last')\n    print('cleaned', end='')\n"
    )
    said: list[str] = []

    def interrupt(_: str, line: str) -> None:
        said.append(line)
        if line == "written":
            raise KeyboardInterrupt

    with open_pool(fleets(nodes=("n0",), whole=True).manifest) as pool:
        files = Fetching(pool, project, "train.py", ("*.pt",))
        given = {"fetch": files.fetch, "on_files": files.take, "slots": slots}
        with pytest.raises(KeyboardInterrupt):
            run_script(pool, project / "train.py", on_line=interrupt, **given)
        fetched = list(files.bring())
    assert "cleaned" in said
    assert fetched == [f"fetched to {project}: best.pt (4 bytes), last.pt (4 bytes)"]
    assert (project / "last.pt").read_text() == "last"


def test_files_of_a_script_that_runs_for_too_long_are_fetched(fleets, project, monkeypatch):
    """They may be on their way for longer than the script may run: its task has no timeout."""
    (project / "train.py").write_text(
        "import signal, sys, time\n"
        "def end(*_):\n    open('last.pt', 'w').write('last')\n    sys.exit(3)\n"
        "signal.signal(signal.SIGTERM, end)\ntime.sleep(600)\n"
    )
    with open_pool(fleets(nodes=("n0",), whole=True).manifest) as pool:
        sent: list[Any] = []
        send = Pool.send
        monkeypatch.setattr(
            Pool, "send", lambda self, task, *more, **named: sent.append(task) or send(self, task, *more, **named)
        )
        files = Fetching(pool, project, "train.py", ("*.pt",))
        given = {"fetch": files.fetch, "on_files": files.take, "settings": Options(timeout=5)}
        with pytest.raises(sky.TaskTimeout, match=r"train\.py ran for more than 5 s"):
            run_script(pool, project / "train.py", on_line=lambda *_: None, **given)
        assert list(files.bring()) == [f"fetched to {project}: last.pt (4 bytes)"]
    assert [task.settings.timeout for task in sent] == [None]


def test_a_file_with_a_secret_of_the_script_is_not_kept_on_disks(shipped, project, fleet, monkeypatch):
    monkeypatch.setenv("TOKEN", "tok-77f1c8b2e97a")
    (project / "train.py").write_text(
        "import os\nopen('a.log', 'w').write('x' * 5_000_000 + os.environ['TOKEN'])\nopen('b.log', 'w').write('fine')\n"
    )
    _, _, err = shipped(project / "train.py", fetch=("*.log",), secret=("TOKEN",))
    assert "not fetched: a.log holds a secret of the task" in err
    assert (project / "b.log").read_text() == "fine" and not (project / "a.log").exists()
    assert files_with("tok-77f1c8b2e97a", fleet.root) == []


def test_nothing_is_sent_where_git_does_not_say_what_it_ignores(shipped, project, tmp_path, monkeypatch):
    tools = tmp_path / "tools"
    tools.mkdir()
    git = tools / "git"
    git.write_text(
        f"#!/bin/sh\necho \"fatal: detected dubious ownership in repository at '{project}'\" >&2\n"
        "echo 'To add an exception, call:' >&2\nexit 128\n"
    )
    git.chmod(0o755)
    script = project / "lib" / "tool.py"
    (project / "lib" / "__init__.py").unlink()
    script.write_text("print('ran')\n")
    monkeypatch.setenv("PATH", f"{tools}{os.pathsep}{os.environ['PATH']}")
    dubious = r"includes: Git does not say what it ignores: detected dubious ownership in repository at '.*/project'\W"
    with pytest.raises(InvalidInclude, match=dubious) as caught:
        shipped(script)
    assert caught.value.given == str(project / "lib"), "the repository is above it"
    assert f"safe.directory {project}`" in caught.value.hint
    monkeypatch.setenv("PATH", str(tmp_path / "none"))
    with pytest.raises(InvalidInclude, match="Git does not say what it ignores: there is no git here"):
        shipped(script, workdir=project)
    assert shipped(script, alone=True)[:2] == (0, "ran\n")
    shutil.rmtree(project / ".git")
    assert shipped(script)[:2] == (0, "ran\n"), "no repository"


@pytest.mark.parametrize("ignores", [".gitignore", ".skyinfraignore"])
def test_a_folder_that_is_named_goes_whole_though_its_files_are_ignored(shipped, project, ignores):
    for folder in ("models", "others"):
        for name in ("a.pt", "__pycache__/b.pt"):
            (project / folder / name).parent.mkdir(parents=True, exist_ok=True)
            (project / folder / name).write_text("weights")
    with (project / ignores).open("a") as file:
        file.write("*.pt\n")
    (project / "train.py").write_text("import pathlib; print(*sorted(pathlib.Path().rglob('*.pt')))\n")
    assert shipped(project / "train.py")[:2] == (0, "\n")
    assert shipped(project / "train.py", include=(project / "models",))[:2] == (0, "models/a.pt\n")


def test_a_script_in_a_package_finds_the_package(shipped, project):
    assert shipped(project / "lib" / "tool.py")[:2] == (0, "in a package True\n")


def test_a_script_goes_alone_where_that_is_asked_for(shipped, project):
    code, _, err = shipped(project / "train.py", alone=True)
    assert code == 1
    assert "No module named 'helper'" in err
    code, _, _ = shipped(project / "train.py", alone=True, include=(project / "helper.py", project / "lib"))
    assert code == 1, "its data are not beside it"


def test_a_file_of_variables(shipped, project, tmp_path):
    (tmp_path / "vars").write_text("# tokens\nHF = of the file\n\n")
    assert " of the file " in shipped(project / "train.py", env_file=tmp_path / "vars")[1]


@pytest.mark.parametrize(
    ("goes", "says"),
    [
        ({"env": ("NO_SUCH_VARIABLE",)}, "this shell has no such variable"),
        ({"env": ("1=2",)}, "expected NAME=VALUE"),
        ({"env_file": Path("/no/such")}, "cannot be read"),
        ({"node": "n9"}, "n9"),
    ],
)
def test_what_cannot_go(shipped, project, goes, says):
    with pytest.raises(sky.SkyinfraError, match=says):
        shipped(project / "train.py", **goes)


def test_more_than_a_project_is_refused(shipped, project, monkeypatch):
    monkeypatch.setattr("skyinfra.sync.project.MOST_FILES", 3)
    with pytest.raises(InvalidInclude, match="more than 3 files") as caught:
        shipped(project / "train.py")
    assert "--alone" in str(caught.value)


def test_a_home_folder_is_no_project(shipped, project, monkeypatch):
    monkeypatch.setenv("HOME", str(project))
    code, _, err = shipped(project / "train.py")
    assert code == 1
    assert "goes with" not in err


# A working directory, several slots, and modules that are missing --------------------------------------------------


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    root = tmp_path / "repository"
    files = {
        "scripts/train.py": "import os, sys, tool\nfrom shared import NAME\n"
        "print(sorted(os.listdir('.')), open('data.txt').read(), NAME, __file__ == os.path.abspath(sys.argv[0]))\n"
        "open('scripts/written', 'w').close()\n",
        "scripts/tool.py": "",
        "shared.py": "NAME = 'shared'\n",
        "data.txt": "data",
        "left.bin": "",
        ".skyinfraignore": "*.bin\n",
    }
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def test_a_script_has_its_place_in_its_working_directory(shipped, repository):
    code, out, err = shipped(repository / "scripts" / "train.py", workdir=repository)
    assert code == 0, err
    here = [".skyinfraignore", "data.txt", "scripts", "shared.py"]
    assert f"{here} data shared" in out
    assert out.rstrip().endswith("True")
    assert not (repository / "scripts" / "written").exists()


def test_a_script_from_elsewhere_runs_in_the_working_directory(shipped, repository, tmp_path):
    (tmp_path / "other.py").write_text("import shared\nprint(open('data.txt').read(), shared.NAME)\n")
    assert shipped(tmp_path / "other.py", workdir=repository)[:2] == (0, "data shared\n")
    with pytest.raises(sky.InvalidField, match="--workdir: there is no such folder"):
        shipped(tmp_path / "other.py", workdir=tmp_path / "none")
    with pytest.raises(sky.InvalidField, match=r"--workdir: .*--alone"):
        ScriptOptions(alone=True, workdir=repository)


@pytest.mark.parametrize(
    ("module", "goes", "says"),
    [
        (
            "helper",
            {"alone": True},
            r"helper is .*helper\.py here: --alone left it here; `--include .*helper\.py` takes it",
        ),
        (
            "ignored",
            {},
            r"ignored is .*ignored\.py here: Git, \.skyinfraignore or .*`--include .*ignored\.py` takes it",
        ),
        ("lib.extra", {}, r"lib\.extra is .*lib/extra\.py here: .*`--include .*lib/extra\.py`"),
        (
            "installed_here",
            {},
            r'Here installed_here is installed, by Its-Name==1\.2: sky\.Image\(pip=\["Its-Name==1\.2"\]\)',
        ),
        ("nowhere_at_all", {}, r"This machine has no module nowhere_at_all either\. sky\.Image\(pip=\[\.\.\.\]\)"),
    ],
)
def test_a_module_that_is_missing_is_answered_with_what_ships_it(shipped, project, monkeypatch, module, goes, says):
    known = {"installed_here": ["Its-Name"]}
    monkeypatch.setattr("skyinfra.tasks.missing.metadata.packages_distributions", lambda: known)
    monkeypatch.setattr("skyinfra.tasks.missing.metadata.version", lambda _: "1.2+cu121")
    for name in ("ignored.py", "lib/extra.py"):
        (project / name).write_text("NAME = 1\n")
    with (project / ".gitignore").open("a") as file:
        file.write("ignored.py\nextra.py\n")
    (project / "train.py").write_text(f"import {module}\n")
    code, _, err = shipped(project / "train.py", **goes)
    assert code == 1
    assert f"ModuleNotFoundError: No module named '{module}'" in err
    assert re.search(says, err.splitlines()[-1]), err
    if "is .*here" in says and not goes:
        path = project / (module.replace(".", "/") + ".py")
        assert shipped(project / "train.py", include=(path,))[0] == 0, "what it says helps"
