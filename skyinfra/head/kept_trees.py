"""Keeps the synced files that unfinished jobs need: a folder for each tree, with links to its blobs.

    kept/DIGEST-SIZE/BLOB

The head's blobs go when others come, and a client that is connected sends them again. A job may wait for days, and its
client is gone.
"""

from __future__ import annotations

import contextlib
import shutil
import uuid
from collections.abc import Collection
from pathlib import Path

from skyinfra.blobs.store import BlobStore
from skyinfra.blobs.trees import Tree, parse_name
from skyinfra.errors import TaskInputsLost
from skyinfra.node.folder import sync_folder, writing
from skyinfra.program.views import place


class KeptTrees:
    """The trees in *folder*, which is made for the first one. Their blobs are in *store*."""

    def __init__(self, folder: Path, store: BlobStore) -> None:
        self._folder = folder
        self._store = store

    def hold(self, name: str) -> None:
        """Keeps the tree until `release`.

        Raises `InvalidInclude`, `StateDirectoryError`, and `TaskInputsLost` where not all of it is there.
        """
        target = self._place(name)
        if target.is_dir():
            return
        made = self._folder / f".{uuid.uuid4().hex}"
        try:
            with writing(self._folder):
                made.mkdir(mode=0o700, parents=True)
                listing, size = parse_name(name)
                self._take(listing, size, made)
                tree = Tree.loads((made / listing).read_bytes())
                for digest, length in tree.blobs().items():
                    self._take(digest, length, made)
                # A submission that was answered is on the disk, also its files.
                for each in (*made.iterdir(), made):
                    sync_folder(each)
                made.replace(target)
                for each in (self._folder, self._folder.parent):
                    sync_folder(each)
        finally:
            shutil.rmtree(made, ignore_errors=True)

    def restore(self, name: str) -> None:
        """Puts back what the store has lost of a tree that is held. Raises `StateDirectoryError`."""
        with writing(self._folder), contextlib.suppress(FileNotFoundError):
            for kept in self._place(name).iterdir():
                if not self._store.has(kept.name, kept.stat().st_size):
                    target = self._store.path(kept.name)
                    target.parent.mkdir(parents=True, exist_ok=True)
                    place(kept, target, executable=False)

    def release(self, needed: Collection[str]) -> None:
        """Forgets every tree but those that are *needed*."""
        names = {self._place(name).name for name in needed}
        with contextlib.suppress(OSError):  # there is none; or it goes the next time
            for each in self._folder.iterdir():
                if each.name not in names:
                    shutil.rmtree(each, ignore_errors=True)

    def _place(self, name: str) -> Path:
        digest, size = parse_name(name)
        return self._folder / f"{digest}-{size}"

    def _take(self, digest: str, size: int, made: Path) -> None:
        if self._store.has(digest, size) and not (made / digest).exists():
            with contextlib.suppress(FileNotFoundError):  # it went this very moment
                place(self._store.path(digest), made / digest, executable=False)
        if not (made / digest).exists():
            raise TaskInputsLost(
                "the files that the job needs are not at the head any more", hint="Sync them and submit it again."
            )
