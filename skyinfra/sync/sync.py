"""Sending the user's files to a fleet, and what tasks need besides their call.

Everything that awaits runs in the event loop of a `LoopThread`.
"""

from __future__ import annotations

import os
import types
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING

from skyinfra.blobs import transfer
from skyinfra.blobs.store import WrongContent, digest_of
from skyinfra.blobs.transfer import CHUNK, Blob, BlobsMissing, Sent
from skyinfra.blobs.trees import Tree, parse_name
from skyinfra.errors import InvalidField, InvalidInclude, TaskInputsLost, TaskTooLarge
from skyinfra.protocol.calls import Outcome
from skyinfra.protocol.rpc import Peer
from skyinfra.sync.includes import Includes, Scan
from skyinfra.worker import views

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


@dataclass(frozen=True)
class Included:
    """The synced files of a client, as tasks see them."""

    scan: Scan

    @property
    def tree(self) -> Tree:
        """The listing of it."""
        return self.scan.tree

    def blobs(self) -> list[Blob]:
        """Its files and its listing, to be sent."""
        listing = self.tree.dumps()
        files = self.tree.blobs().items()
        return [
            *(Blob(digest, size, partial(_read, self.scan.sources[digest])) for digest, size in files),
            Blob(digest_of(listing), len(listing), lambda: transfer.chunked([listing])),
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
        files = {path: self.scan.places[path] for path in self.tree.code}
        return {str(file.resolve()): path for path, file in files.items()} | {
            str(file): path for path, file in files.items()
        }


def _read(path: Path) -> Iterator[bytes]:
    """The content of a file in chunks. One that is gone has none: what is sent is not what was to be sent then."""
    try:
        with path.open("rb") as file:
            while data := file.read(CHUNK):
                yield data
    except OSError:
        return


async def sync(head: Peer, includes: Includes) -> tuple[Included, Synced]:
    """Brings what is included to the head, where it is not there yet. Raises `InvalidInclude` and what sending
    does."""
    included, sent = await _send(head, includes)
    views.remember(included.scan.places)
    tree = included.tree
    return included, Synced(tree.name, len(tree.files), tree.size, sent.blobs, sent.bytes)


async def _send(head: Peer, includes: Includes) -> tuple[Included, Sent]:
    for _ in range(_ATTEMPTS):
        included = Included(includes.scan())
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
    """Makes sure that what *shipment* needs besides its message is at the head. *files*: those that were synced too.

    Raises `TaskInputsLost`, `TaskTooLarge`, `StateDirectoryError`, OSError where the head does not answer.
    """
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
    return Outcome(result=stream, buffers=tuple(map(memoryview, rest)))


# Files of the nodes -------------------------------------------------------------------------------------------------


async def send_files(head: Peer, path: Path, remote: str, secret: str) -> str:
    """Brings a file or folder to the head, as *remote* below the folder of each node; the name of its tree."""
    includes = Includes(path.parent, secret, limited=False)
    includes.add([path])
    included, _ = await _send(head, includes)
    # The same blobs under other names.
    top = path.name
    files = {remote + name.removeprefix(top): entry for name, entry in included.tree.files.items()}
    tree = Tree(files)
    listing = tree.dumps()
    await transfer.send(head, [Blob(digest_of(listing), len(listing), lambda: transfer.chunked([listing]))])
    return tree.name


async def fetch_files(head: Peer, name: str, remote: str, path: Path) -> None:
    """Writes the tree *name*, which a node has sent, with its *remote* as *path*. Raises OSError, `BlobsMissing`."""
    digest, size = parse_name(name)
    tree = Tree.loads(bytes(await transfer.fetch_bytes(head, digest, size)))
    for file, entry in tree.files.items():
        target = Path(f"{path}{file.removeprefix(remote)}")
        target.parent.mkdir(parents=True, exist_ok=True)
        new = target.with_name(f".{target.name}.{uuid.uuid4().hex}")
        try:
            await transfer.fetch_file(head, entry.sha256, entry.size, new)
            if entry.executable:
                new.chmod(new.stat().st_mode | 0o111)
            new.replace(target)
        finally:
            new.unlink(missing_ok=True)


def remote_path(remote: str | os.PathLike[str]) -> str:
    """A path below the folder for files of a node. Raises `InvalidField`."""
    text = os.path.normpath(os.fspath(remote))
    if text.startswith(("/", "..")) or text == ".":
        raise InvalidField("a path below the folder sky.files() of the nodes", field="remote", given=os.fspath(remote))
    return text
