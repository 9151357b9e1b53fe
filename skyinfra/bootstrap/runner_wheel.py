"""The runner as a wheel of the running code: the nodes of a fleet get exactly the code that deployed it first.

The wheel holds the rooms that travel (`runner`, `first_boot`, `mig`, `protocol` and the exceptions) and the decorators
that modules of tasks use, and needs what they need, in the versions that this machine has: client and workers pickle
for each other. Where their files' hashes are known, nodes install
nothing else. The same code gives the same bytes on every machine, because nothing in the archive is compressed: zlib's
versions differ in what they make.
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
from skyinfra.errors import MissingDependency
from skyinfra.node import code

# The imports of the rooms that travel besides the standard library, and those with the same version on both sides.
NEEDS = ("cloudpickle", "cryptography", "distributed", "nvidia-ml-py")
_SAME = ("cloudpickle", "dask", "distributed", "msgpack")
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
    """The runner of this installation of skyinfra. Raises `MissingDependency` where the versions are not known."""
    files = dict(code.sources())
    needs = sorted({f"{name}=={version_of(name)}" for name in (*_SAME, *NEEDS)})
    known = hashed() or b""
    digest = code.digest(iter([*files.items(), ("needs", "\n".join(needs).encode() + known)]))
    version = f"{skyinfra.__version__}+{digest[:12]}"
    info = f"skyinfra-{version}.dist-info"
    files[f"{info}/METADATA"] = _metadata(version, needs)
    files[f"{info}/WHEEL"] = b"Wheel-Version: 1.0\nGenerator: skyinfra\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    if known:
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
    """Name and content of the wheel *made* as a file that is a quarter of it: the same bytes on every machine."""
    return f"{made.name}.bz2", bz2.compress(made.content)


@cache
def hashed() -> bytes | None:
    """The requirements of the runner, all of them with the hashes of their files; None where other versions of them
    are installed here than those whose hashes are known."""
    here = {f"{name}=={version_of(name)}" for name in (*_SAME, *NEEDS)}
    return _hashes().encode() if here == set(known_versions()) else None


def known_versions() -> tuple[str, ...]:
    """Returns the requirements whose hashes are known, and theirs: ``cloudpickle==3.1.2``, ..."""
    wanted = "|".join(sorted({*_SAME, *NEEDS}))
    return tuple(re.findall(rf"(?m)^(?:{wanted})==[^\s;]+", _hashes()))


@cache
def _hashes() -> str:
    return Path(__file__).with_name(REQUIREMENTS).read_text(encoding="utf-8")


def pins() -> tuple[str, ...]:
    """Returns the requirements of which client and workers have the same versions: ``cloudpickle==3.1.2``, ..."""
    return tuple(f"{name}=={version_of(name)}" for name in _SAME)


@cache
def version_of(name: str) -> str:
    """Returns the version of a package that is installed here. Raises `MissingDependency`."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        raise MissingDependency(f"{name} is not installed", hint=f"pip install {name}") from None


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
