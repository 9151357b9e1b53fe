"""The files of this node that clients put and get, below `sky.files()`.

They pass through the blobs of the head. A long transfer goes on while the client asks again and again.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import partial
from pathlib import Path
from threading import Lock
from typing import Any

from skyinfra.blobs import store, transfer
from skyinfra.blobs.copies import tree_of
from skyinfra.blobs.store import BlobStore
from skyinfra.blobs.transfer import BlobsMissing
from skyinfra.blobs.trees import Tree, check_path, parse_name
from skyinfra.errors import InvalidField, NodeFailed, StateDirectoryError
from skyinfra.node.folder import NodeDirectory
from skyinfra.node.node import Node
from skyinfra.program import views
from skyinfra.protocol.rpc import Peer
from skyinfra.runner import head_connection

# Then the client has to ask again, which it does at once: what nobody has asked for since is of a client that has gone.
_WAIT_S = 15.0
_ABANDONED_S = 5.0


class Files:
    """The files in *directory* of the node with the configuration file *config*."""

    def __init__(self, config: Path, directory: NodeDirectory) -> None:
        self._config = config
        self._directory = directory
        self._folder = directory.path / views.FILES_FOLDER
        self._store = BlobStore(directory.path / store.FOLDER)
        self._workers = ThreadPoolExecutor(2, thread_name_prefix="files")
        # Each with the time when a client was told to ask again.
        self._running: dict[tuple[str, str], tuple[Future[Any], float]] = {}
        self._lock = Lock()

    @property
    def active(self) -> bool:
        """Whether files pass, whoever waits for them."""
        with self._lock:
            return not all(future.done() for future, _ in self._running.values())

    def put(self, tree: str) -> dict[str, Any]:
        """Writes the files of *tree* from the head; ``done`` once all are written. Other files stay.

        Raises `NodeFailed`, `StateDirectoryError`.
        """
        return self._answer("put", tree, partial(self._put, tree))

    def get(self, path: str) -> dict[str, Any]:
        """Sends a file or folder to the head; ``tree`` is its name once it is ``done``.

        Raises `InvalidField`, `NodeFailed`, `StateDirectoryError`.
        """
        check_path(path)
        return self._answer("get", path, partial(self._get, path))

    def _answer(self, what: str, name: str, work: Callable[[], str]) -> dict[str, Any]:
        with self._lock:
            future, asked = self._running.get((what, name), (None, 0.0))
            if future is None or (future.done() and time.monotonic() - asked > _ABANDONED_S):
                future = self._workers.submit(work)
                self._running[what, name] = future, time.monotonic()
        wait([future], _WAIT_S)
        with self._lock:
            if not future.done():
                self._running[what, name] = future, time.monotonic()
                return {"done": False, "tree": None}
            self._running.pop((what, name), None)
        return {"done": True, "tree": future.result()}

    def _put(self, name: str) -> str:
        digest, size = parse_name(name)
        self._with_head(lambda scheduler: transfer.fetch(scheduler, self._store, {digest: size}))
        listing = self._store.read(digest, 0, size)
        if listing is None:
            raise NodeFailed("what was put went before it was there", hint="Put it again.")
        tree = Tree.loads(listing)
        self._with_head(lambda scheduler: transfer.fetch(scheduler, self._store, tree.blobs()))
        for path, entry in tree.files.items():
            target = self._folder / path
            try:
                target.parent.mkdir(parents=True, exist_ok=True)
                views.place(self._store.path(entry.sha256), target, executable=entry.executable, link=False)
            except OSError as error:
                raise StateDirectoryError(f"cannot be written: {error.strerror or error}", field=str(target)) from None
        return name

    def _get(self, path: str) -> str:
        start = self._folder / path
        if not start.exists():
            raise InvalidField("no such file or folder", field=f"{self._folder}", given=path)
        try:
            found = {str(file.relative_to(self._folder)): file for file in self._below(start)}
            tree, parcels = tree_of(found)
        except OSError as error:
            raise NodeFailed(f"cannot be read: {error.strerror or error}", field=str(start)) from None
        self._with_head(lambda scheduler: transfer.send(scheduler, parcels))
        return tree.name

    def _below(self, start: Path) -> Iterator[Path]:
        """Yields the file *start*, or those in the folder, also by links to files; without links to folders or out of
        the folder for files."""
        if not start.resolve().is_relative_to(self._folder.resolve()):
            raise InvalidField("leads out of the folder for files", field=str(self._folder), given=str(start))
        if start.is_dir():
            for item in sorted(start.iterdir()):
                if not item.is_symlink() or self._leads_to_a_file(item):
                    yield from self._below(item)
        elif start.is_file():
            yield start

    def _leads_to_a_file(self, link: Path) -> bool:
        # Path.is_file and Path.resolve raise for some that lead nowhere.
        real = Path(os.path.realpath(link))
        return real.is_relative_to(self._folder.resolve()) and os.path.isfile(real)  # noqa: PTH113

    def _with_head(self, work: Callable[[Peer], Any]) -> None:
        node = Node.load(self._config)
        # The port of the head's own scheduler may be any.
        own = self._directory.scheduler_file.read_text(encoding="utf-8") if node.config.head else None

        async def call() -> None:
            async with head_connection.connection(node, own) as scheduler:
                await work(scheduler)

        try:
            asyncio.run(call())
        except (OSError, BlobsMissing, store.WrongContent) as error:
            raise NodeFailed(f"what is put or fetched did not pass the head: {error}", hint="Try again.") from None
