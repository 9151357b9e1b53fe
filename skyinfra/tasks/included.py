"""The files of a client that its tasks see: those that it has synced, and its own modules."""

from __future__ import annotations

import sys
import time
import types
from collections import deque
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path

from skyinfra.blobs.store import digest_of
from skyinfra.blobs.transfer import CHUNK, Blob, chunked
from skyinfra.blobs.trees import Entry, Tree
from skyinfra.program import views
from skyinfra.program.views import MODULES
from skyinfra.tasks import modules, script
from skyinfra.tasks.modules import Data, Source, data_of


@dataclass(frozen=True)
class Included:
    """Files as they are now. sources: where each digest's content is, or the content. places: of each path of the tree,
    the file here; of what was included itself too."""

    tree: Tree
    sources: dict[str, Path | bytes]
    places: dict[str, Path]

    def blobs(self) -> list[Blob]:
        """Returns its files and its listing, to be sent."""
        files = self.tree.blobs().items()
        return [
            *(Blob(digest, size, partial(_content, self.sources[digest])) for digest, size in files),
            listing(self.tree),
        ]

    def having(self, code: Code) -> Included:
        """Returns the same with own modules, but for those that nodes import from what was included."""
        own = [each for each in code.sources if not self.imports(each.path)]
        files: list[Source | Data] = [*own, *data_of(own)]
        added = {f"{MODULES}/{each.path}": each for each in files}
        entries = {path: Entry(digest_of(each.data), len(each.data)) for path, each in added.items()}
        main = code.main and (f"{MODULES}/{code.main[0]}", *code.main[1:])
        roots = tuple(dict.fromkeys([*self.tree.roots, MODULES]))
        tree = Tree({**self.tree.files, **entries}, roots, self.tree.main or main)
        content = {entries[path].sha256: each.data for path, each in added.items()}
        places = {path: each.file for path, each in added.items()}
        return Included(tree, {**self.sources, **content}, {**self.places, **places})

    def imports(self, path: str) -> bool:
        """Returns whether nodes import the file *path* from what was included, below a folder of Python's path."""
        return any((path if root == "." else f"{root}/{path}") in self.tree.code for root in self.tree.roots)

    def module_name(self, module: types.ModuleType) -> str | None:
        """Returns the name under which nodes can import *module*, or None where they cannot."""
        path = self._paths.get(getattr(module, "__file__", None) or "")
        if path is None:
            return None
        name = module.__name__.replace(".", "/")
        tops = ["" if root == "." else f"{root}/" for root in self.tree.roots]
        files = [f"{top}{name}{end}" for top in tops for end in (".py", "/__init__.py")]
        return module.__name__ if path in files else None

    @cached_property
    def _paths(self) -> dict[str, str]:
        """The path in the tree of each file here."""
        files = {path: self.places[path] for path in self.tree.code}
        return {str(file.resolve()): path for path, file in files.items()} | {
            str(file): path for path, file in files.items()
        }


@dataclass(frozen=True)
class Code:
    """Own modules with all that they import. main: see `Tree`, below the folder of own modules."""

    sources: tuple[Source, ...]
    main: tuple[str, ...] | None

    @cached_property
    def digests(self) -> list[str]:
        """Of each content."""
        return sorted(digest_of(each.data) for each in self.sources)

    @property
    def is_current(self) -> bool:
        """Whether this process has loaded none of them again since."""
        return modules.are_current(self.sources)


def code_of(names: Collection[str]) -> Code:
    """Returns the own modules *names* with all that they import; one of them may be the script."""
    program = script.current() if script.NAME in names else None
    own = [program.source] if program is not None else []
    found = modules.closure([*set(names) - {script.NAME}, *(name for each in own for name in each.imports)])
    return Code((*own, *found), program.main if program is not None else None)


class _Times:
    """When *paths* have changed last."""

    def __init__(self, paths: Collection[Path]) -> None:
        self._paths = paths
        self._found, self._looked = self._look(), time.monotonic()

    def hold(self) -> bool:
        """Returns whether none has changed since."""
        if (now := time.monotonic()) - self._looked < _LOOK_S:
            return True
        self._looked = now
        return self._look() == self._found

    def _look(self) -> list[int]:
        return [_changed(path) for path in self._paths]


def _changed(path: Path) -> int:
    """Returns when *path* has changed last; 0 where there is none."""
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return 0


_NOTHING = Included(Tree({}), {}, {})
# The own modules that calls of this process have needed so far. They go with every call: so that it is the same tree,
# and processes of slots keep the modules that they have loaded.
_needed: set[str] = set()
# What was made of the synced files that were used last, with the times of the files that no module here was made from.
_made: deque[tuple[Included | None, frozenset[str], Code, Included, _Times]] = deque(maxlen=8)
# They are looked at again when so many seconds have passed.
_LOOK_S = 0.5


def with_modules(included: Included | None, names: Collection[str]) -> Included | None:
    """Returns *included* with the own modules *names*, those that earlier calls have needed, and what they import."""
    _needed.update(names)
    if not _needed:
        return included
    # Other threads submit tasks too.
    for base, needed, code, made, times in tuple(_made):
        if base is included and needed == _needed and code.is_current and times.hold():
            return made
    code = code_of(_needed)
    made = (included or _NOTHING).having(code)
    views.remember(made.places)
    loaded = {each.file for each in code.sources if each.name in sys.modules}
    own = {place for path, place in made.places.items() if path.startswith(f"{MODULES}/")} - loaded
    _made.appendleft((included, frozenset(_needed), code, made, _Times({*own, *(each.parent for each in own)})))
    return made


def listing(tree: Tree) -> Blob:
    """Returns the listing of *tree*, to be sent."""
    data = tree.dumps()
    return Blob(digest_of(data), len(data), lambda: chunked([data]))


def _content(source: Path | bytes) -> Iterator[bytes | memoryview]:
    return chunked([source]) if isinstance(source, bytes) else _read(source)


def _read(path: Path) -> Iterator[bytes]:
    """The content of a file in chunks. One that is gone has none: what is sent is not what was to be sent then."""
    try:
        with path.open("rb") as file:
            while data := file.read(CHUNK):
                yield data
    except OSError:
        return
