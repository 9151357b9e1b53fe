"""The ``[preflight]`` tables of providers: those of the data files, and of tables/ for providers that have none yet."""

from __future__ import annotations

import shutil
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from support import ROOT

from skyinfra import providers
from skyinfra.providers import data

TABLES = ROOT / "tests" / "preflight" / "tables"
_BEGINNING = """
[about]
called = "{kind}"
nodes = "machines"
head = "its address"
tested = "in tests"

[boot]
form = "cloud-config"
delivery = "ssh"
source = "tests"
date = "2026-11-24"

[traits]
layout_channel = "client"
partitioned_by = "tenant"
node_to_node = true
groups = false
spot = "no"
ssh_user = "root"
source = "tests"
date = "2026-11-24"

"""


@contextmanager
def all_tables(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Every provider of tables/ has a data file with a ``[preflight]``: its own, or one that is made in *folder*."""
    for path in data._FOLDER.glob("*.toml"):
        shutil.copyfile(path, folder / path.name)
    for table in TABLES.glob("*.toml"):
        file = folder / table.name
        text = file.read_text() if file.exists() else _BEGINNING.format(kind=table.stem)
        if "preflight" not in tomllib.loads(text):
            file.write_text(f"{text}\n{table.read_text()}")
    monkeypatch.setattr(data, "_FOLDER", folder)
    _forget()
    try:
        yield
    finally:
        monkeypatch.undo()
        _forget()


def _forget() -> None:
    for cached in (data.read, data.kinds, providers.deployable):
        cached.cache_clear()
