"""The files of a pool: what tasks import and read, and what is copied to and from the nodes."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from skyinfra._errors import InvalidField, InvalidInclude, NodeFailed
from skyinfra.client import sync
from skyinfra.client.includes import Includes
from skyinfra.client.sync import Included, Synced
from skyinfra.protocol import questions
from skyinfra.protocol.transfer import BlobsMissing

if TYPE_CHECKING:
    from skyinfra.client.pool import Pool

# A node answers within that long, if only that it is not done yet.
_ANSWER_S = 40.0
_NODES_AT_ONCE = 8


class PoolFiles:
    """The files of *pool*. included: what was synced last, which tasks see; None where nothing was."""

    def __init__(self, pool: Pool) -> None:
        self.included: Included | None = None
        self._pool = pool
        self._includes: Includes | None = None

    def sync(self, paths: Sequence[str | Path], excludes: Sequence[str]) -> Synced:
        """See `Pool.sync`."""
        if self._includes is None:
            self._includes = Includes(Path.cwd(), self._pool.manifest.secret)
        includes = self._includes
        includes.add(paths, excludes)
        if not includes.paths:
            raise InvalidInclude("nothing is to be synced", field="paths", hint='Name some: pool.sync("src/mylib").')
        self.included, synced = self._pool.with_head(partial(sync.sync, includes=includes))
        return synced

    def put(self, path: Path, remote: str | Path | None) -> str:
        """See `Pool.put`."""
        path = path.expanduser().absolute()
        name = sync.remote_path(remote if remote is not None else path.name)
        secret = self._pool.manifest.secret
        tree = self._pool.with_head(partial(sync.send_files, path=path, remote=name, secret=secret))
        nodes = self._pool.node_names()
        with ThreadPoolExecutor(min(len(nodes), _NODES_AT_ONCE)) as workers:
            list(workers.map(lambda node: self._ask(node, questions.PUT, tree=tree), nodes))
        return name

    def get(self, remote: str | Path, path: Path, node: str | None) -> Path:
        """See `Pool.get`."""
        name = sync.remote_path(remote)
        nodes = self._pool.node_names()
        if node is None and len(nodes) > 1:
            raise InvalidField("several nodes have files", field="node", hint=f"Name one of: {', '.join(nodes)}.")
        path = path.expanduser()
        tree = self._ask(node or nodes[0], questions.GET, path=name)
        target = path / Path(name).name if path.is_dir() else path
        try:
            self._pool.with_head(partial(sync.fetch_files, name=tree, remote=name, path=target))
        except BlobsMissing:
            raise NodeFailed("the head had no room to keep it until it was here", field=name) from None
        return target

    def _ask(self, node: str, question: str, **arguments: str) -> str:
        """The tree that *node* names once it is done."""
        while True:
            answer = self._pool.ask(node, question, wait_s=_ANSWER_S, **arguments)
            if answer["done"]:
                return str(answer["tree"])
