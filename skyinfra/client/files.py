"""The files of a pool: what tasks import and read, and what is copied to and from the nodes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from skyinfra.blobs.transfer import BlobsMissing
from skyinfra.client.snapshot import Target
from skyinfra.errors import InvalidField, InvalidInclude, NodeFailed
from skyinfra.protocol import questions
from skyinfra.protocol.manifest import Manifest
from skyinfra.protocol.rpc import Peer
from skyinfra.sync import sync
from skyinfra.sync.includes import Includes
from skyinfra.sync.sync import Included, Synced

T = TypeVar("T")

# A node answers within that long, if only that it is not done yet.
_ANSWER_S = 40.0
_NODES_AT_ONCE = 8


class FilesState:
    """includes: what is to be synced. included: what was synced last, which tasks see; None where nothing was."""

    def __init__(self) -> None:
        self.includes: Includes | None = None
        self.included: Included | None = None


class WithFiles(ABC):
    """The part of a pool that is about files."""

    manifest: Manifest
    target: Target
    _files: FilesState

    @abstractmethod
    def with_head(self, work: Callable[[Peer], Coroutine[Any, Any, T]]) -> T:
        """The result of *work*, which calls the scheduler of the head. Raises `FleetUnreachable`."""

    @abstractmethod
    def ask(self, node: str, question: str, *, wait_s: float = 0, **arguments: Any) -> Any:
        """The answer of the runner of *node*."""

    @abstractmethod
    def node_names(self) -> list[str]:
        """The names of the nodes."""

    @property
    def included(self) -> Included | None:
        """What was synced last, which tasks are to see."""
        return self._files.included

    def sync(self, *paths: str | Path, excludes: Sequence[str] = ()) -> Synced:
        """Sends these files and folders, and those of earlier calls, to the fleet as they are now; what is there
        already is not sent again.

        Tasks that are submitted from now on see them: as `sky.synced` says, and as modules, which they import from
        there. Their processes keep loaded modules, and what is in them, where only other files than Python's have
        changed. excludes: lines as in a .gitignore, added to `includes.EXCLUDED`. A path stands there as below the
        working directory, or else below the folder that Python imports it from, or else by its last part.

        Raises `InvalidInclude`, `StateDirectoryError` where the head has no room, `FleetUnreachable`.
        """
        state = self._files
        if state.includes is None:
            state.includes = Includes(Path.cwd(), self.manifest.secret)
        state.includes.add(paths, excludes)
        if not state.includes.paths:
            raise InvalidInclude("nothing is to be synced", field="paths", hint='Name some: pool.sync("src/mylib").')
        state.included, synced = self.with_head(partial(sync.sync, includes=state.includes))
        return synced

    def put(self, path: str | Path, remote: str | Path | None = None) -> str:
        """Copies a file or a folder into the folder `sky.files` of every node that is there now; its path there.

        remote: that path, by default the last part of *path*. Files that are there and not here stay. The files go
        through the head, once, and what a node has already is not sent again.
        Raises `InvalidInclude`, `InvalidField`, `NodeError`, `StateDirectoryError`, `FleetUnreachable`.
        """
        path = Path(path).expanduser().absolute()
        if not path.exists():
            raise InvalidInclude("is not there", field="path", given=str(path))
        name = sync.remote_path(remote if remote is not None else path.name)
        secret = self.manifest.secret
        tree = self.with_head(partial(sync.send_files, path=path, remote=name, secret=secret))
        nodes = self.node_names()
        with ThreadPoolExecutor(min(len(nodes), _NODES_AT_ONCE)) as workers:
            list(workers.map(lambda node: self._ask_until_done(node, questions.PUT, tree=tree), nodes))
        return name

    def get(self, remote: str | Path, path: str | Path, node: str | None = None) -> Path:
        """Copies *remote*, a file or a folder in `sky.files` of *node*, to *path*; gives that.

        node: may be left out where the fleet has one. Where *path* is a folder, it comes into that.
        Raises `InvalidField`, `NodeError`, `FleetUnreachable`, OSError where *path* cannot be written.
        """
        name = sync.remote_path(remote)
        node = node or self.target.node
        nodes = self.node_names()
        if node is None and len(nodes) > 1:
            raise InvalidField("several nodes have files", field="node", hint=f"Name one of: {', '.join(nodes)}.")
        tree = self._ask_until_done(node or nodes[0], questions.GET, path=name)
        target = Path(path).expanduser()
        if target.is_dir():
            target = target / Path(name).name
        try:
            self.with_head(partial(sync.fetch_files, name=tree, remote=name, path=target))
        except BlobsMissing:
            raise NodeFailed("the head had no room to keep it until it was here", field=name) from None
        return target

    def _ask_until_done(self, node: str, question: str, **arguments: str) -> str:
        """The tree that *node* names then."""
        while True:
            answer = self.ask(node, question, wait_s=_ANSWER_S, **arguments)
            if answer["done"]:
                return str(answer["tree"])
