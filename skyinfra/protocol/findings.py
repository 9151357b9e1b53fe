"""Findings of `doctor` on a node: one `Finding` for each thing that it examined."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from skyinfra.errors import InvalidManifest
from skyinfra.protocol import _schema

# Unknown: it could not be looked at, which is no fault of the node.
Result = Literal["ok", "wrong", "unknown"]


@dataclass(frozen=True)
class Finding(_schema.Document, error=InvalidManifest, source="doctor"):
    """what was looked at; what was found and is wanted, in words; to_do: what makes it right, where that is needed."""

    what: str
    result: Result
    found: str
    wanted: str
    to_do: str = ""
