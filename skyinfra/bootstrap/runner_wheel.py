"""The runner as a wheel of the running code: the nodes of a fleet get exactly the code that deployed it first.

The wheel holds the rooms that travel (`runner`, `first_boot`, `mig`, `protocol` and the exceptions) and the decorators
that modules of tasks use, and needs what they need, in the versions of this release, with the hashes of their files:
nodes install nothing else, whatever the machine has that deploys them. The same code gives the same bytes on every
machine, because nothing in the archive is compressed: zlib's versions differ in what they make.
"""

from __future__ import annotations

import base64
import bz2
import hashlib
import io
import re
import zipfile
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from pathlib import Path

import skyinfra
from skyinfra import syntax
from skyinfra.bootstrap import program
from skyinfra.errors import VersionMismatch
from skyinfra.node import code

# The imports of the rooms that travel besides the standard library, and those with the same version on both sides.
NEEDS = ("cloudpickle", "cryptography", "distributed", "nvidia-ml-py")
_SAME = ("cloudpickle", "dask", "distributed", "msgpack")
# A client with another version of it is refused by `skyinfra.connect`.
_REFUSED = "distributed"
_PYTHON = ">=3.11"
# Beside this file, and beside the metadata of the wheel.
REQUIREMENTS = "requirements.txt"
_TIME = (1980, 1, 1, 0, 0, 0)
_MODE = 0o644 << 16


@dataclass(frozen=True)
class Wheel:
    """A wheel: its file ``name``, ``content`` and the ``sha256`` of that. version: after a plus it says which code."""

    name: str
    version: str
    content: bytes
    sha256: str


@cache
def wheel() -> Wheel:
    """Returns the runner of this installation of skyinfra."""
    files = dict(code.sources())
    needs = sorted({f"{name}=={release()[name]}" for name in (*_SAME, *NEEDS)})
    known = _hashes()
    digest = code.digest(iter([*files.items(), ("needs", "\n".join(needs).encode() + known)]))
    version = f"{skyinfra.__version__}+{digest[:12]}"
    info = f"skyinfra-{version}.dist-info"
    files[f"{info}/METADATA"] = _metadata(version, needs)
    files[f"{info}/WHEEL"] = b"Wheel-Version: 1.0\nGenerator: skyinfra\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    files[f"{info}/{REQUIREMENTS}"] = known
    files[f"{info}/entry_points.txt"] = b"[console_scripts]\nskyinfra-runner = skyinfra.runner.__main__:main\n"
    files[f"{info}/RECORD"] = _record(files, f"{info}/RECORD")
    content = _archive(files)
    return Wheel(f"skyinfra-{version}-py3-none-any.whl", version, content, hashlib.sha256(content).hexdigest())


def compressed(made: Wheel) -> bytes:
    """The content of the wheel *made*, compressed: other bytes where zlib is another, for files that people carry."""
    stream = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(made.content)) as plain, zipfile.ZipFile(stream, "w") as archive:
        for entry in plain.infolist():
            archive.writestr(entry, plain.read(entry), zipfile.ZIP_DEFLATED, 9)
    return stream.getvalue()


@cache
def packed(made: Wheel) -> tuple[str, bytes]:
    """Returns the name and the content of a file that is a sixth of the wheel *made*, the same on every machine.

    It is the wheel without docstrings, compressed. Each line stays where it is, for tracebacks.
    """
    with zipfile.ZipFile(io.BytesIO(made.content)) as plain:
        files = {entry.filename: plain.read(entry) for entry in plain.infolist()}
    *_, record = files
    del files[record]
    files = {name: _bare(data) if name.endswith(".py") else data for name, data in files.items()}
    return f"{made.name}.bz2", bz2.compress(_archive({**files, record: _record(files, record)}))


def _bare(source: bytes) -> bytes:
    lines = source.splitlines(keepends=True)
    for node in program.docstrings(syntax.parsed(source)):
        end = node.end_lineno or node.lineno
        lines[node.lineno - 1 : end] = [b"\n"] * (end - node.lineno + 1)
    return b"".join(lines)


@cache
def release() -> dict[str, str]:
    """Returns the versions of the packages that nodes get, by name: those that this release was tested with."""
    return dict(re.findall(r"(?m)^([a-z0-9-]+)==([^\s;]+)", _hashes().decode()))


def pins() -> tuple[str, ...]:
    """Returns the requirements of which client and workers have the same versions: ``cloudpickle==3.1.2``, ..."""
    return tuple(f"{name}=={release()[name]}" for name in _SAME)


def differing() -> dict[str, tuple[str | None, str]]:
    """Returns the packages of `pins` of which this machine has another version: its own, or None, and the nodes'."""
    found = {name: (version_of(name), release()[name]) for name in _SAME}
    return {name: both for name, both in found.items() if both[0] != both[1]}


def check_client() -> None:
    """Raises `VersionMismatch` where this machine deploys nodes that it can run no tasks on."""
    here, there = differing().get(_REFUSED, (None, None))
    if there is not None:
        raise VersionMismatch(
            f"the nodes get {_REFUSED} {there}, with which this skyinfra was tested, and this client has {here}",
            hint=f"pip install '{_REFUSED}=={there}' 'dask=={release()['dask']}'",
        )


@cache
def _hashes() -> bytes:
    return Path(__file__).with_name(REQUIREMENTS).read_bytes()


@cache
def version_of(name: str) -> str | None:
    """Returns the version of a package that is installed here; None where there is none."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _metadata(version: str, needs: list[str]) -> bytes:
    lines = ["Metadata-Version: 2.1", "Name: skyinfra", f"Version: {version}", f"Requires-Python: {_PYTHON}"]
    lines += [f"Requires-Dist: {need}" for need in needs]
    return ("\n".join(lines) + "\n").encode()


def _record(files: dict[str, bytes], own: str) -> bytes:
    rows = []
    for name, data in files.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
        rows.append(f"{name},sha256={digest},{len(data)}")
    return ("\n".join([*rows, f"{own},,"]) + "\n").encode()


def _archive(files: dict[str, bytes]) -> bytes:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", zipfile.ZIP_STORED) as archive:
        for name, data in files.items():
            entry = zipfile.ZipInfo(name, _TIME)
            entry.external_attr = _MODE
            entry.create_system = 3  # Unix, wherever this runs
            archive.writestr(entry, data)
    return stream.getvalue()
