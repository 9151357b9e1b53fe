"""The cloud of the bed: a folder with a file for each resource that stands, which tests read and change.

``TYPE.N.json`` is a resource. A test that deletes the file takes the resource away behind Terraform's back, one that
writes it changes it. ``answers.json`` has what the cloud says of a type, ``failures.json`` what it refuses.
"""

from __future__ import annotations

import itertools
import json
import os
import zlib
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Failure:
    """What is refused, and how often: ``on`` create, update, delete or read of the ``resource`` type ``where`` it has
    these values; ``gone``: on the read of one that does not stand any more.

    A create that fails leaves ``nothing``, the resource ``tainted`` in the state, or one ``outside`` of the state.
    """

    on: str
    resource: str
    says: str
    where: dict[str, Any] = field(default_factory=dict)
    leaves: str = "nothing"
    times: int = 1_000_000


@dataclass(frozen=True)
class World:
    folder: Path

    def answer(self, kind: str, gives: dict[str, Any], where: dict[str, Any] | None = None) -> None:
        """What the cloud says of a type, or of a data source (``data.TYPE``), ``where`` that was declared."""
        given = self._read("answers.json", [])
        self._write("answers.json", [*given, {"kind": kind, "where": where or {}, "gives": gives}])

    def fail(self, *failures: Failure) -> None:
        """From now on these, and only these."""
        for each in self.folder.glob("failed.*"):
            each.unlink()
        self._write("failures.json", [asdict(each) for each in failures])

    def answers(self, kind: str, value: dict[str, Any]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for each in self._read("answers.json", []):
            if each["kind"] == kind and _like(value, each["where"]):
                found |= each["gives"]
        return found

    def failure(self, on: str, kind: str, value: dict[str, Any]) -> Failure | None:
        """What refuses this now; counted."""
        for number, each in enumerate(self._read("failures.json", [])):
            found = Failure(**each)
            if (found.on, found.resource) != (on, kind) or not _like(value, found.where):
                continue
            if any(self._taken(f"failed.{number}.{count}") for count in range(min(found.times, 1000))):
                return found
        return None

    def make(self, kind: str) -> int:
        """A number that no other resource of the type has, in this world or before."""
        for n in itertools.count(1):
            if self._taken(f"made.{kind}.{n}"):
                return n
        raise AssertionError

    def path(self, kind: str, n: int) -> Path:
        return self.folder / f"{kind}.{n}.json"

    def get(self, kind: str, n: int) -> dict[str, Any] | None:
        found: dict[str, Any] | None = self._read(self.path(kind, n).name, None)
        return found

    def put(self, kind: str, n: int, value: dict[str, Any], config: dict[str, Any]) -> None:
        self._write(f"asked.{kind}.{n}", config)
        self._write(self.path(kind, n).name, value)

    def asked(self, kind: str) -> list[dict[str, Any]]:
        """How each resource of a type that stands was declared, with what its state hides."""
        return [self._read(f"asked.{name.removesuffix('.json')}", {}) for name in self.existing(kind)]

    def remove(self, kind: str, n: int) -> None:
        self.path(kind, n).unlink(missing_ok=True)

    def existing(self, kind: str = "*") -> dict[str, dict[str, Any]]:
        """All resources that stand, of one type or of all, by the names of their files."""
        return {path.name: json.loads(path.read_text()) for path in sorted(self.folder.glob(f"{kind}.*.json"))}

    def _taken(self, name: str) -> bool:
        try:
            os.close(os.open(self.folder / name, os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return False
        return True

    def _read(self, name: str, otherwise: Any) -> Any:
        try:
            return json.loads((self.folder / name).read_text())
        except FileNotFoundError:
            return otherwise

    def _write(self, name: str, content: Any) -> None:
        new = self.folder / f"new.{name}.{os.getpid()}.{id(content)}"
        new.write_text(json.dumps(content, indent=1))
        new.replace(self.folder / name)


def _like(value: dict[str, Any], where: dict[str, Any]) -> bool:
    return all(value.get(name) == each for name, each in where.items())


def number(kind: str, config: dict[str, Any]) -> int:
    """The number of what a data source finds: the same for the same question."""
    return zlib.crc32(json.dumps([kind, config], sort_keys=True, default=repr).encode()) % 9999 + 1
