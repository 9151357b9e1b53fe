"""The import table of the design: which room may import which."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parent.parent / "skyinfra"

# room -> rooms it may import. The exception tree (_errors) may be imported by all.
ALLOWED: dict[str, set[str]] = {
    "_ahead": {"compiler", "pool", "providers", "stack"},
    "_errors": set(),
    "_declared": set(),
    "_embedded_terraform": set(),
    "bundled": set(),
    "carrier": set(),
    "expressions": set(),
    "mig": set(),
    "first_boot": set(),
    "protocol": set(),
    "runner": {"first_boot", "mig", "protocol"},
    "accelerators": {"mig"},
    "offers": {"accelerators"},
    "providers": {"offers", "accelerators", "mig", "_declared"},
    "plugins": {"accelerators", "mig", "protocol"},
    "pool": {"providers", "accelerators", "plugins", "_declared"},
    "packing": {"offers", "accelerators", "mig", "pool", "providers"},
    "compiler": {"pool", "plugins", "providers", "offers", "accelerators", "mig", "protocol"},
    "bootstrap": {"carrier", "compiler", "first_boot", "mig", "protocol", "bundled"},
    "backends": {"_declared"},
    "stack": {"carrier", "compiler", "bootstrap", "backends", "pool", "bundled", "expressions"},
    "cost": {"offers"},
    "cloud_errors": set(),
    "terraform_text": set(),
    "terraform": {"cloud_errors", "terraform_text"},
    "project": {"terraform", "protocol", "expressions"},
    "next_steps": {"cloud_errors", "offers", "project", "providers"},
    "preflight": {"cloud_errors", "offers", "project", "providers"},
    "reporting": {"terraform_text"},
    "client": {"first_boot", "protocol", "terraform", "project"},
    "deploy": {
        "stack",
        "backends",
        "compiler",
        "pool",
        "client",
        "next_steps",
        "project",
        "reporting",
        "terraform",
    },
}
# The declaration may be used as the whole program (`with sky.ComputePool(...)`), so it reaches up when it is entered.
# Packing is declared beside the rest of MIG (`sky.mig.pack`), but needs offers and a solver, which no node has.
LATE = {("pool", "deploy"), ("pool", "client"), ("mig", "packing")}
# What travels to a node may use these and the standard library.
TRAVELS = {"first_boot", "mig", "protocol", "runner", "_errors"}
ON_NODES = {"distributed", "dask", "tblib", "tornado", "cloudpickle", "cryptography", "pynvml"}


def room(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imports(path: Path) -> Iterator[tuple[str, bool]]:
    """(module, whether at the top level) of every import, those for type checkers included."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    top = {id(node) for node in tree.body}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, id(node) in top) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            if room(path) == "first_boot" and node.level == 1:
                # It runs as a package of its own.
                yield "skyinfra.first_boot", id(node) in top
                continue
            assert node.level == 0, f"{path}: relative import"
            assert node.module is not None
            if node.module == "skyinfra":
                yield from ((f"skyinfra.{alias.name}", id(node) in top) for alias in node.names)
            else:
                yield node.module, id(node) in top


SOURCES = sorted(path for path in PACKAGE.rglob("*.py") if "_bundled" not in path.parts)


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_rooms_import_only_what_the_table_allows(path: Path) -> None:
    here = room(path)
    for module, at_top in imports(path):
        parts = module.split(".")
        if parts[0] != "skyinfra":
            if here in TRAVELS:
                assert parts[0] in sys.stdlib_module_names | ON_NODES, f"{here} travels to nodes; {parts[0]} does not"
            if here in ("mig", "first_boot"):
                assert parts[0] in sys.stdlib_module_names
            continue
        there = parts[1] if len(parts) > 1 else "__init__"
        # The package itself is lazy: importing it brings nothing with it.
        if here in ("__init__", "cli") or there in (here, "_errors", "__init__"):
            continue
        if (here, there) in LATE:
            assert not at_top, f"{here} may import {there} only when it is entered"
            continue
        assert there in ALLOWED[here], f"{here} must not import {there}"


def test_every_room_is_in_the_table() -> None:
    assert {room(path) for path in SOURCES} <= set(ALLOWED) | {"__init__", "cli"}


def test_only_stack_knows_the_cdk_libraries() -> None:
    for path in SOURCES:
        found = {module.split(".")[0] for module, _ in imports(path)} & {"cdktf", "cdktn", "constructs", "jsii"}
        assert not found, f"{path} imports {found}"


def test_every_room_stands_in_the_house_of_contributing() -> None:
    text = (PACKAGE.parent / "CONTRIBUTING.md").read_text(encoding="utf-8")
    rows = [line.split("|")[1] for line in text.splitlines() if line.startswith("| `")]
    named = {name.rstrip("/") for row in rows for name in re.findall(r"`([\w/]+)`", row)}
    assert named == {*ALLOWED, "cli"}
