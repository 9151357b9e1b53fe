"""Views of synced trees in a worker process.

A view is a folder of this process with the files of a tree, as links to the node's blobs. Trees with the same code, and
those of which one has more of it, share a view; its data files are replaced before the next task, and modules stay
loaded. A tree with other code gets another view; the modules of the previous view are kept, for a task that uses it
again. So tasks of several clients can alternate on a slot.

The files of a view are read-only: they are the only copy of the node. A view is removed after its process has ended.
"""

from __future__ import annotations

import contextlib
import fcntl
import importlib
import importlib.abc
import importlib.machinery
import json
import os
import re
import shutil
import sys
import types
import uuid
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from skyinfra.blobs.store import BlobStore
from skyinfra.blobs.transfer import BlobsMissing
from skyinfra.blobs.trees import Entry, Tree
from skyinfra.errors import NotInTask, NotSynced
from skyinfra.protocol.instance import DEVICES, NODE_DIRECTORY

FOLDER = "trees"
FILES_FOLDER = "files"
# The folder of own modules in a tree; no folder that a user syncs has that name.
MODULES = ".skyinfra"
# The folder of a task's tree, for the task and the programs that it starts.
VARIABLE = "SKYINFRA_TREE"
# The script of that tree, for the same: its file, its package, and its arguments, as JSON.
PROGRAM = "SKYINFRA_PROGRAM"
# Views that a process keeps, with their modules.
_KEPT = 4

# The path of a file in a view, and its path in the tree.
_IN_VIEW = re.compile(rf"/{FOLDER}/[0-9]+-[0-9a-f]{{8}}/[0-9a-f]{{32}}/(.+)$")

# Modules that are loaded by now belong to the engine. No tree replaces them.
_ENGINE = frozenset(name.partition(".")[0] for name in sys.modules) | frozenset(sys.stdlib_module_names)


@dataclass
class _View:
    """A folder with files of trees. code: those that Python may import, of all of these trees. roots, main: of the
    trees. modules: those loaded from it, while it is not in use. hidden: other modules with the same names, while it
    is. variables: those of the environment that its modules have set as they were imported, with the values before and
    since."""

    folder: Path
    roots: tuple[str, ...] = ()
    main: tuple[str, ...] | None = None
    code: dict[str, Entry] = field(default_factory=dict)
    files: dict[str, Entry] = field(default_factory=dict)
    paths: list[str] = field(default_factory=list)
    modules: dict[str, types.ModuleType] = field(default_factory=dict)
    hidden: dict[str, types.ModuleType] = field(default_factory=dict)
    variables: dict[str, tuple[str | None, str | None]] = field(default_factory=dict)
    arguments: list[str] = field(default_factory=list)


class Views:
    """The views of this process in the node's *directory*, made of the blobs in *store*.

    tree: the name of the tree that tasks see now, or None.
    """

    def __init__(self, directory: Path, store: BlobStore) -> None:
        self._folder = directory / FOLDER
        self._store = store
        self._own: Path | None = None
        # The last one was used last.
        self._views: list[_View] = []
        self._now: _View | None = None
        self.tree: str | None = None

    def use(self, tree: Tree | None) -> None:
        """Makes *tree*, whose blobs are in the store, visible to tasks. Raises `BlobsMissing`, OSError."""
        # After a failure the next call repeats everything.
        self.tree = ""
        view = None
        if tree is not None:
            view = next((each for each in reversed(self._views) if _suits(each, tree)), None) or self._new(tree)
            self._views = [*(each for each in self._views if each is not view), view]
            if view.main != tree.main or not tree.code.keys() <= view.code.keys():
                # It is entered anew: modules of the names that it has now are hidden.
                self._leave()
                view.main = view.main or tree.main
                view.code |= tree.code
            _update(view, tree, self._store)
        if view is not self._now:
            self._leave()
            if view is not None:
                _enter(view)
            self._now = view
            for each in self._views[:-_KEPT]:
                shutil.rmtree(each.folder, ignore_errors=True)
            del self._views[:-_KEPT]
        self.tree = tree.name if tree is not None else None

    def has_others(self) -> bool:
        """Returns whether modules of other code than that in use were loaded in this process."""
        return len(self._views) > (self._now is not None)

    def note_set(self, before: Mapping[str, str], given: Collection[str]) -> None:
        """Notes the variables of the environment that an import has changed from *before*: they leave with its view.

        given: those of the task, which end with it, and may be secrets.
        The device of a slot stays the slot's: ``os.environ["CUDA_VISIBLE_DEVICES"] = "0"`` is the first line of many
        scripts.
        """
        for name in before.keys() | os.environ.keys():
            was, now = before.get(name), os.environ.get(name)
            if now == was:
                continue
            if name in DEVICES and was is not None:
                os.environ[name] = was
            elif self._now is not None and name not in given:
                self._now.variables[name] = self._now.variables.get(name, (was,))[0], now

    def _leave(self) -> None:
        if self._now is not None:
            _leave(self._now)
        self._now = None

    def _new(self, tree: Tree) -> _View:
        if self._own is None:
            self._own = _own_folder(self._folder)
        view = _View(self._own / uuid.uuid4().hex, tree.roots, tree.main)
        view.folder.mkdir()
        view.paths = [str(view.folder if root == "." else view.folder / root) for root in tree.roots]
        return view


def _suits(view: _View, tree: Tree) -> bool:
    """Returns whether *view* may have the files of *tree*: it has the same code, or one of both has more of it."""
    if view.roots != tree.roots or (view.main != tree.main and None not in (view.main, tree.main)):
        return False
    same = view.code.items() & tree.code.items()
    return len(same) == min(len(view.code), len(tree.code))


def _enter(view: _View) -> None:
    """Makes the modules of *view* importable."""
    taken = Tree(view.code, view.roots).modules - _ENGINE
    view.hidden = {name: module for name, module in list(sys.modules.items()) if name.partition(".")[0] in taken}
    for name in view.hidden:
        del sys.modules[name]
    if view.main is not None:
        view.hidden["__main__"] = sys.modules["__main__"]
        path, *rest = view.main
        os.environ[PROGRAM] = json.dumps([str(view.folder / path), *rest])
        view.arguments, sys.argv = sys.argv, [str(view.folder / path), *rest[1:]]
    for name, (_, since) in view.variables.items():
        _set_variable(name, since)
    sys.modules.update(view.modules)
    view.modules = {}
    _change_path(first=view.paths)
    _finder.enter(taken, view.paths)
    os.environ[VARIABLE] = str(view.folder)
    importlib.invalidate_caches()


def _leave(view: _View) -> None:
    """Removes the modules of *view* from the loaded ones, and keeps them."""
    view.modules = {name: module for name, module in list(sys.modules.items()) if _is_from(module, view.folder)}
    for name in view.modules:
        del sys.modules[name]
    sys.modules.update(view.hidden)
    view.hidden = {}
    if view.main is not None:
        sys.argv = view.arguments
    for name, (before, since) in view.variables.items():
        if os.environ.get(name) == since:
            _set_variable(name, before)
    _change_path(without=view.paths)
    _finder.enter(frozenset(), [])
    for variable in (VARIABLE, PROGRAM):
        os.environ.pop(variable, None)


def _set_variable(name: str, value: str | None) -> None:
    if value is None:
        os.environ.pop(name, None)
    else:
        os.environ[name] = value


class _Finder(importlib.abc.MetaPathFinder):
    """Finds the modules of the view that is in use, before all others: what a task does to `sys.path` hides none."""

    def __init__(self) -> None:
        self._names: frozenset[str] = frozenset()
        self._paths: Sequence[str] = ()

    def enter(self, names: frozenset[str], paths: Sequence[str]) -> None:
        """Finds *names*, without their dotted parts, in *paths* from now on."""
        self._names, self._paths = names, paths
        if self not in sys.meta_path:
            sys.meta_path.insert(0, self)

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """As `importlib.abc.MetaPathFinder.find_spec`."""
        if path is not None or name not in self._names:
            return None
        return importlib.machinery.PathFinder.find_spec(name, [*self._paths, *sys.path], target)


_finder = _Finder()


def _is_from(module: object, folder: Path) -> bool:
    inside = f"{folder}/"
    file = getattr(module, "__file__", None)
    if isinstance(file, str):
        return file.startswith(inside)
    # A package without __init__.py has folders only.
    with contextlib.suppress(TypeError, KeyError):
        return any(str(path).startswith(inside) or path == str(folder) for path in getattr(module, "__path__", ()))
    return False


def _change_path(*, first: Sequence[str] = (), without: Sequence[str] = ()) -> None:
    """Changes the import path of this process, and of the programs that a task starts."""
    sys.path[:] = [*first, *(path for path in sys.path if path not in without)]
    inherited = os.environ.pop("PYTHONPATH", "").split(os.pathsep)
    if paths := [*first, *(path for path in inherited if path and path not in without)]:
        os.environ["PYTHONPATH"] = os.pathsep.join(paths)


# Files --------------------------------------------------------------------------------------------------------------


def _update(view: _View, tree: Tree, store: BlobStore) -> None:
    """Makes the files of *view* those of *tree*; equal files are not touched."""
    for path in [path for path in view.files if path not in tree.files and path not in view.code]:
        (view.folder / path).unlink(missing_ok=True)
        del view.files[path]
        _remove_empty(view.folder, path)
    for path, entry in tree.files.items():
        if view.files.get(path) != entry:
            target = view.folder / path
            target.parent.mkdir(parents=True, exist_ok=True)
            try:
                place(store.path(entry.sha256), target, executable=entry.executable)
            except FileNotFoundError:
                raise BlobsMissing([entry.sha256]) from None
            view.files[path] = entry


def place(blob: Path, target: Path, *, executable: bool, link: bool = True) -> None:
    """Replaces *target* with the content of *blob* atomically; read-only where it is a *link*. Raises OSError."""
    new = target.with_name(f".{uuid.uuid4().hex}")
    try:
        # All links of a file have the same mode.
        linked = link and not executable
        if linked:
            try:
                new.hardlink_to(blob)
            except FileNotFoundError:
                raise
            except OSError:  # another file system, one without links, or too many of them
                linked = False
        if not linked:
            shutil.copyfile(blob, new)
            new.chmod((0o555 if executable else 0o444) if link else (0o755 if executable else 0o644))
        new.replace(target)
    finally:
        new.unlink(missing_ok=True)


def _remove_empty(folder: Path, path: str) -> None:
    for parent in PurePosixPath(path).parents:
        try:
            (folder / parent).rmdir()
        except OSError:
            return


def _own_folder(folder: Path) -> Path:
    """Makes a folder for this process in *folder*, and removes those of ended processes."""
    folder.mkdir(exist_ok=True)
    alone = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        # In one process at a time.
        fcntl.flock(alone, fcntl.LOCK_EX)
        for lock in folder.glob("*.lock"):
            handle = os.open(lock, os.O_RDWR | os.O_CLOEXEC)
            with contextlib.closing(os.fdopen(handle)), contextlib.suppress(BlockingIOError):
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(lock.with_suffix(""), ignore_errors=True)
                lock.unlink()
        own = folder / f"{os.getpid()}-{uuid.uuid4().hex[:8]}"
        # Held until this process ends.
        fcntl.flock(os.open(own.with_suffix(".lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644), fcntl.LOCK_EX)
        own.mkdir()
        return own
    finally:
        os.close(alone)


# What tasks ask for -------------------------------------------------------------------------------------------------

# On the client: the places of included files, by their names in the tree.
_here: dict[str, Path] = {}


def remember(names: dict[str, Path]) -> None:
    """On the client: adds places of included files, by their names in the tree, for `synced`."""
    _here.update(names)


def here(path: str) -> Path | None:
    """On the client: returns the place of the file that is *path* in a view, as in tracebacks, or None."""
    found = _IN_VIEW.search(path)
    return _here.get(found.group(1)) if found else None


def below_modules(path: str) -> str | None:
    """Returns the path below the folder of own modules of what is *path* in a view, or None for another one."""
    found = _IN_VIEW.search(path)
    return found.group(1).removeprefix(f"{MODULES}/") if found and found.group(1).startswith(f"{MODULES}/") else None


def synced(name: str | Path) -> Path:
    """The path of an include, or of a file below one, by the name that it was included with; the same call works in a
    task, in a program that a task starts, and on the client.

    A file outside of the client's working directory is found by its last part: ``vocab.txt`` for ``/data/vocab.txt``.
    In a task the file is read-only. Raises `NotSynced`.
    """
    plain = os.path.normpath(name)
    folder = os.environ.get(VARIABLE)
    if folder is not None:
        found = Path(folder, plain)
        if not Path(plain).is_absolute() and ".." not in found.parts and found.exists():
            return found
    if folder is not None and any(each.name != MODULES for each in Path(folder).iterdir()):
        hint = "It is not among the includes of the client, or not below its working directory."
    elif NODE_DIRECTORY in os.environ:
        hint = "The client has synced nothing: sky.connect(..., includes=[...])."
    else:
        for part in (Path(plain), *Path(plain).parents):
            if str(part) in _here and (here := _here[str(part)] / Path(plain).relative_to(part)).exists():
                return here
        hint = "Name it in sky.connect(..., includes=[...]) or pool.sync(...) first."
    raise NotSynced("was not synced", field=str(name), hint=hint)


def files() -> Path:
    """Returns the folder of this node for files that `pool.put` sends and `pool.get` fetches. Raises `NotInTask`."""
    directory = os.environ.get(NODE_DIRECTORY)
    if directory is None:
        raise NotInTask(
            "files() is the folder of a node, and this is not a task",
            hint="Call it inside a function that you ship with `task >> pool`.",
        )
    folder = Path(directory, FILES_FOLDER)
    folder.mkdir(exist_ok=True)
    return folder
