"""The files that tasks import and read, and those that are copied to and from the nodes."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from skyinfra.blobs.transfer import BlobsMissing
from skyinfra.client.fleet import Fleet
from skyinfra.errors import InvalidField, InvalidInclude, NodeFailed
from skyinfra.protocol import questions
from skyinfra.sync import sync
from skyinfra.sync.includes import Includes
from skyinfra.sync.sync import Included, Synced

# A node answers within that long, if only that it is not done yet.
_ANSWER_S = 40.0
_NODES_AT_ONCE = 8


class Files:
    """Syncs and copies files of the user to *fleet* and back.

    included: the files that were synced last, which tasks see; None where none were.
    """

    def __init__(self, fleet: Fleet) -> None:
        self.included: Included | None = None
        self._fleet = fleet
        self._includes: Includes | None = None

    def sync(self, *paths: str | Path, excludes: Sequence[str] = ()) -> Synced:
        """See `Pool.sync`."""
        if self._includes is None:
            self._includes = Includes(Path.cwd(), self._fleet.manifest.secret)
        self._includes.add(paths, excludes)
        if not self._includes.paths:
            raise InvalidInclude("nothing is to be synced", field="paths", hint='Name some: pool.sync("src/mylib").')
        self.included, synced = self._fleet.with_head(partial(sync.sync, includes=self._includes))
        return synced

    def put(self, path: str | Path, remote: str | Path | None) -> str:
        """See `Pool.put`."""
        path = Path(path).expanduser().absolute()
        if not path.exists():
            raise InvalidInclude("is not there", field="path", given=str(path))
        name = sync.remote_path(remote if remote is not None else path.name)
        secret = self._fleet.manifest.secret
        tree = self._fleet.with_head(partial(sync.send_files, path=path, remote=name, secret=secret))
        nodes = self._fleet.node_names()
        with ThreadPoolExecutor(min(len(nodes), _NODES_AT_ONCE)) as workers:
            list(workers.map(lambda node: self._ask_until_done(node, questions.PUT, tree=tree), nodes))
        return name

    def get(self, remote: str | Path, path: str | Path, node: str | None) -> Path:
        """See `Pool.get`."""
        name = sync.remote_path(remote)
        nodes = self._fleet.node_names()
        if node is None and len(nodes) > 1:
            raise InvalidField("several nodes have files", field="node", hint=f"Name one of: {', '.join(nodes)}.")
        tree = self._ask_until_done(node or nodes[0], questions.GET, path=name)
        target = Path(path).expanduser()
        if target.is_dir():
            target = target / Path(name).name
        try:
            self._fleet.with_head(partial(sync.fetch_files, name=tree, remote=name, path=target))
        except BlobsMissing:
            raise NodeFailed("the head had no room to keep it until it was here", field=name) from None
        return target

    def _ask_until_done(self, node: str, question: str, **arguments: str) -> str:
        """The tree that *node* names then."""
        while True:
            answer = self._fleet.ask(node, question, wait_s=_ANSWER_S, **arguments)
            if answer["done"]:
                return str(answer["tree"])
