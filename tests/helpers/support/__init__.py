"""The checkout that the tests run in, its path for other processes, and parts that this machine lacks."""

from __future__ import annotations

import io
import os
import tarfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[3]


def module_source(name: str) -> str:
    """The source of the module *name* for a root anywhere. Its siblings come with it: what stands before // does."""
    return f"{ROOT}/modules//{name}"


def python_path(*folders: Path) -> str:
    """PYTHONPATH of a process that is to import what this one does, and what is in *folders*."""
    return os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), str(ROOT), *map(str, folders)]))


def missing(what: str) -> None:
    """A part that a test needs is not here: a failure under CI, a skip elsewhere."""
    if os.environ.get("CI"):
        pytest.fail(f"{what} is missing on this machine", pytrace=False)
    pytest.skip(f"{what} is missing on this machine")


def first_fast(values: Iterable[Any], count: int = 1) -> list[Any]:
    """Parameters of a test whose kind the first *count* hold: the others are slow."""
    return [
        value
        if number < count
        else pytest.param(*(value if isinstance(value, tuple) else [value]), marks=pytest.mark.slow)
        for number, value in enumerate(values)
    ]


def unpack(archive: bytes, folder: Path) -> None:
    """Puts the files of the tar *archive* into *folder*."""
    with tarfile.open(fileobj=io.BytesIO(archive)) as found:
        # Python before 3.11.4 has no filters.
        found.extraction_filter = getattr(tarfile, "data_filter", None)
        found.extractall(folder)
