"""What is synced of a project: what is included, what is left out, and from where nodes import it."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

import skyinfra as sky
from skyinfra.blobs.trees import parse_name
from skyinfra.sync import includes
from skyinfra.sync.includes import Includes


def scanned(root: Path, *paths: str, excludes: tuple[str, ...] = ()) -> list[str]:
    include = Includes(root, "0123456789abcdef" * 4)
    include.add(paths, excludes)
    return sorted(include.scan().tree.files)


def test_state_secrets_and_what_tools_leave_are_not_included(project, fleet):
    package = project / "src" / "shiny"
    for name in ("x.pyc", "terraform.tfstate", "terraform.tfstate.backup", ".env"):
        (package / name).write_text("left out")
    for folder in ("__pycache__", ".git", ".venv", "node_modules", ".terraform", "cdktf.out", ".tox", ".cache"):
        (package / folder).mkdir()
        (package / folder / "file.py").write_text("left out")
    assert scanned(project, "src") == [f"src/shiny/{name}" for name in ("__init__.py", "beside.txt", "deeper.py")]
    with pytest.raises(sky.InvalidInclude, match="state holds secrets"):
        scanned(project, "src/shiny/terraform.tfstate")
    # Under any name.
    (package / "fleet.json").write_text(json.dumps({"head": "x" * 2**20, "secret": fleet.manifest.secret}))
    with pytest.raises(sky.InvalidInclude, match=r"src/shiny/fleet\.json: holds the secret") as caught:
        scanned(project, "src")
    assert fleet.manifest.secret not in str(caught.value)


@pytest.mark.parametrize(
    ("excludes", "left"),
    [
        (("*.txt",), ["src/shiny/__init__.py", "src/shiny/deeper.py"]),
        (("data",), ["src/shiny/__init__.py", "src/shiny/beside.txt", "src/shiny/deeper.py"]),
        (("src/shiny/*.py",), ["data/vocab.txt", "src/shiny/beside.txt"]),
        (("src/**/deep*", "/data/"), ["src/shiny/__init__.py", "src/shiny/beside.txt"]),
        (("*", "!src/", "!shiny", "!b?side.[a-t]xt"), ["src/shiny/beside.txt"]),
        (("data/**", "!data/v**b.txt", "src/**/*.py"), ["data/vocab.txt", "src/shiny/beside.txt"]),
    ],
)
def test_excludes_are_those_of_a_gitignore(project, excludes, left):
    assert scanned(project, ".", excludes=excludes) == left


def test_a_pattern_for_folders_is_none_for_files(project):
    assert "data/vocab.txt" in scanned(project, ".", excludes=("vocab.txt/",))


def test_environments_are_left_out_and_packages_of_their_name_are_not(project):
    for name, mark in (
        ("my-env", "pyvenv.cfg"),
        ("env", "lib/x.py"),
        ("venv", "bin/python"),
        ("conda", "conda-meta/h"),
    ):
        file = project / "data" / name / mark
        file.parent.mkdir(parents=True)
        file.write_text("left out")
    (project / "data" / "my-env" / "own.py").write_text("left out")
    assert scanned(project, "data") == ["data/vocab.txt"]
    # As in a .gitignore, somebody may want one all the same; the environment of a game is a package.
    (project / "src" / "env").mkdir()
    (project / "src" / "env" / "cartpole.py").touch()
    assert "src/env/cartpole.py" in scanned(project, "src")
    assert "data/my-env/own.py" in scanned(project, "data", excludes=("!my-env/",))


def test_links_lead_nowhere_else(project, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(includes, "_said", set())
    (project / "data" / "link.txt").symlink_to("vocab.txt")
    (project / "data" / "deeper").mkdir()
    (project / "data" / "deeper" / "x").write_text("x")
    (project / "data" / "folder").symlink_to("deeper")
    assert scanned(project, "data") == ["data/deeper/x", "data/folder/x", "data/link.txt", "data/vocab.txt"]
    (project / "data" / "deeper" / "up").symlink_to("..")
    (project / "data" / "out").symlink_to(tmp_path)
    (project / "data" / "gone").symlink_to(tmp_path / "nowhere")
    (project / "data" / "code").symlink_to(project / "src")
    for _ in range(2):
        found = scanned(project, "data")
        assert found == ["data/deeper/x", "data/folder/x", "data/link.txt", "data/vocab.txt"]
    said = capsys.readouterr().err
    assert said.count("data/deeper/up is left out: a link to a folder that it is in\n") == 1
    assert said.count(f"data/out is left out: a link that leads out of what is sent along, to {tmp_path};") == 1
    assert "data/gone is left out" in said and "data/code is left out" in said
    # What goes along itself may be led to.
    assert "data/code/shiny/deeper.py" in scanned(project, "data", "src")


def test_folders_that_cannot_be_read_and_links_to_themselves_are_left_out(project, capsys, monkeypatch):
    monkeypatch.setattr(includes, "_said", set())
    (project / "data/closed").mkdir()
    (project / "data/closed/file").touch()
    (project / "data/itself").symlink_to("itself")
    (project / "data/itself.txt").symlink_to(project / "data/itself/x.txt")
    iterdir, stat = Path.iterdir, os.stat

    def listed(folder: Path) -> Iterator[Path]:
        refuse(folder)
        return iterdir(folder)

    def looked_at(path: object, **given: object) -> os.stat_result:
        refuse(Path(str(path)).parent)
        return stat(path, **given)

    def refuse(folder: Path) -> None:
        if folder.name == "closed":
            raise PermissionError(13, "Permission denied", str(folder))

    # Root may read all.
    monkeypatch.setattr(Path, "iterdir", listed)
    monkeypatch.setattr(os, "stat", looked_at)
    assert scanned(project, "data") == ["data/vocab.txt"]
    assert "data/closed is left out: cannot be read: Permission denied\n" in capsys.readouterr().err
    with pytest.raises(sky.InvalidInclude, match=r"includes: cannot be read: Permission denied .*closed"):
        scanned(project, "data/closed")


def test_a_file_that_goes_meanwhile_is_said(project, monkeypatch):
    monkeypatch.setattr(includes, "check_paths", lambda files: (project / "data/vocab.txt").unlink())
    with pytest.raises(sky.InvalidInclude, match=r"includes: cannot be read: No such file .*vocab"):
        scanned(project, "data")


def test_what_cannot_be_included_is_said(project, tmp_path, monkeypatch):
    with pytest.raises(sky.InvalidInclude, match=r"includes: is not there \(given: 'srx'\)"):
        scanned(project, "srx")
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "same.txt").touch()
    with pytest.raises(sky.InvalidInclude, match="two of them have the same name"):
        scanned(project, str(tmp_path / "a" / "same.txt"), str(tmp_path / "b" / "same.txt"))
    (project / "data" / "huge.bin").write_bytes(bytes(3000))
    monkeypatch.setattr(includes, "MOST_BYTES", 2000)
    with pytest.raises(
        sky.InvalidInclude, match=r"(?s)2 files with 2\.9 KiB are more than.*\n +2\.9 KiB  data/huge\.bin\n.*excludes="
    ):
        scanned(project, "data")


@pytest.mark.parametrize(
    ("paths", "roots"),
    [
        (("src",), ("src",)),
        (("src/shiny",), ("src",)),
        (("src/shiny/deeper.py",), ("src",)),
        ((".",), ("src",)),
        (("data",), ()),
        (("scripts",), ("scripts",)),
        (("scripts/run.py",), ("scripts",)),
        (("scripts", "src"), ("src", "scripts")),
    ],
)
def test_nodes_import_from_where_the_client_does(project, paths, roots):
    (project / "scripts").mkdir()
    (project / "scripts" / "run.py").touch()
    include = Includes(project, "secret")
    include.add(paths)
    assert include.scan().tree.roots == roots


def test_what_lies_elsewhere_stands_by_how_it_is_imported_or_by_its_name(project, tmp_path, monkeypatch):
    shared = tmp_path / "shared"
    (shared / "space" / "part").mkdir(parents=True)
    (shared / "space" / "part" / "__init__.py").touch()
    (shared / "table.csv").touch()
    include = Includes(project, "secret")
    include.add([shared / "space" / "part", shared / "table.csv"])
    assert sorted(include.scan().tree.files) == ["part/__init__.py", "table.csv"]
    monkeypatch.syspath_prepend(str(shared))
    scan = include.scan()
    assert sorted(scan.tree.files) == ["space/part/__init__.py", "table.csv"]
    assert scan.tree.roots == (".",)


@pytest.mark.parametrize("size", ["-1", "1_0", " 1", "1e3", "", str(2**31), "9" * 40])
def test_a_size_in_the_name_of_a_tree_is_a_number_within_limits(size):
    with pytest.raises(sky.InvalidInclude, match="names no tree"):
        parse_name(f"{'0' * 64}:{size}")
