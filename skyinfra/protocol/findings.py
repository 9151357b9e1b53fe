"""What `doctor` finds on a node: one `Finding` for each thing that it looked at."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from skyinfra.errors import InvalidManifest
from skyinfra.protocol import _schema

# Unknown: it could not be looked at, which is no fault of the node.
Result = Literal["ok", "wrong", "unknown"]


@dataclass(frozen=True)
class Finding:
    """what was looked at; what was found and is wanted, in words; to_do: what makes it right, where that is needed."""

    what: str
    result: Result
    found: str
    wanted: str
    to_do: str = ""

    @classmethod
    def read(cls, value: object, *, source: str = "doctor") -> Finding:
        """The inverse of `to_json`. Raises `InvalidManifest`."""
        return _schema.read(cls, value, path=source, error=InvalidManifest)

    def to_json(self) -> dict[str, object]:
        """Plain JSON values."""
        return _schema.write(self)
