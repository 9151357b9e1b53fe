"""What a program wrote in its copy of a project."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from skyinfra.blobs import copies, patterns
from skyinfra.blobs.copies import Copy
from skyinfra.blobs.trees import parse_name


@pytest.fixture
def copy(tmp_path: Path) -> Copy:
    source, folder = tmp_path / "source", tmp_path / "copy"
    (source / "lib").mkdir(parents=True)
    folder.mkdir()
    (source / "run.sh").write_text("run")
    (source / "run.sh").chmod(0o555)
    (source / "lib" / "a.py").write_text("A = 1")
    (source / "lib" / "a.py").chmod(0o444)
    made = Copy(folder)
    made.fill(source)
    made.note()
    return made


def test_a_copy_may_be_changed_and_what_it_is_made_of_stays(copy: Copy, tmp_path: Path) -> None:
    assert copy.changed() == {}
    assert os.access(copy.folder / "run.sh", os.X_OK)
    (copy.folder / "lib" / "a.py").write_text("A = 2")
    (copy.folder / "run.sh").unlink()
    (copy.folder / "lib" / "__pycache__").mkdir()
    (copy.folder / "lib" / "__pycache__" / "a.pyc").write_text("compiled")
    (copy.folder / "link").symlink_to("/etc/passwd")
    assert copy.changed() == {"lib/a.py": 5}
    assert (tmp_path / "source" / "lib" / "a.py").read_text() == "A = 1"


def test_of_what_is_wanted_too_much_and_secrets_are_left_out(copy: Copy) -> None:
    for name, size in (("a.bin", 60), ("b.bin", 60), ("c.bin", 30), ("d.bin", 5), ("e.txt", 1)):
        (copy.folder / name).write_bytes(name.encode() * size)
    found, parcels = copy.written(("*.bin",), most=500, refuse=lambda file: file.name == "d.bin")
    assert (found.kept_count, found.kept_bytes, found.left_count) == (2, 90 * 5, 3)
    assert found.problem == "d.bin holds a secret of the task; more than 500 bytes are not kept: b.bin (300 bytes)"
    assert [file.path for file in found.left] == ["b.bin", "d.bin", "e.txt"]
    assert found.tree is not None and parse_name(found.tree)[0] in {parcel.digest for parcel in parcels}
    assert copy.written(())[1] == []


def test_of_a_program_all_files_are_found_and_of_a_task_the_first(copy: Copy, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copies, "_MOST", 3)
    wrote = {f"out/{number}.bin": 1 for number in range(8)}
    (copy.folder / "out").mkdir()
    for path in wrote:
        (copy.folder / path).write_text("x")
    assert copy.changed() == wrote
    copy.note()
    assert copy.changed() == {}
    told = copies.removed(Copy(copy.folder / "out"))
    assert told is not None and told.count("(1 byte)") == 3 and "other" not in told


def test_files_are_named_in_a_line_the_largest_first() -> None:
    files = {f"{number}.bin": number for number in range(8)}
    text = copies.said(copies.named(files), 8, sum(files.values()))
    assert text == (
        "7.bin (7 bytes), 6.bin (6 bytes), 5.bin (5 bytes), 4.bin (4 bytes), 3.bin (3 bytes) "
        "and 3 other files (3 bytes)"
    )


def test_what_a_task_wrote_in_a_folder_that_is_removed_is_said(tmp_path: Path) -> None:
    assert copies.removed(Copy(tmp_path)) is None
    (tmp_path / "empty").mkdir()
    assert copies.removed(Copy(tmp_path)) is None
    (tmp_path / "empty" / "out.csv").write_text("x" * 3072)
    told = "[removed with the task: empty/out.csv (3.0 KiB); write to sky.files() or return it]"
    assert copies.removed(Copy(tmp_path)) == told


@pytest.mark.parametrize(
    ("lines", "path", "wanted"),
    [
        (("*.csv",), "a/b.csv", True),
        (("out",), "out/deep/b.bin", True),
        (("out/",), "out", False),
        (("/b.csv",), "a/b.csv", False),
        (("*", "!*.pt"), "a/model.pt", False),
        (("a/**/c.txt",), "a/b/d/c.txt", True),
    ],
)
def test_patterns_mean_files_and_all_below_folders(lines: tuple[str, ...], path: str, wanted: bool) -> None:
    assert patterns.meant(path, patterns.read(lines)) is wanted
