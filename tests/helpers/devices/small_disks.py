"""A file system of its own for a folder: small, without inodes, read-only. Needs root, as mounts do."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from support import missing


class Disk:
    """A tmpfs at *path*. `fill` and the others are undone by `mend`.

    inside: a process in whose mount namespace the disk becomes read-only; None for that of this one.
    """

    def __init__(self, path: Path, inside: int | None = None) -> None:
        self.path = path
        self.inside = inside
        self._bound = False

    def fill(self) -> None:
        """Leaves no byte free."""
        with contextlib.suppress(OSError), (self.path / "filler").open("ab", buffering=0) as file:
            while True:
                file.write(bytes(4096))

    def use_inodes(self) -> None:
        """Leaves no inode free: no other file can be made."""
        (self.path / "fillers").mkdir(exist_ok=True)
        number = 0
        with contextlib.suppress(OSError):
            while True:
                (self.path / "fillers" / str(number)).touch()
                number += 1

    def read_only(self) -> None:
        """Makes it read-only, as the kernel does after an error of the disk; open files are as they were."""
        _run("mount", "--bind", str(self.path), str(self.path), inside=self.inside)
        self._bound = True
        _run("mount", "-o", "remount,bind,ro", str(self.path), inside=self.inside)

    def mend(self) -> None:
        if self._bound:
            _run("umount", "-l", str(self.path), inside=self.inside)
            self._bound = False
        (self.path / "filler").unlink(missing_ok=True)
        for file in (self.path / "fillers").glob("*"):
            file.unlink()


@contextlib.contextmanager
def disk(path: Path, *, size: str = "64m", inodes: int = 4000) -> Iterator[Disk]:
    """A disk of its own at the folder *path*, in the body."""
    if os.geteuid() != 0:
        if os.environ.get("CI"):
            pytest.fail("mounts need root", pytrace=False)
        pytest.skip("mounts need root")
    path.mkdir(parents=True, exist_ok=True)
    try:
        _run("mount", "-t", "tmpfs", "-o", f"size={size},nr_inodes={inodes},mode=755", "skyinfra-test", str(path))
    except subprocess.CalledProcessError as error:
        if os.environ.get("CI"):
            raise
        pytest.skip(f"no tmpfs here: {error.stderr}")
    made = Disk(path)
    try:
        yield made
    finally:
        made.mend()
        _run("umount", "-l", str(path))


def use_programs(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Puts the programs in *folder*/bin before those of this machine, which need some for file systems."""
    monkeypatch.setenv("PATH", f"{folder / 'bin'}:{os.environ['PATH']}:/usr/sbin:/sbin")
    if not shutil.which("mkfs.ext4"):
        missing("mkfs.ext4 (e2fsprogs)")


def run(*command: str) -> str:
    """What *command* prints. Raises CalledProcessError."""
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def uuid(disk: Path) -> str:
    """The id of the file system on *disk*."""
    return run("blkid", "-p", "-o", "value", "-s", "UUID", str(disk))


def blank(file: Path, size: int) -> None:
    """Makes *file* the content of an empty disk of *size* bytes."""
    with file.open("wb") as stream:
        stream.truncate(size)


@contextlib.contextmanager
def loop(file: Path, size: int, mounted: Path) -> Iterator[str]:
    """A disk of *size* bytes that the kernel has, whose content is *file*; what it leaves *mounted* is unmounted."""
    blank(file, size)
    made = subprocess.run(["losetup", "--find", "--show", str(file)], capture_output=True, text=True, check=False)
    if os.geteuid() != 0 or made.returncode != 0:
        pytest.skip(f"no loop device can be had here: {made.stderr.strip()}")
    device = made.stdout.strip()
    try:
        yield device
    finally:
        subprocess.run(["umount", "--lazy", str(mounted)], check=False, capture_output=True)
        _run("losetup", "--detach", device)


def _run(*command: str, inside: int | None = None) -> None:
    enter = () if inside is None else ("nsenter", "-m", "-t", str(inside), "--")
    subprocess.run([*enter, *command], check=True, capture_output=True, text=True)
