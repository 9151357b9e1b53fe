"""The rooms that travel to nodes, and which code this process runs."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from functools import cache
from importlib import metadata
from pathlib import Path

import skyinfra

ROOMS = (
    "blobs",
    "buckets",
    "desired",
    "doctor",
    "drain",
    "elastic",
    "engine",
    "errors",
    "first_boot",
    "gpu",
    "head",
    "hours",
    "idle",
    "mig",
    "node",
    "program",
    "protocol",
    "readings",
    "runner",
    "syntax",
    "tasks",
    "worker",
)
_PACKAGE = Path(skyinfra.__file__).parent
_FILES = ("__init__.py", "py.typed")
# The units of systemd among them, in skyinfra/node/units.
_SUFFIXES = (".py", ".json", ".service", ".path")


def sources() -> Iterator[tuple[str, bytes]]:
    """Yields the name in an archive and the content of every file that travels, in order."""
    paths = [_PACKAGE / name for name in _FILES]
    for room in ROOMS:
        paths += [path for path in (_PACKAGE / room).rglob("*") if path.suffix in _SUFFIXES]
    for path in sorted(paths):
        yield f"skyinfra/{path.relative_to(_PACKAGE).as_posix()}", path.read_bytes()


def digest(files: Iterator[tuple[str, bytes]] | None = None) -> str:
    """Returns the SHA-256 of *files*, by default of `sources`, with their names."""
    found = hashlib.sha256()
    for name, data in files or sources():
        found.update(f"{name}\0{len(data)}\0".encode() + data)
    return found.hexdigest()


@cache
def version() -> str:
    """Returns the version of the runner that this process is: ``0.1.0+3f9a62c01b7d``.

    A wheel of `skyinfra.bootstrap.runner_wheel` says its own; of an installation it is made from the code, as it is
    when this is called first.
    """
    try:
        installed = metadata.version("skyinfra")
    except metadata.PackageNotFoundError:
        installed = skyinfra.__version__
    return installed if "+" in installed else f"{skyinfra.__version__}+{digest()[:12]}"
