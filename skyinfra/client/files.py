"""The files that tasks import and read, and those that are copied to and from the nodes."""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

from skyinfra.blobs.transfer import BlobsMissing
from skyinfra.errors import InvalidField, InvalidInclude, NodeError, NodeFailed
from skyinfra.protocol import questions
from skyinfra.submission.fleet import AskedFleet, Fleet
from skyinfra.submission.snapshot import ANYWHERE
from skyinfra.sync import bringing, project, sync
from skyinfra.sync.bringing import Brought, Here
from skyinfra.sync.includes import Includes
from skyinfra.sync.sync import Synced

# A node answers within that long, if only that it is not done yet.
_ANSWER_S = 40.0
_NODES_AT_ONCE = 8


def send(fleet: Fleet, paths: Sequence[str | Path], excludes: Sequence[str]) -> Synced:
    """See `Pool.sync`."""
    includes = fleet.includes or Includes(Path.cwd(), fleet.manifest.secret)
    # What is refused is not kept: the next sync is for others.
    more = replace(includes, paths=list(includes.paths), excludes=list(includes.excludes))
    more.add(paths, excludes)
    if not more.paths:
        raise InvalidInclude("nothing is to be synced", field="paths", hint='Name some: pool.sync("src/mylib").')
    fleet.included, synced = fleet.from_head(sync.sync(fleet.connection.head, more))
    fleet.includes = more
    return synced


def send_project(fleet: Fleet, folder: Path, paths: Sequence[Path], excludes: Sequence[str] = ()) -> Synced:
    """Syncs *folder* without what Git ignores and what `.skyinfraignore` lists, and *paths* with that, in place of all
    before.

    Raises what `send` does, and `InvalidInclude` for more than 2,000 files or 100 MiB.
    """
    ignored, most = project.excludes_of(folder), (project.MOST_FILES, project.MOST_BYTES)
    fleet.includes = Includes(folder, fleet.manifest.secret, ignored=ignored, most=most, skips=True)
    return send(fleet, [folder, *paths], excludes)


def put(fleet: AskedFleet, path: str | Path, remote: str | Path | None, nodes: Sequence[str]) -> tuple[str, list[str]]:
    """See `Questions.put_on`."""
    path = Path(os.path.normpath(Path(path).expanduser().absolute()))
    if not path.exists():
        raise InvalidInclude("is not there", field="path", given=str(path))
    name = sync.remote_path(remote if remote is not None else path.name)
    tree = fleet.from_head(sync.send_files(fleet.connection.head, path, name, fleet.manifest.secret))

    def put_on(node: str) -> NodeError | None:
        try:
            _ask_until_done(fleet, node, questions.PUT, tree=tree)
        except NodeError as error:
            return error
        return None

    with ThreadPoolExecutor(min(len(nodes), _NODES_AT_ONCE)) as workers:
        failed = {node: error for node, error in zip(nodes, workers.map(put_on, nodes), strict=True) if error}
    there = fleet.look().nodes(ANYWHERE) if failed else set()
    for node, error in failed.items():
        if node in there or len(failed) == len(nodes):
            raise error
    return name, [node for node in nodes if node not in failed]


def get(fleet: AskedFleet, remote: str | Path, path: str | Path, nodes: Sequence[str]) -> Path:
    """See `Pool.get`."""
    name = sync.remote_path(remote)
    if len(nodes) > 1:
        raise InvalidField("several nodes have files", field="node", hint=f"Name one of: {', '.join(nodes)}.")
    tree = _ask_until_done(fleet, nodes[0], questions.GET, path=name)
    target = Path(path).expanduser()
    if target.is_dir():
        target = target / Path(name).name
    try:
        fleet.from_head(sync.fetch_files(fleet.connection.head, tree, name, target))
    except BlobsMissing:
        raise NodeFailed("the head had no room to keep it until it was here", field=name) from None
    return target


def bring(fleet: AskedFleet, tree: str, here: Here, wanted: Sequence[str] = ()) -> list[Brought]:
    """Brings the files of *tree* that are at the head; see `bringing.bring`. Raises `NodeFailed`, OSError."""
    try:
        return fleet.from_head(bringing.bring(fleet.connection.head, tree, here, wanted))
    except BlobsMissing:
        raise NodeFailed("the head had no room to keep the files until they were here") from None


def _ask_until_done(fleet: AskedFleet, node: str, question: str, **arguments: str) -> str:
    """Returns the tree that *node* names then."""
    while True:
        answer = fleet.ask(node, question, wait_s=_ANSWER_S, **arguments)
        if answer["done"]:
            return str(answer["tree"])
