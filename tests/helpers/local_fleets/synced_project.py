"""A project with a package and data, which tests sync to the nodes of a fleet."""

from __future__ import annotations

from pathlib import Path

LIBRARY = '''
import os
from pathlib import Path

import skyinfra as sky

VERSION = 1
_count = 0


class Thing:
    def __init__(self, x):
        self.x = x

    def __eq__(self, other):
        return type(other) is Thing and other.x == self.x


@sky.compute
def count():
    """How often this process has called it."""
    global _count
    _count += 1
    return _count


@sky.compute
def version():
    return VERSION


@sky.compute
def words():
    return sky.synced("data/vocab.txt").read_text(), (Path(__file__).resolve().parent / "beside.txt").read_text()


@sky.compute
def fail():
    raise LookupError("as it should")  # this line


@sky.cls
class Model:
    def __init__(self, start):
        self.total = start

    def add(self, thing):
        assert isinstance(thing, Thing)
        self.total += thing.x
        return self.total, VERSION


@sky.compute
def twice(thing):
    from shiny.deeper import double

    return Thing(double(thing.x)), count() > 0
'''


def write_library(root: Path, version: int) -> None:
    """Writes the package of the project in *root* in a *version*."""
    # Not the code of another test, whose modules the slots may still have.
    text = f"# {root}\n" + LIBRARY.replace("VERSION = 1", f"VERSION = {version}")
    (root / "src" / "shiny" / "__init__.py").write_text(text)


def make_project(root: Path, version: int = 1) -> None:
    """Makes the project in *root*."""
    package = root / "src" / "shiny"
    package.mkdir(parents=True)
    write_library(root, version)
    (package / "deeper.py").write_text("def double(x):\n    return 2 * x\n")
    (package / "beside.txt").write_text("beside 1")
    (root / "data").mkdir()
    (root / "data" / "vocab.txt").write_text("words 1")
