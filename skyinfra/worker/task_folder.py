"""The folder in which a program or a task runs, and its variables.

A task begins in the folder of its slot, which is empty then: it is one path for all tasks of the slot.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from pathlib import Path

from skyinfra.blobs import copies
from skyinfra.blobs.copies import Copy
from skyinfra.node import faults
from skyinfra.program import views
from skyinfra.protocol.calls import BESIDE
from skyinfra.protocol.instance import NODE_DIRECTORY, instance_info
from skyinfra.worker import output

# In the node's folder; a folder for each slot in it.
FOLDER = "work"

# What the folder of the slot is a copy of, its path and its tree, the copy, and its `_entries` as it was made.
_present: tuple[str, str | None, Copy, dict[str, tuple[int, ...]]] | None = None


def new_folder() -> tempfile.TemporaryDirectory[str]:
    """Makes the folder of a program below the node's, with which it is removed at the latest. Raises `SlotFailed`."""
    with faults.raised_by_node():
        return tempfile.TemporaryDirectory(prefix="script-", dir=os.environ[NODE_DIRECTORY])


@contextlib.contextmanager
def copied(env: Mapping[str, str]) -> Iterator[tuple[str | None, dict[str, str]]]:
    """Makes a folder with a copy of what is at `BESIDE` in the tree; yields it, or None, and *env* without that."""
    env = dict(env)
    beside = env.pop(BESIDE, None)
    if beside is None:
        yield None, env
        return
    with new_folder() as folder:
        copy = _copy(beside, Path(folder))
        try:
            yield folder, env
        finally:
            _say_removed(copy)


@contextlib.contextmanager
def surrounded(env: Mapping[str, str] | None, workdir: str | None, tree: str | None) -> Iterator[None]:
    """While a task runs in this process: its variables, and the folder of its slot as working directory.

    In the folder stands a copy of what is at *workdir* in *tree*, the one in use. What the task writes there is removed
    with it.
    """
    with _folder(_path(os.environ[NODE_DIRECTORY]), workdir, tree), variables(env or {}):
        yield


@contextlib.contextmanager
def variables(env: Mapping[str, str]) -> Iterator[None]:
    """Sets the variables *env* of this process in the body."""
    before = {name: os.environ.get(name) for name in env}
    os.environ.update(env)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


@cache
def _path(node: str) -> str:
    """Returns the folder of the tasks of this slot."""
    return f"{node}/{FOLDER}/{instance_info().worker}"


@contextlib.contextmanager
def _folder(path: str, beside: str | None, tree: str | None) -> Iterator[None]:
    """Makes *path* the working directory of the body, and removes what the body leaves there. See `_prepared`."""
    global _present
    copy = None
    try:
        copy = _prepared(path, beside, tree)
        os.chdir(path)
        yield
    finally:
        if _present is None or _present[-1] != _entries(path):
            _present = None
            _clear(path, copy)
        os.chdir(path)


def _prepared(path: str, beside: str | None, tree: str | None) -> Copy:
    """Makes *path* a copy of what is at *beside* in *tree*, or empty. A copy that was not changed stays."""
    global _present
    kept, _present = _present, None
    if kept is not None and kept[:2] == (beside, tree) and kept[-1] == _entries(path):
        _present = kept
        return kept[2]
    _clear(path)
    copy = _copy(beside, Path(path))
    if beside is not None and (entries := _entries(path)):
        _present = beside, tree, copy, entries
    return copy


def _entries(folder: str) -> dict[str, tuple[int, ...]]:
    """Returns what tells whether anything in *folder* was changed, by path."""
    found: dict[str, tuple[int, ...]] = {}
    for top, folders, files in os.walk(folder):
        for each in (f"{top}/{name}" for name in (*folders, *files)):
            with contextlib.suppress(OSError):  # threads that tasks have left may remove it
                stat = os.lstat(each)
                found[each] = stat.st_mode, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino
    return found


def _clear(path: str, copy: Copy | None = None) -> None:
    """Makes *path* an empty folder. copy: the output of the task says which of its files there go."""
    try:
        names = os.listdir(path)  # noqa: PTH208 - a part of every task's round trip
    except NotADirectoryError:
        os.unlink(path)  # noqa: PTH108 - as above
        names = []
        os.mkdir(path)  # noqa: PTH102 - as above
    except FileNotFoundError:
        os.makedirs(path)  # noqa: PTH103 - as above
        return
    if names and copy is not None:
        _say_removed(copy)
    for name in names:
        each = f"{path}/{name}"
        if os.path.isdir(each) and not os.path.islink(each):  # noqa: PTH112, PTH114 - as above
            shutil.rmtree(each, onerror=_remove)
        else:
            with contextlib.suppress(OSError):
                os.unlink(each)  # noqa: PTH108 - as above


def _remove(remove: Callable[[str], object], path: str, _: object) -> None:
    """Removes what lies in a folder that may not be written."""
    with contextlib.suppress(OSError):
        os.chmod(os.path.dirname(path), 0o700)  # noqa: PTH101, PTH120 - as above
        os.chmod(path, 0o700)  # noqa: PTH101 - as above
        if remove in (os.unlink, os.rmdir):
            remove(path)
        else:
            shutil.rmtree(path, ignore_errors=True)


def _say_removed(copy: Copy) -> None:
    """Says in the output of the task what it wrote in *copy*, which is about to be removed."""
    with contextlib.suppress(OSError):
        if (line := copies.removed(copy)) is not None:
            output.say(line)


def _copy(beside: str | None, folder: Path) -> Copy:
    """Copies what is at *beside* in the tree into *folder*."""
    copy, tree = Copy(folder), os.environ.get(views.VARIABLE)
    if beside is not None and tree is not None:
        with faults.raised_by_node():
            copy.fill(Path(tree, beside), views.MODULES)
            copy.note()
    return copy
