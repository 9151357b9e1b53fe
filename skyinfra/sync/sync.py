"""Sending the user's files to a fleet, and what tasks need besides their call.

Everything that awaits runs in the event loop of a `LoopThread`.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from skyinfra.blobs import transfer
from skyinfra.blobs.store import WrongContent
from skyinfra.blobs.transfer import BlobsMissing, Sent
from skyinfra.blobs.trees import Tree, parse_name
from skyinfra.errors import InvalidField, InvalidInclude, NodeFailed, TaskInputsLost, TaskTooLarge
from skyinfra.program import views
from skyinfra.protocol.calls import Outcome
from skyinfra.protocol.rpc import Peer
from skyinfra.sync.includes import Includes
from skyinfra.tasks.included import Included, listing

if TYPE_CHECKING:
    from skyinfra.tasks.pickling import Shipment

# A file that changes while it is read is read again that often.
_ATTEMPTS = 5


@dataclass(frozen=True)
class Synced:
    """The numbers of a sync: files, their bytes, and how much of that had to be sent.

    tree: the name of these files. sent_blobs counts the same content once, and the listing of the files.
    """

    tree: str
    files: int
    bytes: int
    sent_blobs: int
    sent_bytes: int


async def sync(head: Peer, includes: Includes) -> tuple[Included, Synced]:
    """Brings what is included to the head, where it is not there yet. Raises `InvalidInclude` and what sending
    does."""
    included, sent = await _send(head, includes)
    views.remember(included.places)
    tree = included.tree
    return included, Synced(tree.name, len(tree.files), tree.size, sent.blobs, sent.bytes)


async def _send(head: Peer, includes: Includes) -> tuple[Included, Sent]:
    for _ in range(_ATTEMPTS):
        included = includes.scan()
        try:
            sent = await transfer.send(head, included.blobs())
        except WrongContent:
            continue  # it was changed since it was looked at
        return included, sent
    raise InvalidInclude(
        "a file changes faster than it can be sent", field="includes", hint="Sync when what writes it is done."
    )


# What tasks need ----------------------------------------------------------------------------------------------------


async def bring(head: Peer, shipment: Shipment, *, files: bool) -> None:
    """Makes sure that what *shipment* needs besides its message is at the head. *files*: also what was brought before,
    those that were synced and secrets.

    Raises `TaskInputsLost`, `TaskTooLarge`, `StateDirectoryError`, OSError where the head does not answer.
    """
    if shipment.secrets is not None:
        await shipment.secrets.give(head, shipment.uses, again=files)
    blobs = list(shipment.parcels)
    if files and shipment.included is not None:
        blobs += shipment.included.blobs()
    try:
        await transfer.send(head, blobs)
    except TaskTooLarge as error:
        message = f"the call of {shipment.name}: {error.message}"
        raise TaskTooLarge(message, field=error.field, hint=error.hint) from None
    except WrongContent:
        raise TaskInputsLost(
            f"what {shipment.name} needs is not at the head, and has changed here since the task was made",
            hint="Send the task again, after pool.sync() where files have changed.",
        ) from None


async def fetched(head: Peer, outcome: Outcome) -> Outcome:
    """*outcome* with its large result, if it has one; with ``missing`` where that is gone. Raises OSError."""
    if not outcome.parts:
        return outcome
    try:
        stream, *rest = [await transfer.fetch_bytes(head, part.digest, part.size) for part in outcome.parts]
    except BlobsMissing as error:
        return Outcome(missing=error.digests)
    return Outcome(result=stream, failure=outcome.failure, buffers=tuple(map(memoryview, rest)))


# Files of the nodes -------------------------------------------------------------------------------------------------


async def send_files(head: Peer, path: Path, remote: str, secret: str) -> str:
    """Brings a file or folder to the head, as *remote* below the folder of each node; the name of its tree."""
    includes = Includes(path.parent, secret, most=None, code=False)
    includes.add([path])
    included, _ = await _send(head, includes)
    # The same blobs under other names.
    top = path.name
    files = {remote + name.removeprefix(top): entry for name, entry in included.tree.files.items()}
    tree = Tree(files)
    await transfer.send(head, [listing(tree)])
    return tree.name


async def fetch_files(head: Peer, name: str, remote: str, path: Path) -> None:
    """Writes the tree *name*, which a node has sent, with its *remote* as *path*.

    Raises OSError, `BlobsMissing`, and `NodeFailed` for files that are not below *remote*.
    """
    digest, size = parse_name(name)
    tree = Tree.loads(bytes(await transfer.fetch_bytes(head, digest, size)))
    for file in tree.files:
        # The node is not believed: any task there may answer for it.
        if file != remote and not file.startswith(f"{remote}/"):
            raise NodeFailed(f"the node gave {file!r}, which is not below what was asked for", field=remote)
    for file, entry in tree.files.items():
        await transfer.fetch_file(head, entry, Path(f"{path}{file.removeprefix(remote)}"))


def remote_path(remote: str | os.PathLike[str]) -> str:
    """Returns a path below the folder for files of a node. Raises `InvalidField`."""
    text = os.path.normpath(os.fspath(remote))
    if text.startswith(("/", "..")) or text == ".":
        raise InvalidField("a path below the folder sky.files() of the nodes", field="remote", given=os.fspath(remote))
    return text
