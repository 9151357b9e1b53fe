"""The file ``desired-layout.json`` of a node: what its runner knows of the desired layout, and what it asks of root.

Three files hold the layout of a node, and each has one writer:

- ``declared-layout``, the text that the provider's metadata has for it: ``skyinfra-watch``, on the head. Without the
  file the node configuration says what is declared.
- ``desired-layout.json``: the runner, here.
- ``actual-layout.json``: root, which partitions, see `skyinfra.gpu.record`.

Where the runner is not root, tasks may write its file too. So root takes nothing from it but layouts, each of which it
checks, and the request to make them. A new request starts root's part, by a path unit of systemd.

Runners of the version before kept the same in four files. They count as long as they are newer than this one, which a
runner of this version makes of them in one step as soon as it starts, and they stay for a node that goes back.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from skyinfra.errors import InvalidNodeConfig
from skyinfra.mig import Layout
from skyinfra.node.folder import NodeDirectory, message, newer, replace_file
from skyinfra.protocol import _schema, fleet
from skyinfra.protocol.fleet import FleetLayout

VERSION = 1
# Of the version before: the declared layout, the last one of the fleet, what the head chose, and the places.
_BEFORE = ("desired.json", "told.json", "followed.json", "placed.json")
# The parts of a runner that write it are in several threads.
_WRITING = threading.Lock()


@dataclass(frozen=True)
class DesiredFile(_schema.Document, error=InvalidNodeConfig, source="desired-layout.json", version=VERSION):
    """The content of the file.

    declared: on the head, the layout that the provider's metadata declared last; None: that of the node configuration.
    fleet: the last layout of the fleet that counted, and config_sha256 the digest of the node configuration of that
    time. by_node: on a head whose layouts follow the work, those that it chose, see `FleetLayout.by_node`. places: for
    each GPU its desired partitions in the places that were chosen, see `skyinfra.gpu.targets`. request: the name of the
    last request to root to partition; empty where there was none.
    """

    version: int = VERSION
    declared: FleetLayout | None = None
    config_sha256: str = ""
    fleet: FleetLayout | None = None
    by_node: dict[str, tuple[str, ...]] = field(default_factory=dict)
    places: tuple[Layout, ...] = ()
    request: str = ""

    def _check(self, source: str) -> None:
        for name in ("declared", "fleet"):
            layout = getattr(self, name)
            version = layout.version if layout is not None else fleet.VERSION
            self._refuse(version != fleet.VERSION, "another version than can be read here", f"{source}.{name}", version)


def read(directory: NodeDirectory) -> DesiredFile:
    """Returns the content of the file, empty without one. Raises `InvalidNodeConfig` where it cannot be read."""
    if _before_counts(directory):
        return _before(directory)
    if not os.path.lexists(directory.desired_file):
        return DesiredFile()
    return DesiredFile.load(directory.desired_file, text_of=message)


def update(directory: NodeDirectory, *, again: bool = False, **fields: Any) -> None:
    """Replaces the *fields* of the file, atomically and durably; one that cannot be read is made anew.

    It is not written where nothing changes, unless *again*. Only the runner may do that. Raises `StateDirectoryError`.
    """
    with _WRITING:
        try:
            found = read(directory)
        except InvalidNodeConfig:
            found, again = DesiredFile(), True
        text = _text(replace(found, **fields))
        if again or text != _text(found) or _before_counts(directory):
            replace_file(directory.desired_file, text, durable=True)


def _text(content: DesiredFile) -> str:
    return json.dumps(content.to_json()) + "\n"


def _before_counts(directory: NodeDirectory) -> bool:
    """Returns whether a runner of the version before has written its files since this one, or it never was."""
    return any(newer(directory.path / name, directory.desired_file) for name in _BEFORE)


def _before(directory: NodeDirectory) -> DesiredFile:
    """Reads the files of the version before; those that cannot be read count as missing."""
    declared, received, selected, placed = (directory.path / name for name in _BEFORE)
    found: dict[str, Any] = {}
    for part in (_declared(declared), _received(received), _selected(selected), _placed(placed)):
        with contextlib.suppress(InvalidNodeConfig):
            found |= dict(part)
    return DesiredFile(**found)


def _declared(file: Path) -> Iterator[tuple[str, object]]:
    yield "declared", FleetLayout.load(file, text_of=message)


def _received(file: Path) -> Iterator[tuple[str, object]]:
    received = _Received.load(file, text_of=message)
    if received.layout.version == fleet.VERSION:
        yield "config_sha256", received.config_sha256
        yield "fleet", received.layout


def _selected(file: Path) -> Iterator[tuple[str, object]]:
    yield "by_node", _Selected.load(file, text_of=message).by_node


def _placed(file: Path) -> Iterator[tuple[str, object]]:
    yield "places", _Placed.load(file, text_of=message).layouts


@dataclass(frozen=True)
class _Received(_schema.Document, error=InvalidNodeConfig, source="told.json", version=1):
    version: int
    config_sha256: str
    layout: FleetLayout


@dataclass(frozen=True)
class _Selected(_schema.Document, error=InvalidNodeConfig, source="followed.json", version=1):
    version: int
    by_node: dict[str, tuple[str, ...]] = field(default_factory=dict)


@dataclass(frozen=True)
class _Placed(_schema.Document, error=InvalidNodeConfig, source="placed.json", version=1):
    version: int
    layouts: tuple[Layout, ...] = ()
