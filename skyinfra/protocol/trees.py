"""Trees: which files a client has synced, as a listing whose digest names it.

A tree has no content of its own: each of its files is a blob, and so is its listing (`skyinfra.protocol.blobs`). The
same files give the same listing, and the same name. Empty folders, owners and times are not part of it.

Travels to nodes: standard library only.
"""

from __future__ import annotations

import importlib.machinery
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import PurePosixPath

from skyinfra._errors import InvalidInclude
from skyinfra.protocol.blobs import digest_of

VERSION = 1
_CODE = tuple(importlib.machinery.SOURCE_SUFFIXES + importlib.machinery.EXTENSION_SUFFIXES)


@dataclass(frozen=True)
class Entry:
    """A file of a tree: the SHA-256 and the size of its content, and whether it may be executed."""

    sha256: str
    size: int
    executable: bool = False


@dataclass(frozen=True)
class Tree:
    """files: by path below the tree, with ``/``. roots: the folders of it that Python imports from, in order."""

    files: Mapping[str, Entry]
    roots: tuple[str, ...] = ()

    def dumps(self) -> bytes:
        """The listing: JSON, the same for the same tree."""
        files = {path: [entry.sha256, entry.size, int(entry.executable)] for path, entry in self.files.items()}
        document = {"version": VERSION, "roots": list(self.roots), "files": files}
        return json.dumps(document, sort_keys=True, separators=(",", ":"), ensure_ascii=True).encode()

    @classmethod
    def loads(cls, data: bytes) -> Tree:
        """The inverse of `dumps`. Raises `InvalidInclude` where a path leads out of the tree, or into a file."""
        document = json.loads(data)
        if document["version"] != VERSION:
            raise InvalidInclude("a listing of another version", given=document["version"])
        tree = cls(
            {
                path: Entry(sha256, size, bool(executable))
                for path, (sha256, size, executable) in document["files"].items()
            },
            tuple(document["roots"]),
        )
        check_paths(tree.files)
        for root in tree.roots:
            if root != ".":
                check_path(root)
        return tree

    @cached_property
    def name(self) -> str:
        """Of this tree: digest and size of its listing, ``DIGEST:SIZE``."""
        listing = self.dumps()
        return f"{digest_of(listing)}:{len(listing)}"

    @cached_property
    def code(self) -> dict[str, Entry]:
        """The files that Python may import."""
        return {path: entry for path, entry in self.files.items() if self.roots and path.endswith(_CODE)}

    @cached_property
    def code_name(self) -> str:
        """Of the code and where it is imported from; the same for trees that differ in their data only."""
        return digest_of(Tree(self.code, self.roots).dumps())[:32]

    @cached_property
    def modules(self) -> frozenset[str]:
        """The names of what can be imported from it, without their dotted parts."""
        found = set()
        for path in self.code:
            for root in self.roots:
                below = path if root == "." else path.removeprefix(root + "/")
                if root == "." or below != path:
                    first = below.split("/")[0]
                    found.add(first.split(".")[0] if "/" not in below else first)
        return frozenset(found)

    @property
    def size(self) -> int:
        """Of all files, in bytes."""
        return sum(entry.size for entry in self.files.values())

    def blobs(self) -> dict[str, int]:
        """Digest and size of everything that is in it."""
        return {entry.sha256: entry.size for entry in self.files.values()}


def parse_name(name: str) -> tuple[str, int]:
    """Digest and size of the listing of the tree *name*."""
    digest, _, size = name.partition(":")
    return digest, int(size)


def check_path(path: str) -> None:
    """Raises `InvalidInclude` for a path that is not a plain one below its folder."""
    parts = path.split("/")
    if path.startswith("/") or "\0" in path or any(part in ("", ".", "..") for part in parts):
        raise InvalidInclude("a path below a folder, without `..`", field="path", given=path)


def check_paths(paths: Iterable[str]) -> None:
    """Raises `InvalidInclude` where one is not a plain path, or a file and a folder at once."""
    files = set(paths)
    for path in files:
        check_path(path)
        for parent in PurePosixPath(path).parents:
            if str(parent) in files:
                raise InvalidInclude("is a file and a folder at once", field=str(parent))
