"""The folder in which a program or a task runs, and its variables."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

from skyinfra.blobs import copies
from skyinfra.program import views
from skyinfra.protocol.instance import NODE_DIRECTORY
from skyinfra.worker import output

# In the variables of a script: the path in the tree of the folder that its working directory is a copy of, and the
# path of the script below that, where it is not the file's name alone.
BESIDE = "SKYINFRA_BESIDE"
PLACE = "SKYINFRA_PLACE"
# Which of the files that the script writes its client wants: a JSON list of lines as in a .gitignore, perhaps empty.
FETCH = "SKYINFRA_FETCH"


def new_folder() -> tempfile.TemporaryDirectory[str]:
    """Makes the folder of a program below the node's, with which it is removed at the latest."""
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
    """While a task runs in this process: its variables, and a working directory with what is at *workdir* in the tree.

    What the task writes there is removed with it.
    """
    if not env and workdir is None:
        yield
        return
    before = {name: os.environ.get(name) for name in env or ()}
    with contextlib.ExitStack() as stack:
        if workdir is not None:
            folder = stack.enter_context(new_folder())
            _link(workdir, Path(folder))
            stack.callback(_say_removed, folder)
            stack.enter_context(contextlib.chdir(folder))
        try:
            os.environ.update(env or {})
            yield
        finally:
            for name, value in before.items():
                if value is None:
                    os.environ.pop(name, None)
                else:
                    os.environ[name] = value


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
