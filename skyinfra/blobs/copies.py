"""The copy of a project in which a program runs, and the files that the program wrote or changed in it."""

from __future__ import annotations

import math
import os
import shutil
import stat
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from skyinfra.blobs import patterns
from skyinfra.blobs.store import digest_of, file_digest, in_words
from skyinfra.blobs.transfer import CHUNK, Blob, chunked
from skyinfra.blobs.trees import Entry, Tree
from skyinfra.errors import counted
from skyinfra.protocol.jobs import Written, WrittenFile

# What programs leave behind that nobody means, as lines of a .gitignore.
_LEAVINGS = ("__pycache__/", "*.pyc", ".pytest_cache/", ".ipynb_checkpoints/", ".cache/")
_NAMED = 5
# Entries of folders that are looked at for the line at the end of a task; for a program all are.
_MOST = 100_000
# A file that was not touched has all of them: size, time of the last change in nanoseconds, inode.
_State = tuple[int, int, int]


@dataclass
class Copy:
    """The copy of a project in *folder*; `note` what stands there before the program begins."""

    folder: Path
    _before: Mapping[str, _State] = field(default_factory=dict)

    def fill(self, source: Path, without: str | None = None) -> None:
        """Copies what stands in *source*, but for *without*; the files of the copy may be changed. Raises OSError."""
        for item in source.iterdir():
            if item.name == without:
                continue
            target = self.folder / item.name
            if item.is_dir():
                target.mkdir(exist_ok=True)
                Copy(target).fill(item)
            else:
                shutil.copyfile(item, target)
                found = item.stat()
                target.chmod(0o755 if found.st_mode & 0o100 else 0o644)
                # What Python compiled goes by the time.
                os.utime(target, ns=(found.st_atime_ns, found.st_mtime_ns))

    def note(self) -> None:
        """Notes the files that are there now."""
        self._before = dict(_files(self.folder, [math.inf]))

    def changed(self, most: float = math.inf) -> dict[str, int]:
        """The sizes of the files that are new or were changed since, by path, without links and leavings of Python.

        most: entries of folders that are looked at.
        """
        leavings = patterns.read(_LEAVINGS)
        files = _files(self.folder, [most])
        found = sorted((path, state[0]) for path, state in files if self._before.get(path) != state)
        return {path: size for path, size in found if not patterns.meant(path, leavings)}

    def written(
        self, wanted: Sequence[str], *, most: int | None = None, refuse: Callable[[Path], bool] = lambda _: False
    ) -> tuple[Written, list[Blob]]:
        """Returns the written files, and the blobs of those that are *wanted*, by lines as in a .gitignore.

        Of more than *most* bytes the first ones by path are taken. A file that is to be kept to itself *refuse* names.
        Raises OSError.
        """
        changed, lines = self.changed(), patterns.read(tuple(wanted))
        taken, secret, large, room = dict[str, int](), list[str](), dict[str, int](), most
        for path, size in changed.items():
            if not lines or not patterns.meant(path, lines):
                continue
            if room is not None and size > room:
                large[path] = size
            elif refuse(self.folder / path):
                secret.append(path)
            else:
                taken[path] = size
                room = None if room is None else room - size
        left = {path: size for path, size in changed.items() if path not in taken}
        tree, blobs = tree_of({path: self.folder / path for path in taken}) if taken else (None, [])
        said = Written(
            left=named(left),
            left_count=len(left),
            left_bytes=sum(left.values()),
            tree=None if tree is None else tree.name,
            kept_count=len(taken),
            kept_bytes=sum(taken.values()),
            problem=_problem(secret, large, most),
        )
        return said, blobs


def tree_of(files: Mapping[str, Path]) -> tuple[Tree, list[Blob]]:
    """The tree of *files* of this machine, by their path in it, and everything to send for it. Raises OSError."""
    entries = {
        path: Entry(file_digest(file), file.stat().st_size, os.access(file, os.X_OK)) for path, file in files.items()
    }
    tree = Tree(entries)
    listing = tree.dumps()
    blobs = [Blob(entry.sha256, entry.size, partial(_chunks, files[path])) for path, entry in entries.items()]
    return tree, [*blobs, Blob(digest_of(listing), len(listing), lambda: chunked([listing]))]


def named(files: Mapping[str, int]) -> tuple[WrittenFile, ...]:
    """Returns the largest of *files*, by path with their sizes, as many as a line has room for."""
    largest = sorted(files.items(), key=lambda item: (-item[1], item[0]))[:_NAMED]
    return tuple(WrittenFile(path, size) for path, size in largest)


def shown(path: str) -> str:
    """*path*, which a program chose, for a terminal: a question mark for what is no printable character."""
    return "".join(character if character.isprintable() else "?" for character in path)


def said(files: Sequence[WrittenFile], count: int, size: int) -> str:
    """Returns the first of *count* *files* of *size* bytes, in words: ``out.csv (3 KiB) and 2 other files (1 MiB)``."""
    parts = [f"{shown(each.path)} ({in_words(each.size)})" for each in files]
    rest = count - len(files)
    if rest > 0:
        others = size - sum(each.size for each in files)
        parts.append(f"{counted(rest, 'other file')} ({in_words(max(0, others))})")
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"


def removed(copy: Copy) -> str | None:
    """Says which files a task wrote in *copy*, which is about to be removed; None where it wrote none."""
    with os.scandir(copy.folder) as items:
        if next(items, None) is None:  # most tasks
            return None
    changed = copy.changed(_MOST)
    if not changed:
        return None
    names = said(named(changed), len(changed), sum(changed.values()))
    return f"[removed with the task: {names}; write to sky.files() or return {'it' if len(changed) == 1 else 'them'}]"


def in_all(count: int, size: int) -> str:
    """``3 files (12.0 KiB)``."""
    return f"{counted(count, 'file')} ({in_words(size)})"


def summary(written: Written) -> str:
    """Says in a line what became of the files that a job wrote."""
    parts = [f"{in_all(written.kept_count, written.kept_bytes)} kept"] if written.tree is not None else []
    if written.left_count:
        names = said(written.left, written.left_count, written.left_bytes)
        parts.append(f"{names} removed with its copy of the folder")
    return "; ".join([*parts, *([written.problem] if written.problem else [])])


def _problem(secret: Sequence[str], large: Mapping[str, int], most: int | None) -> str | None:
    found = [f"{shown(path)} holds a secret of the task" for path in secret[:_NAMED]]
    if large:
        names = said(named(large), len(large), sum(large.values()))
        found.append(f"more than {in_words(most or 0)} are not kept: {names}")
    return "; ".join(found) or None


def _files(folder: Path, left: list[float], below: str = "") -> Iterator[tuple[str, _State]]:
    """The files below *folder*, without links, with what tells whether one was changed.

    left: how many entries of folders are looked at, which is counted down.
    """
    with os.scandir(folder) as items:
        for item in items:
            left[0] -= 1
            if left[0] < 0:
                return
            found, path = item.stat(follow_symlinks=False), f"{below}{item.name}"
            if stat.S_ISDIR(found.st_mode):
                yield from _files(Path(item.path), left, f"{path}/")
            elif stat.S_ISREG(found.st_mode):
                yield path, (found.st_size, found.st_mtime_ns, found.st_ino)


def _chunks(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        while data := file.read(CHUNK):
            yield data
