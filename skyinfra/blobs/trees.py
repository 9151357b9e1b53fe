"""Trees: which files a client has synced, as a listing whose digest names it.

A tree has no content of its own: each of its files is a blob, and so is its listing (`skyinfra.blobs.store`). The
same files give the same listing, and the same name. Empty folders, owners and times are not part of it.
"""

from __future__ import annotations

import importlib.machinery
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import PurePosixPath

from skyinfra.blobs.store import check_digest, digest_of
from skyinfra.errors import InvalidInclude

VERSION = 1
# Of a listing, in bytes, which is read as a whole: some millions of files.
_LARGEST = 2**30
_SIZE = re.compile(r"[0-9]{1,10}")
_CODE = tuple(importlib.machinery.SOURCE_SUFFIXES + importlib.machinery.EXTENSION_SUFFIXES)


@dataclass(frozen=True)
class Entry:
    """A file of a tree: the SHA-256 and the size of its content, and whether it may be executed."""

    sha256: str
    size: int
    executable: bool = False


@dataclass(frozen=True)
class Tree:
    """files: by path below the tree, with ``/``. roots: the folders of it that Python imports from, in order.

    main: the path of the script that is the module ``__main__`` of the client, its package, and its arguments.
    """

    files: Mapping[str, Entry]
    roots: tuple[str, ...] = ()
    main: tuple[str, ...] | None = None

    def dumps(self) -> bytes:
        """Returns the listing: JSON, the same for the same tree."""
        files = {path: [entry.sha256, entry.size, int(entry.executable)] for path, entry in self.files.items()}
        document: dict[str, object] = {"version": VERSION, "roots": list(self.roots), "files": files}
        if self.main is not None:
            document["main"] = list(self.main)
        return json.dumps(document, sort_keys=True, separators=(",", ":"), ensure_ascii=True).encode()

    @classmethod
    def loads(cls, data: bytes) -> Tree:
        """Returns the inverse of `dumps`.

        Raises `InvalidInclude` where it is no listing, and where a path leads out of the tree, or into a file.
        """
        try:
            document = json.loads(data)
            version, files, roots = document["version"], document["files"], document["roots"]
            main = _main(document["main"]) if "main" in document else None
            tree = cls({path: _entry(*found) for path, found in files.items()}, tuple(roots), main)
            if version != VERSION:
                raise InvalidInclude("a listing of another version", given=version)
            check_paths(tree.files)
            for root in tree.roots:
                if root != ".":
                    check_path(root)
        except (ValueError, TypeError, LookupError, AttributeError, RecursionError):
            raise InvalidInclude("is no listing of files", field="listing", given=repr(data[:80])) from None
        return tree

    @cached_property
    def name(self) -> str:
        """The digest and the size of the listing, ``DIGEST:SIZE``."""
        listing = self.dumps()
        return f"{digest_of(listing)}:{len(listing)}"

    @cached_property
    def code(self) -> dict[str, Entry]:
        """The files that Python may import."""
        return {path: entry for path, entry in self.files.items() if self.roots and path.endswith(_CODE)}

    @cached_property
    def code_name(self) -> str:
        """Names the code and where it is imported from; the same for trees that differ in their data only."""
        return digest_of(Tree(self.code, self.roots, self.main).dumps())[:32]

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
        """The size of all files, in bytes."""
        return sum(entry.size for entry in self.files.values())

    def blobs(self) -> dict[str, int]:
        """Digest and size of everything that is in it."""
        return {entry.sha256: entry.size for entry in self.files.values()}


def parse_name(name: str) -> tuple[str, int]:
    """Digest and size of the listing of the tree *name*. Raises `InvalidInclude` for what is no such name."""
    digest, _, size = name.partition(":")
    try:
        if not _SIZE.fullmatch(size) or int(size) > _LARGEST:
            raise ValueError(size)
        return check_digest(digest), int(size)
    except ValueError:
        raise InvalidInclude("names no tree: expected DIGEST:SIZE", field="tree", given=repr(name[:80])) from None


def _main(found: list[object]) -> tuple[str, ...]:
    path, package, *_ = main = tuple(map(str, found))
    check_path(path)
    return path, package, *main[2:]


def _entry(sha256: str, size: object, executable: object) -> Entry:
    if not isinstance(size, int) or size < 0:
        raise ValueError(size)
    return Entry(check_digest(sha256), size, bool(executable))


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
