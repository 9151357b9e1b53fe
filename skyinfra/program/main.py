"""The program of a client in a process of a node: its script as the module ``__main__``, and modules that nodes lack.

A module of the client may import a package that only the client has, for what no task uses. Where that ends its import
here, it is imported again, and a placeholder stands for the package, which raises where it is used in a task.
"""

from __future__ import annotations

import functools
import importlib
import importlib.abc
import importlib.machinery
import json
import os
import sys
import types
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import skyinfra
from skyinfra.program import values, views
from skyinfra.program.values import Values
from skyinfra.protocol.pickles import MARK

T = TypeVar("T")


def with_values(brought: dict[str, object], function: Callable[..., T], /, *args: object, **kwargs: object) -> T:
    """Calls *function* after the global variables *brought* of the script were set, for this task alone."""
    Values(brought).set()
    return function(*args, **kwargs)


def cached(function: Callable[..., object], parameters: dict[str, Any]) -> object:
    """Returns *function* with a cache of its own, as `functools.lru_cache` gives it."""
    return functools.lru_cache(**parameters)(function)


def globals_of(module: str) -> dict[str, Any]:
    """Returns the global variables of *module*: a function that was made in one of its functions has them here too."""
    return vars(importlib.import_module(module))


def loading(load: Callable[[], T]) -> T:
    """Returns what *load* gives, which may import modules of the client. Raises what they raise."""
    try:
        _make_main()
        return load()
    except ModuleNotFoundError as error:
        placeholders = _Placeholders()
        if not placeholders.take(error):
            raise
    with placeholders.in_use():
        while True:
            try:
                _make_main()
                return load()
            except ModuleNotFoundError as error:
                if not placeholders.take(error):
                    raise


def _make_main() -> None:
    """Makes the script of the tree the module ``__main__``, unless it is; the task before has brought it no values."""
    wanted = os.environ.get(views.PROGRAM)
    before = sys.modules["__main__"]
    if wanted is None:
        return
    if vars(before).get(MARK) == wanted:
        values.put_back(vars(before))
        return
    try:
        loading_main(wanted)
    except BaseException:
        sys.modules["__main__"] = before
        raise


def loading_main(wanted: str) -> None:
    """Runs the script *wanted*, but for its blocks for ``__main__``. Raises what it raises."""
    path, package, *arguments = json.loads(wanted)
    module = types.ModuleType("__main__")
    module.__file__ = path
    if package:  # as of ``python -m``: processes that it spawns import it by its name
        module.__spec__ = importlib.machinery.ModuleSpec(f"{package}.{Path(path).stem}", None, origin=path)
    module.__package__ = package or None
    vars(module)[MARK] = wanted
    sys.modules["__main__"] = module
    sys.argv = [path, *arguments]
    with open(path, "rb") as file:  # noqa: PTH123 - as `python` does
        code = compile(file.read(), path, "exec", dont_inherit=True)
    exec(code, vars(module), _TopLevel(vars(module)))  # noqa: S102 - the script of the client


class _TopLevel(MutableMapping[str, Any]):
    """The names of a script while it runs: those of its module, whose functions see another ``__name__``."""

    def __init__(self, names: dict[str, Any]) -> None:
        self._names = names
        self._own_name = Path(names["__file__"]).stem

    def __getitem__(self, name: str) -> Any:
        return self._own_name if name == "__name__" else self._names[name]

    def __setitem__(self, name: str, value: Any) -> None:
        self._names[name] = value

    def __delitem__(self, name: str) -> None:
        del self._names[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


# Modules that only the client has ----------------------------------------------------------------------------------


class _Placeholders(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds placeholders for what the client's files import, and this node lacks.

    Only a file whose import has failed gets one: where a file tries and has another way, it goes that way.
    """

    def __init__(self) -> None:
        self.in_place = True
        self._absent: set[tuple[str, str]] = set()

    def take(self, error: ModuleNotFoundError) -> bool:
        """Notes what *error* is about. Returns False where a placeholder is no help."""
        frames, importer = error.__traceback__, None
        while frames is not None:
            if not _is_of_import(frames.tb_frame):
                importer = frames.tb_frame.f_code
            frames = frames.tb_next
        folder = os.environ.get(views.VARIABLE)
        if folder is None or importer is None or importer.co_name != "<module>" or error.name is None:
            return False
        found = importer.co_filename, error.name
        if not importer.co_filename.startswith(f"{folder}/") or found in self._absent:
            return False
        self._absent.add(found)
        return True

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """While it lasts, imports find placeholders, of which no other import finds one later."""
        before = set(sys.modules)
        sys.meta_path.append(self)
        try:
            yield
        finally:
            sys.meta_path.remove(self)
            self.in_place = False
            for name in set(sys.modules) - before:
                if isinstance(sys.modules.get(name), _Module):
                    del sys.modules[name]

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """As `importlib.abc.MetaPathFinder.find_spec`."""
        frame: types.FrameType | None = sys._getframe(1)
        while frame is not None and _is_of_import(frame):
            frame = frame.f_back
        file = frame.f_code.co_filename if frame is not None else ""
        if any(file == importer and f"{name}.".startswith(f"{absent}.") for importer, absent in self._absent):
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        """As `importlib.abc.Loader.create_module`."""
        return _Module(spec.name, self)

    def exec_module(self, module: types.ModuleType) -> None:
        """As `importlib.abc.Loader.exec_module`."""


def _is_of_import(frame: types.FrameType) -> bool:
    """Returns whether *frame* is one of Python's import, or of the names of this package, of which nodes lack some."""
    file = frame.f_code.co_filename
    return file.startswith("<frozen importlib") or file in (importlib.__file__, skyinfra.__file__)


class _Module(types.ModuleType):
    """Stands for a module that this node lacks."""

    def __init__(self, name: str, owner: _Placeholders) -> None:
        super().__init__(name)
        self.__dict__["_owner"] = owner

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Absent(self.__name__, self.__dict__["_owner"])


class _Absent:
    """Stands for what is in such a module: while the client's files are imported it may be used, later it raises."""

    def __init__(self, module: str, owner: _Placeholders) -> None:
        self._module = module
        self._owner = owner
        if not owner.in_place:
            self._fail()

    def _fail(self, *_: object) -> NoReturn:
        raise ModuleNotFoundError(f"No module named {self._module!r}", name=self._module)

    def _another(self, *_: object, **__: object) -> _Absent:
        return _Absent(self._module, self._owner)

    def __getattr__(self, name: str) -> _Absent:
        if name.startswith("__"):
            raise AttributeError(name)
        return self._another()

    __call__ = __getitem__ = __or__ = __ror__ = _another
    __instancecheck__ = __subclasscheck__ = __iter__ = __enter__ = _fail

    def __mro_entries__(self, _bases: tuple[object, ...]) -> tuple[type, ...]:
        return (type("Absent", (), {"__new__": self._fail}),)
