"""The user's own modules: which ones there are, their files, and which of them a task needs.

A module is the user's own where Python imports it from neither the standard library nor an installed package. Nodes get
the file of such a module, and those of the own modules that it imports; see `skyinfra.worker.program`.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import importlib.machinery
import importlib.util
import os
import site
import sys
import sysconfig
import types
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from importlib import metadata
from pathlib import Path
from typing import Any

from skyinfra import syntax
from skyinfra.protocol import secrets

# A package goes as a whole, since it may import its modules by computed names, and so do the data files in its folder,
# unless it has more files or bytes of these.
_MOST_FILES = 500
_MOST_BYTES = 5 * 2**20


# By these a module asks for the version of its own distribution, or for plugins.
_METADATA = ("importlib.metadata", "importlib_metadata", "pkg_resources")


@dataclass(frozen=True)
class Source:
    """The file of a module, with its content when it was seen first: what this process has imported."""

    name: str
    file: Path
    data: bytes

    @property
    def is_package(self) -> bool:
        """Whether it is the ``__init__.py`` of a package."""
        return self.file.name == "__init__.py"

    @property
    def path(self) -> str:
        """The path below the folder that nodes import from."""
        return self.name.replace(".", "/") + ("/__init__.py" if self.is_package else ".py")

    @cached_property
    def imports(self) -> tuple[str, ...]:
        """The names that it imports, in functions too; some of them are no modules."""
        try:
            tree = syntax.parsed(self.data)
        except (SyntaxError, ValueError):
            return ()
        found: dict[str, None] = {}
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                found.update(dict.fromkeys(each.name for each in node.names))
            elif isinstance(node, ast.ImportFrom):
                start = self._start(node)
                names = [f"{start}.{each.name}".strip(".") for each in node.names if each.name != "*"]
                found.update(dict.fromkeys([start, *names] if start else names))
        return tuple(found)

    def _start(self, node: ast.ImportFrom) -> str:
        if not node.level:
            return node.module or ""
        parents = self.name.split(".")
        above = parents[: len(parents) - node.level + int(self.is_package)]
        return ".".join([*above, *([node.module] if node.module else [])])


@dataclass(frozen=True)
class Data:
    """A file in the folder of a package that is no module of it. path: below the folder that nodes import from."""

    path: str
    file: Path
    data: bytes


@dataclass(frozen=True)
class _Loaded:
    """A module of `sys.modules`, which is an own one where it has a *source*. spec: another one after a reload."""

    module: types.ModuleType
    spec: object
    source: Source | None


_loaded: dict[str, _Loaded] = {}
# Files of modules that are not imported here, by their names; again when they have changed.
_files: dict[tuple[str, str, int, int], Source] = {}
# The data files of each package's folder that went last: a program may write its results beside them.
_sent: dict[Path, list[Data]] = {}


def is_own(name: object) -> bool:
    """Returns whether *name* names an imported module of the user's own."""
    return isinstance(name, str) and name in sys.modules and _known(name).source is not None


def source(name: str) -> Source | None:
    """Returns the source of the own module *name*, imported or not; None where there is none."""
    if name in sys.modules:
        return _known(name).source
    top = name.partition(".")[0]
    if top in sys.stdlib_module_names or top == "skyinfra" or (top in sys.modules and not _may_hold_own(top)):
        return None
    for place in _places(name):
        for file in (place / "__init__.py", place.with_name(f"{place.name}.py")):
            if is_own_file(file) and (found := _read(name, file)) is not None:
                return found
    return None


def _places(name: str) -> Iterator[Path]:
    """Yields the paths at which the module *name*, which is not imported, may be, without a suffix.

    Packages of an editable install may lie in folders that are not on the path, and a finder knows them.
    """
    top, *below = name.split(".")
    loaded = sys.modules.get(top)
    for folder in getattr(loaded, "__path__", ()):
        yield Path(folder, *below)
    for folder in import_folders():
        yield Path(folder, top, *below)
    if loaded is None and (spec := _spec(top)) is not None:
        for folder in spec.submodule_search_locations or ():
            yield Path(folder, *below)
        if not below and spec.origin is not None:
            yield Path(spec.origin).with_suffix("")


@functools.lru_cache(maxsize=1024)
def _spec(top: str) -> importlib.machinery.ModuleSpec | None:
    with contextlib.suppress(ImportError, ValueError, AttributeError):
        return importlib.util.find_spec(top)
    return None


def closure(names: Iterable[str]) -> list[Source]:
    """Returns the sources of the own modules *names*, of their packages, and of all that they import."""
    found: list[Source] = []
    waiting = list(names)
    seen: set[str] = set()
    while waiting:
        name = waiting.pop()
        if name in seen:
            continue
        seen.add(name)
        if "." in name:
            waiting.append(name.rpartition(".")[0])
        if (made := source(name)) is not None:
            found.append(made)
            waiting += made.imports
            if made.is_package:
                waiting += _within(name, made.file.parent)
    return sorted(found, key=lambda each: each.path)


def data_of(sources: Collection[Source]) -> list[Data]:
    """Returns the data files of the packages among *sources*, none of a package that has too many; and what
    `importlib.metadata` says of them, where one of *sources* asks it."""
    packages = {each.name: each.file.parent for each in sources if each.is_package}
    found: list[Data] = []
    for name, folder in sorted(packages.items()):
        if name.rpartition(".")[0] not in packages:
            found += _data(name.replace(".", "/"), folder)
    return found + _metadata_of(sources)


def _metadata_of(sources: Collection[Source]) -> list[Data]:
    """Returns files of the distributions that *sources* are of: an editable install has them elsewhere."""
    if not any(name.startswith(_METADATA) for each in sources for name in each.imports):
        return []
    known, found = _distributions(tuple(sys.path)), {}
    for top in {each.name.partition(".")[0] for each in sources}:
        for name in known.get(top, [top]):
            with contextlib.suppress(metadata.PackageNotFoundError, OSError, ValueError):
                made = metadata.distribution(name)
                for file in ("METADATA", "entry_points.txt"):
                    path = f"{name.replace('-', '_')}-{made.version}.dist-info/{file}"
                    if text := made.read_text(file):
                        found[path] = Data(path, Path(str(made.locate_file(path))), text.encode())
    return [found[path] for path in sorted(found)]


@functools.lru_cache(maxsize=4)
def _distributions(_path: tuple[str, ...]) -> Mapping[str, list[str]]:
    """Returns the distributions of each package that is found on *path*; all of them are read for that."""
    with contextlib.suppress(Exception):  # of a broken installation
        return metadata.packages_distributions()
    return {}


def _data(path: str, folder: Path) -> list[Data]:
    found: list[Data] = []
    size = 0
    for file in _files_of(folder):
        try:
            if file.suffix in (".py", ".pyc") or _stays(file):
                continue
            size += file.stat().st_size
            if len(found) == _MOST_FILES or size > _MOST_BYTES:
                return _sent.get(folder, [])
            found.append(Data(f"{path}/{file.relative_to(folder).as_posix()}", file, file.read_bytes()))
        except FileNotFoundError:  # it comes and goes
            continue
        except OSError:  # it is not for us
            return _sent.get(folder, [])
    _sent[folder] = found
    return found


def _stays(file: Path) -> bool:
    """Returns whether *file* holds secrets: it is Terraform's state, or a secret is read from it."""
    return ".tfstate" in file.name or secrets.is_read_from(file.resolve())


def are_current(sources: Iterable[Source]) -> bool:
    """Returns whether *sources* are those of the modules that are loaded: none of them was loaded again since."""
    loaded = ((each, _loaded[each.name]) for each in sources if each.name in _loaded)
    return all(known.source is each and _is_current(each.name) for each, known in loaded)


def _is_current(name: str) -> bool:
    known, module = _loaded.get(name), sys.modules.get(name)
    return known is not None and known.module is module and known.spec is getattr(module, "__spec__", None)


def _known(name: str) -> _Loaded:
    if not _is_current(name):
        module: Any = sys.modules[name]
        _loaded[name] = _Loaded(module, getattr(module, "__spec__", None), _source_of(name, module))
    return _loaded[name]


def _source_of(name: str, module: object) -> Source | None:
    file = getattr(module, "__file__", None)
    if name in ("__main__", "__mp_main__") or name.partition(".")[0] == "skyinfra" or not isinstance(file, str):
        return None
    if not file.endswith(".py") or any(part in ("", ".", "..") or "/" in part for part in name.split(".")):
        return None
    path = Path(file)
    if not _is_own_place(path):
        return None
    try:
        return Source(name, path, path.read_bytes())
    except OSError:
        # One of an archive, or one whose file is gone.
        get = getattr(getattr(module, "__loader__", None), "get_source", None)
        try:
            text = get(name) if get is not None else None
        except (ImportError, OSError):
            return None
        return Source(name, path, text.encode()) if isinstance(text, str) else None


def _read(name: str, file: Path) -> Source | None:
    try:
        stat = file.stat()
        key = (name, str(file), stat.st_size, stat.st_mtime_ns)
        if key not in _files:
            _files[key] = Source(name, file, file.read_bytes())
    except OSError:
        return None
    return _files[key]


def _may_hold_own(top: str) -> bool:
    """Returns whether the imported package *top* has own modules: it is one, or it lies in several folders."""
    module = sys.modules[top]
    return _known(top).source is not None or (hasattr(module, "__path__") and getattr(module, "__file__", None) is None)


def _within(package: str, folder: Path) -> list[str]:
    """Returns the names of the modules in *folder*, that of *package*; none where there are too many."""
    found: list[str] = []
    size = 0
    for file in _files_of(folder):
        if file.suffix != ".py":
            continue
        parts = list(file.relative_to(folder).with_suffix("").parts)
        if parts[-1] == "__init__":
            parts.pop()
        if all(part.isidentifier() for part in parts):
            found.append(".".join([package, *parts]))
            with contextlib.suppress(OSError):  # it comes and goes
                size += file.stat().st_size
        if len(found) > _MOST_FILES or size > _MOST_BYTES:
            return []
    return found


def _files_of(folder: Path) -> Iterator[Path]:
    try:
        items = sorted(folder.iterdir())
    except OSError:  # one that comes and goes, or that is not for us
        return
    for item in items:
        if item.name.startswith((".", "__pycache__", "node_modules")):
            continue
        if item.is_symlink() and item.suffix != ".py":  # which may lead anywhere
            continue
        if item.is_dir():
            if not (item / "pyvenv.cfg").exists():
                yield from _files_of(item)
        elif item.is_file():
            yield item


def is_own_file(file: Path) -> bool:
    """Returns whether *file* is there, and belongs to neither Python nor an installed package."""
    return file.is_file() and _is_own_place(file)


@functools.lru_cache(maxsize=1024)
def in_own_place(file: str) -> bool:
    """Returns whether *file* is where programs are, and not where packages are installed."""
    return _is_own_place(Path(file))


def _is_own_place(path: Path) -> bool:
    if {"site-packages", "dist-packages"} & set(path.parts):
        return False
    if any(path.is_relative_to(folder) for folder in library_folders()):
        return False
    # `pip install --target`, for a folder of PYTHONPATH or for that of the program itself.
    return not any(
        path.relative_to(folder).as_posix() in _recorded(folder, folder.stat().st_mtime_ns)
        for folder in import_folders()
        if folder.is_dir() and path.is_relative_to(folder)
    )


@functools.lru_cache(maxsize=64)
def _recorded(folder: Path, _changed: int) -> frozenset[str]:
    """Returns the files below *folder* that are of packages installed there, as their records name them."""
    found: set[str] = set()
    for record in folder.glob("*.dist-info/RECORD"):
        with contextlib.suppress(OSError, UnicodeDecodeError):
            # A line is a path, its hash and its size.
            found.update(line.partition(",")[0] for line in record.read_text("utf-8").splitlines())
    return frozenset(found)


@functools.cache
def library_folders() -> tuple[Path, ...]:
    """Returns the folders of the standard library and of installed packages."""
    paths = sysconfig.get_paths()
    folders = {paths[kind] for kind in ("stdlib", "platstdlib", "purelib", "platlib")}
    return tuple(Path(folder) for folder in folders | {*site.getsitepackages(), site.getusersitepackages()})


def import_folders() -> list[Path]:
    """Returns the folders from which Python imports here, without installed packages."""
    return list(_folders(tuple(sys.path), os.getcwd()))  # noqa: PTH109 - a part of the key


@functools.lru_cache(maxsize=8)
def _folders(paths: tuple[str, ...], _here: str) -> tuple[Path, ...]:
    folders = [Path(os.path.abspath(path)) for path in paths if not path.endswith(".zip")]  # noqa: PTH100
    return tuple(folder for folder in dict.fromkeys(folders) if not any(map(folder.is_relative_to, library_folders())))
