"""The files that a client has synced, as its tasks see them."""

from __future__ import annotations

import types
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path

from skyinfra.blobs.store import digest_of
from skyinfra.blobs.transfer import CHUNK, Blob, chunked
from skyinfra.blobs.trees import Tree


@dataclass(frozen=True)
class Included:
    """Files as they are now. sources: where each digest's content is. places: of each path of the tree, the file here;
    of what was included itself too."""

    tree: Tree
    sources: dict[str, Path]
    places: dict[str, Path]

    def blobs(self) -> list[Blob]:
        """Its files and its listing, to be sent."""
        files = self.tree.blobs().items()
        return [
            *(Blob(digest, size, partial(_read, self.sources[digest])) for digest, size in files),
            listing(self.tree),
        ]

    def module_name(self, module: types.ModuleType) -> str | None:
        """The name under which nodes can import *module*, or None where they cannot."""
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


def listing(tree: Tree) -> Blob:
    """The listing of *tree*, to be sent."""
    data = tree.dumps()
    return Blob(digest_of(data), len(data), lambda: chunked([data]))


def _read(path: Path) -> Iterator[bytes]:
    """The content of a file in chunks. One that is gone has none: what is sent is not what was to be sent then."""
    try:
        with path.open("rb") as file:
            while data := file.read(CHUNK):
                yield data
    except OSError:
        return
