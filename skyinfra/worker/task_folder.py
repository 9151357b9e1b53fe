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
from skyinfra.node import faults
from skyinfra.program import views
from skyinfra.protocol.calls import BESIDE
from skyinfra.protocol.instance import NODE_DIRECTORY, instance_info
from skyinfra.worker import output

# In the node's folder; a folder for each slot in it.
FOLDER = "work"


def new_folder() -> tempfile.TemporaryDirectory[str]:
    """Makes the folder of a program below the node's, with which it is removed at the latest. Raises `SlotFailed`."""
    with faults.raised_by_node():
        return tempfile.TemporaryDirectory(prefix="script-", dir=os.environ[NODE_DIRECTORY])


@contextlib.contextmanager
def linked(env: Mapping[str, str]) -> Iterator[tuple[str | None, dict[str, str]]]:
    """Makes a folder with what stands at `BESIDE` in the tree; yields it, or None, and *env* without that variable."""
    env = dict(env)
    beside = env.pop(BESIDE, None)
    if beside is None:
        yield None, env
        return
    with new_folder() as folder:
        _link(beside, Path(folder))
        try:
            yield folder, env
        finally:
            _say_removed(folder)


@contextlib.contextmanager
def surrounded(env: Mapping[str, str] | None, workdir: str | None) -> Iterator[None]:
    """While a task runs in this process: its variables, and the folder of its slot as working directory.

    In the folder stands what is at *workdir* in the tree. What the task writes there is removed with it.
    """
    path = _path(os.environ[NODE_DIRECTORY])
    with _folder(path):
        if workdir is not None:
            _link(workdir, Path(path))
        with variables(env or {}):
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
def _folder(path: str) -> Iterator[None]:
    """Makes *path* the working directory of the body, empty, and empties it afterwards."""
    _clear(path)
    os.chdir(path)
    try:
        yield
    finally:
        _clear(path, said=True)
        os.chdir(path)


def _clear(path: str, *, said: bool = False) -> None:
    """Makes *path* an empty folder. said: says in the output of the task which of its files go."""
    try:
        names = os.listdir(path)  # noqa: PTH208 - a part of every task's round trip
    except NotADirectoryError:
        os.unlink(path)  # noqa: PTH108 - as above
        names = []
        os.mkdir(path)  # noqa: PTH102 - as above
    except FileNotFoundError:
        os.makedirs(path)  # noqa: PTH103 - as above
        return
    if names and said:
        _say_removed(path)
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


def _say_removed(folder: str) -> None:
    """Says in the output of the task what it wrote in *folder*, which is about to be removed."""
    with contextlib.suppress(OSError):
        if (line := copies.removed(Path(folder))) is not None:
            output.say(line)


def _link(beside: str | None, folder: Path) -> None:
    """Links what is at *beside* in the tree into *folder*."""
    tree = os.environ.get(views.VARIABLE)
    if beside is None or tree is None:
        return
    for item in Path(tree, beside).iterdir():
        if item.name != views.MODULES:
            (folder / item.name).symlink_to(item)
