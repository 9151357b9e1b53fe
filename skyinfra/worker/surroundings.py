"""The folder in which a program or a task runs, and its variables."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath

from skyinfra.program import views
from skyinfra.protocol.instance import NODE_DIRECTORY

# In the variables of a script: the path in the tree of the folder that its working directory is a copy of, and the
# path of the script below that, where it is not the file's name alone.
BESIDE = "SKYINFRA_BESIDE"
PLACE = "SKYINFRA_PLACE"


def new_folder() -> tempfile.TemporaryDirectory[str]:
    """Makes the folder of a program below the node's, with which it is removed at the latest."""
    return tempfile.TemporaryDirectory(prefix="script-", dir=os.environ[NODE_DIRECTORY])


@contextlib.contextmanager
def laid_out(source: bytes, name: str, env: Mapping[str, str]) -> Iterator[tuple[str, Path, dict[str, str]]]:
    """Makes a folder for the program *source*: in it stands what stands at `BESIDE` in the tree, read-only.

    Yields the folder, the file of the program, which is *name* or at `PLACE`, and *env* without these two.
    """
    env = dict(env)
    beside, place = env.pop(BESIDE, None), env.pop(PLACE, name)
    with new_folder() as folder:
        path = Path(folder, place)
        _link(beside, Path(folder), PurePosixPath(place).parts)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)
        path.write_bytes(source)
        yield folder, path, env


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
        yield folder, env


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


def _link(beside: str | None, folder: Path, own: Sequence[str] = ()) -> None:
    """Links what is at *beside* in the tree into *folder*. The folders of *own*, the path of a file that will be
    written, are made instead."""
    tree = os.environ.get(views.VARIABLE)
    if beside is None or tree is None:
        return
    for item in Path(tree, beside).iterdir():
        if item.name == views.MODULES:
            continue
        if len(own) > 1 and item.name == own[0] and item.is_dir():
            (folder / item.name).mkdir()
            _link(f"{beside}/{item.name}", folder / item.name, own[1:])
        else:
            (folder / item.name).symlink_to(item)
