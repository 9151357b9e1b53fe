"""The file ``skyinfra.places.json`` beside cdktf.json: which of its places a pool has, and which have refused; and how
many nodes, where that is declared as a range and changes with an apply alone.

It is for version control: what is synthesized follows from the declaration and from this file alone. `skyinfra deploy`
writes it where a place refuses, `skyinfra scale` for another number of nodes; a person may, too.
"""

from __future__ import annotations

import fcntl
import json
import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from skyinfra.errors import InvalidField

NAME = "skyinfra.places.json"
_VERSION = 1


@dataclass(frozen=True)
class Refused:
    """A refusal by a place. at: when, ISO 8601 in UTC. cause: name of the exception. code, words: the cloud's own.

    where: what it is about, as far as the answer says: provider, region, zone, machine; a place that has all of these
    is refused with it.
    """

    place: str
    at: str
    cause: str
    where: Mapping[str, str]
    code: str = ""
    words: str = ""


@dataclass(frozen=True)
class Choice:
    """The place of a pool. first: that whose module is named like the pool, whatever is declared now. nodes: how many
    it has, of a range that is declared; None for the least."""

    place: str | None = None
    first: str | None = None
    refused: tuple[Refused, ...] = ()
    nodes: int | None = None

    def to_json(self) -> dict[str, Any]:
        """Returns what the file has of it."""
        refused = [asdict(each) for each in self.refused]
        found = {"place": self.place, "first": self.first, "refused": refused, "nodes": self.nodes}
        return {name: value for name, value in found.items() if value}


@dataclass(frozen=True)
class Choices:
    """The choices of a project by ``STACK/POOL``; *folder* is where its cdktf.json is."""

    folder: Path
    fleets: Mapping[str, Choice] = field(default_factory=dict)

    @classmethod
    def read(cls, folder: Path) -> Choices:
        """Returns those of the file in *folder*; none where there is no file. Raises `InvalidField`."""
        file = folder / NAME
        try:
            document = json.loads(file.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return cls(folder)
        except (OSError, ValueError) as error:
            raise _wrong(file, f"cannot be read: {error}") from None
        if not isinstance(document, dict) or document.get("version") != _VERSION:
            raise _wrong(file, f"is no file of version {_VERSION}")
        try:
            return cls(folder, {name: _choice(given) for name, given in dict(document.get("fleets", {})).items()})
        except (TypeError, ValueError, AttributeError) as error:
            raise _wrong(file, f"is damaged: {error}") from None

    def of(self, fleet: str) -> Choice:
        """Returns the choice for a fleet; an empty one where there is none."""
        return self.fleets.get(fleet, Choice())

    def having(self, fleet: str, choice: Choice) -> Choices:
        """Returns what the file has now, with another choice for a *fleet*, after writing it; it goes where nothing is
        left. Other commands may have written meanwhile. Raises `InvalidField`."""
        with _alone(self.folder):
            return Choices.read(self.folder)._written(fleet, choice)

    def _written(self, fleet: str, choice: Choice) -> Choices:
        made = replace(self, fleets={**self.fleets, fleet: choice})
        kept = {name: each.to_json() for name, each in sorted(made.fleets.items()) if each != Choice()}
        file = self.folder / NAME
        if not kept:
            file.unlink(missing_ok=True)
            return made
        descriptor, part = tempfile.mkstemp(prefix=f".{NAME}.", dir=self.folder)
        try:
            with os.fdopen(descriptor, "w", encoding="utf-8") as stream:
                json.dump({"version": _VERSION, "fleets": kept}, stream, indent=2, sort_keys=True)
                stream.write("\n")
            Path(part).chmod(0o644)
            Path(part).replace(file)
        except BaseException:
            Path(part).unlink(missing_ok=True)
            raise
        return made

    def without(self, stack: str) -> None:
        """Forgets which places the pools of *stack* had, and how many nodes, as of a stack that is destroyed; not what
        has refused."""
        choices = self
        for fleet, choice in self.fleets.items():
            if fleet.startswith(f"{stack}/"):
                choices = choices.having(fleet, Choice(refused=choice.refused))


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Keeps other commands from writing the file in *folder*, as far as its file system has locks for folders."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _choice(given: Mapping[str, Any]) -> Choice:
    named = {name: given.get(name) for name in ("place", "first")}
    if any(not isinstance(value, str | None) for value in named.values()):
        raise TypeError("place and first are texts")
    nodes = given.get("nodes")
    if isinstance(nodes, bool) or not isinstance(nodes, int | None):
        raise TypeError("nodes is a whole number")
    return Choice(**named, refused=tuple(Refused(**each) for each in given.get("refused", ())), nodes=nodes)


def _wrong(file: Path, why: str) -> InvalidField:
    hint = "Mend it, or take the last one of version control. Without the file the first place of each pool counts."
    return InvalidField(why, field=str(file), hint=hint)
