"""Writes skyinfra/bootstrap/requirements.txt anew: what the runner needs, in the versions of constraints.txt, with the
SHA-256 of every file for Linux that the index has of them: ``python -m tools.runner_requirements``.

The index is the one that pip takes by default, or that is named by PIP_INDEX_URL.
"""

from __future__ import annotations

import datetime
import json
import os
import re
import urllib.request
from importlib import metadata
from pathlib import Path

from packaging.markers import Marker
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from pip._internal.models.index import PyPI

from skyinfra.bootstrap import runner_wheel

# The Pythons that a node may have.
PYTHONS = ("3.11", "3.12", "3.13", "3.14")
_TAG = re.compile(
    r"-(py3|py2\.py3|cp3\d+)-(none|abi3|cp31[1-4])-(any|[\w.]*linux[\w.]*_(x86_64|aarch64)(\.[\w.]+)?)\.whl$"
)
_JSON = {"Accept": "application/vnd.pypi.simple.v1+json"}


def closure() -> dict[str, str | None]:
    """The packages that the runner needs, and for which Pythons: a marker, or None for all."""
    wanted = {python: _of(python) for python in PYTHONS}
    names = sorted(set().union(*wanted.values()))
    return {name: _marker([python for python in PYTHONS if name in wanted[python]]) for name in names}


def _of(python: str) -> set[str]:
    environment = {
        "python_version": python,
        "python_full_version": f"{python}.0",
        "sys_platform": "linux",
        "platform_system": "Linux",
        "implementation_name": "cpython",
        "platform_python_implementation": "CPython",
        "extra": "",
    }
    found: set[str] = set()
    left = [canonicalize_name(name) for name in runner_wheel.NEEDS]
    while left:
        name = left.pop()
        if name in found:
            continue
        found.add(name)
        for text in metadata.requires(name) or ():
            need = Requirement(text)
            if need.marker is None or Marker(str(need.marker)).evaluate(environment):
                left.append(canonicalize_name(need.name))
    return found


def _marker(pythons: list[str]) -> str | None:
    if len(pythons) == len(PYTHONS):
        return None
    after = PYTHONS[PYTHONS.index(pythons[-1]) + 1]
    assert pythons == list(PYTHONS[: len(pythons)]), pythons  # noqa: S101 - older Pythons need what newer ones have
    return f'python_version < "{after}"'


def hashes(name: str, version: str) -> list[str]:
    """The SHA-256 of the files of a release that a node may install."""
    index = os.environ.get("PIP_INDEX_URL", PyPI.simple_url).rstrip("/")
    request = urllib.request.Request(f"{index}/{name}/", headers=_JSON)  # noqa: S310
    with urllib.request.urlopen(request, timeout=60) as answer:  # noqa: S310
        files = json.load(answer)["files"]
    called = "[-_.]".join(map(re.escape, name.split("-")))
    of_release = re.compile(rf"{called}-{re.escape(version)}(-|\.tar\.gz$)", re.IGNORECASE)
    found = [
        each["hashes"]["sha256"]
        for each in files
        if of_release.match(file := each["filename"]) and (file.endswith(".tar.gz") or _TAG.search(file))
    ]
    if not found:
        raise SystemExit(f"the index has no file of {name} {version}")
    return sorted(found)


def text() -> str:
    """The content of the file."""
    lines = [
        "# What the runner needs, with the SHA-256 of the files of each release on the index of Python packages.",
        f"# Written by `python -m tools.runner_requirements`, {datetime.date.today().isoformat()}.",
    ]
    for name, marker in closure().items():
        version = metadata.version(name)
        need = f"{name}=={version}" + (f" ; {marker}" if marker else "")
        lines.append(" \\\n    ".join([need, *(f"--hash=sha256:{each}" for each in hashes(name, version))]))
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    Path(runner_wheel.__file__).with_name("requirements.txt").write_text(text(), encoding="utf-8")
