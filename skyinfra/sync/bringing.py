"""Brings the files that a program wrote on a node to a folder of this machine.

Nothing is written outside of that folder, and nothing over a file that was changed here meanwhile: what came from the
node lies beside it then.
"""

from __future__ import annotations

import asyncio
import os
import stat
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from skyinfra.blobs import patterns, transfer
from skyinfra.blobs.copies import shown
from skyinfra.blobs.store import file_digest, in_words
from skyinfra.blobs.trees import Entry, Tree, parse_name
from skyinfra.errors import InvalidField, counted
from skyinfra.protocol.rpc import Peer
from skyinfra.sync.includes import EXCLUDED

# Behind the name of a file, for that from the node where the one here was changed.
BESIDE = ".fetched"
_NAMED = 5

How = Literal["new", "replaced", "same", "beside", "refused"]


@dataclass(frozen=True)
class Brought:
    """A file from a node. path: where it is here now, relative to the folder; how: what became of the one that was
    here. why: of one that was refused. changed: the file here that stays, where this one lies beside it."""

    path: str
    size: int
    how: How
    why: str = ""
    changed: str = ""


@dataclass(frozen=True)
class Here:
    """The *folder* that files are brought to.

    since: when its files were sent, in UNIX seconds: what was changed here later stays. sent: what was sent of files
    here, by their paths on this machine; one that is still the same is replaced, whatever its time. prefix: the folder
    in it for these files.
    """

    folder: Path
    since: float
    sent: Mapping[Path, Entry]
    prefix: str = ""

    def refusal(self, path: str) -> str | None:
        """Returns why nothing is written at *path*, of a node that is not believed; None where it may be."""
        if patterns.meant(path, patterns.read(EXCLUDED)):
            return "is never written by a node"
        parent = (self.folder / path).parent
        # Path.resolve raises where a link leads to itself, before Python 3.13.
        if not Path(os.path.realpath(parent)).is_relative_to(os.path.realpath(self.folder)):
            return "leads out of the folder"
        above = next((each for each in (parent, *parent.parents) if each.exists() or each.is_symlink()), parent)
        return None if above.is_dir() else f"lies below {above.name}, which is a file here"

    def decide(self, path: str, entry: Entry) -> How:
        """Says what becomes of the file at *path* that is here, if there is one."""
        file = self.folder / path
        try:
            found = file.lstat()
        except FileNotFoundError:
            return "new"
        if not stat.S_ISREG(found.st_mode):
            return "beside"
        digest = file_digest(file)
        if digest == entry.sha256:
            return "same"
        if file in self.sent:
            return "replaced" if self.sent[file].sha256 == digest else "beside"
        return "replaced" if found.st_mtime <= self.since else "beside"

    def beside(self, path: str) -> str:
        """Returns a name beside *path* that is free."""
        names = (f"{path}{BESIDE}{'' if number == 1 else number}" for number in range(1, 10_000))
        return next(name for name in names if not os.path.lexists(self.folder / name))


async def bring(head: Peer, tree: str, here: Here, wanted: Sequence[str] = ()) -> list[Brought]:
    """Writes the files of *tree*, those of *wanted* (lines as in a .gitignore) where that says some.

    Raises OSError, and `BlobsMissing` where the head does not have them any more.
    """
    digest, size = parse_name(tree)
    # It refuses paths that lead out.
    listing = Tree.loads(bytes(await transfer.fetch_bytes(head, digest, size)))
    lines = patterns.read(tuple(wanted))
    found = {path: entry for path, entry in listing.files.items() if not lines or patterns.meant(path, lines)}
    return [await _bring(head, f"{here.prefix}{path}", entry, here) for path, entry in found.items()]


async def _bring(head: Peer, path: str, entry: Entry, here: Here) -> Brought:
    if (why := here.refusal(path)) is not None:
        return Brought(path, entry.size, "refused", why)
    how = await asyncio.to_thread(here.decide, path, entry)
    if how == "same":
        return Brought(path, entry.size, how)
    place = here.beside(path) if how == "beside" else path
    await transfer.fetch_file(head, entry, here.folder / place)
    return Brought(place, entry.size, how, changed=path if how == "beside" else "")


def sentences(brought: Iterable[Brought], folder: Path) -> Iterator[str]:
    """Says what was brought to *folder*, a line for each kind."""
    brought = list(brought)
    written = [each for each in brought if each.how in ("new", "replaced", "beside")]
    if written:
        marks = {"replaced": ", replaced", "new": "", "beside": ""}
        names = [f"{shown(each.path)} ({in_words(each.size)}{marks[each.how]})" for each in written[:_NAMED]]
        if len(written) > _NAMED:
            rest = written[_NAMED:]
            names.append(f"{counted(len(rest), 'other file')} ({in_words(sum(each.size for each in rest))})")
        yield f"fetched to {folder}: {', '.join(names)}"
    for each in brought:
        if each.how == "beside":
            yield f"{shown(each.changed)} was changed here meanwhile and stays; the fetched one is {shown(each.path)}"
        elif each.how == "refused":
            yield f"{shown(each.path)} was not fetched: it {each.why}"
    if same := sum(each.how == "same" for each in brought):
        yield f"{counted(same, 'fetched file')} {'is' if same == 1 else 'are'} here already"


def check_patterns(lines: Sequence[str], field: str = "patterns") -> tuple[str, ...]:
    """*lines* of a .gitignore that say what is to be fetched. Raises `InvalidField`."""
    found = []
    for line in lines:
        text = line.strip().removeprefix("./")
        if not text.strip("!/") or text.startswith(("#", "/..", "..")):
            raise InvalidField(
                "names no files in the folder of the script",
                field=field,
                given=line,
                hint='As in a .gitignore: "*.csv" at any depth, "out/" a folder, "/model.pt" beside the script.',
            )
        found.append(text)
    return tuple(found)
