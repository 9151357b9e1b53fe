"""The house: which room may import which, no circles, no room too large; see tools/house.py. And that of the tests."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tools import house

PACKAGE = house.PACKAGE

# room -> rooms it may import, lazily and for type checkers included. The exceptions may be imported by all.
ALLOWED: dict[str, set[str]] = {
    "errors": set(),
    "declared": set(),
    "syntax": set(),
    "first_boot": set(),
    # travels to nodes
    "mig": set(),
    "buckets": set(),
    "protocol": {"mig"},
    "engine": {"protocol"},
    "node": {"protocol"},
    "blobs": {"engine", "protocol"},
    "program": {"blobs", "protocol"},
    "worker": {"blobs", "buckets", "engine", "node", "program", "protocol"},
    "tasks": {"blobs", "program", "protocol", "syntax", "worker"},
    "hours": {"drain", "node", "protocol"},
    "head": {"blobs", "engine", "hours", "idle", "mig", "node", "program", "protocol", "worker"},
    "desired": {"mig", "node", "protocol"},
    "gpu": {"desired", "first_boot", "mig", "node", "protocol"},
    "drain": {"first_boot", "node", "protocol"},
    "idle": {"drain", "first_boot", "node", "protocol"},
    "elastic": {"engine", "first_boot", "head", "idle", "mig", "node", "protocol", "worker"},
    "doctor": {"desired", "gpu", "mig", "node", "protocol"},
    "readings": {"gpu", "node", "protocol", "worker"},
    "runner": {
        "blobs",
        "desired",
        "doctor",
        "drain",
        "elastic",
        "engine",
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
        "worker",
    },
    # the declaration
    "accelerators": {"mig"},
    "offers": {"accelerators"},
    "providers": {"offers", "accelerators", "mig", "declared"},
    "plugins": {"accelerators", "mig", "protocol"},
    "pool": {"providers", "accelerators", "mig", "plugins", "protocol", "declared"},
    "packing": {"offers", "accelerators", "mig", "pool", "providers"},
    "recommendation": {"accelerators", "mig", "offers", "packing", "pool", "protocol", "providers"},
    "places": {"accelerators", "declared", "pool", "providers", "terraform"},
    "compiler": {"declared", "places", "pool", "plugins", "providers", "accelerators", "mig", "protocol"},
    "bootstrap": {"compiler", "first_boot", "mig", "node", "protocol", "providers", "syntax"},
    "terraform": {"buckets", "declared", "protocol", "providers"},
    "stack": {"declared", "compiler", "bootstrap", "places", "pool", "providers", "terraform"},
    "prewarm": {"compiler", "pool", "providers", "stack", "terraform"},
    # the client
    "notebook": {"accelerators", "mig", "protocol", "syntax"},
    "sync": {"blobs", "program", "protocol", "tasks"},
    "port_forward": {"protocol"},
    "console": set(),
    "folding": set(),
    "page": {"mig", "protocol"},
    "submission": {
        "console",
        "engine",
        "first_boot",
        "notebook",
        "port_forward",
        "protocol",
        "recommendation",
        "sync",
        "tasks",
        "worker",
    },
    "client": {
        "blobs",
        "engine",
        "node",
        "notebook",
        "page",
        "protocol",
        "submission",
        "sync",
        "tasks",
        "terraform",
        "worker",
    },
    "magic": {"blobs", "client", "notebook", "tasks"},
    "preflight": {"accelerators", "buckets", "offers", "providers", "terraform"},
    "ssh": {"protocol"},
    "deploy": {
        "accelerators",
        "bootstrap",
        "client",
        "compiler",
        "console",
        "folding",
        "mig",
        "node",
        "offers",
        "pool",
        "protocol",
        "providers",
        "stack",
        "submission",
        "terraform",
    },
    "failover": {
        "client",
        "declared",
        "deploy",
        "offers",
        "places",
        "preflight",
        "providers",
        "submission",
        "terraform",
    },
    "terminal": {
        "accelerators",
        "client",
        "console",
        "deploy",
        "failover",
        "folding",
        "mig",
        "offers",
        "packing",
        "places",
        "preflight",
        "protocol",
        "providers",
        "terraform",
    },
}
# What travels to a node may use these and the standard library.
TRAVELS = {
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
}
ON_NODES = {"distributed", "dask", "msgpack", "tblib", "tornado", "cloudpickle", "cryptography", "pynvml"}
# For type checkers alone, which no node runs.
TYPES = {"typing_extensions"}

SOURCES = sorted(path for path in PACKAGE.rglob("*.py") if "_bundled" not in path.parts)


def room(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imports(path: Path) -> Iterator[str]:
    """The module of every import, lazy ones and those for type checkers included."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            if room(path) == "first_boot" and node.level == 1:
                # It runs as a package of its own.
                yield "skyinfra.first_boot"
                continue
            assert node.level == 0, f"{path}: relative import"
            assert node.module is not None
            if node.module == "skyinfra":
                yield from (f"skyinfra.{alias.name}" for alias in node.names)
            else:
                yield node.module


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_rooms_import_only_what_the_table_allows(path: Path) -> None:
    here = room(path)
    for module in imports(path):
        parts = module.split(".")
        if parts[0] != "skyinfra":
            if here in TRAVELS:
                known = sys.stdlib_module_names | ON_NODES | TYPES
                assert parts[0] in known, f"{here} travels to nodes; {parts[0]} does not"
            if here in ("mig", "first_boot"):
                assert parts[0] in sys.stdlib_module_names
            continue
        there = parts[1] if len(parts) > 1 else "__init__"
        # The package itself is the table of public names: lazy, and importing it brings nothing with it.
        if here in ("__init__", "cli") or there in (here, "errors", "__init__", "pack"):
            continue
        assert there in ALLOWED[here], f"{here} must not import {there}"
        assert here not in TRAVELS or there in TRAVELS, f"{here} travels to nodes; {there} does not"


@pytest.mark.parametrize("path", [path for path in SOURCES if room(path) in ("client", "tasks")], ids=str)
def test_the_client_takes_from_the_worker_what_runs_there_and_no_constant(path: Path) -> None:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    taken = {
        alias.asname or alias.name: f"{node.module}.{alias.name}"
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("skyinfra.worker")
        for alias in node.names
    }
    constants = [name for name in taken.values() if name.rpartition(".")[2].isupper()]
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.attr.isupper():
            constants += [f"{taken[name]}.{node.attr}" for name in [node.value.id] if name in taken]
    assert not constants, "what both ends know stands in protocol"


def test_every_room_uses_what_the_table_allows_it() -> None:
    used: dict[str, set[str]] = {name: set() for name in ALLOWED}
    for path in SOURCES:
        used.get(room(path), set()).update(module.split(".")[1] for module in imports(path) if "skyinfra." in module)
    assert not {name: spare for name, allowed in ALLOWED.items() if (spare := allowed - used[name])}


def test_every_room_is_in_the_table() -> None:
    assert {room(path) for path in SOURCES} == {*ALLOWED, "__init__", "cli"}


def test_the_table_has_no_circle() -> None:
    assert not house.circles({name: frozenset(there) for name, there in ALLOWED.items()})


def test_the_house_is_in_order() -> None:
    assert not house.read().problems()


def test_what_is_not_in_order_is_found(tmp_path: Path) -> None:
    package = tmp_path / "skyinfra"
    for name, text in {
        "__init__": "",
        "a/__init__": "",
        "a/x": "def f():\n    from skyinfra.b import y\n",
        "b/__init__": "",
        "b/y": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from ..a.x import f\n",
        "c": "import skyinfra.b.y\n",
    }.items():
        path = package / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    for number in range(house.MOST_FILES):
        (package / "b" / f"y{number}.py").write_text("")
    for number in range(house.MOST_FILES + 2):
        (package / "a" / f"z{number}.py").write_text("")
        (package / "a" / f"z{number}.toml").write_text("")
    found = "\n".join(house.read(package).problems())
    assert "the room a has" not in found
    assert "the rooms a and b import one another" in found
    assert "the modules skyinfra.a.x and skyinfra.b.y import one another" in found
    assert "the room b has 22 files, more than 20" in found
    assert re.search(r"the room c is 1\d\.\d% of the package, more than 12%", found)


def test_only_stack_knows_the_cdk_libraries() -> None:
    for path in SOURCES:
        found = {module.split(".")[0] for module in imports(path)} & {"cdktf", "cdktn", "constructs", "jsii"}
        assert not found, f"{path} imports {found}"


def test_the_runner_carries_every_room_that_travels() -> None:
    from skyinfra.node import code

    assert set(code.ROOMS) == TRAVELS


def test_every_room_stands_in_the_table_of_the_architecture() -> None:
    text = (PACKAGE.parent / "docs" / "architecture.md").read_text(encoding="utf-8")
    rows = [line.split("|")[1] for line in text.splitlines() if line.startswith("| `")]
    named = {name.rstrip("/") for row in rows for name in re.findall(r"`([\w/]+)`", row)}
    assert named == {*ALLOWED, "cli"}


def test_the_files_that_the_architecture_names_exist() -> None:
    text = (PACKAGE.parent / "docs" / "architecture.md").read_text(encoding="utf-8")
    named = re.findall(r"`([\w/]+(?:/|\.py))`", text)
    missing = [name for name in named if not (PACKAGE / name).exists() and not (PACKAGE.parent / name).exists()]
    assert named and not missing


# The tests: what several of them share stands in the packages of tests/helpers, and in the worlds beside it.
TESTS = PACKAGE.parent / "tests"
HELPERS = TESTS / "helpers"
SHARED = ("helpers", "fake_nvml", "mock_provider", "moto_ext")
# A statement of a module, or of a program in a text.
_IMPORTS_A_TEST = re.compile(r"^\s*(?:from|import)\s+(?:\w+\.)*test_\w+", re.MULTILINE)
IN_TESTS = [path for path in TESTS.rglob("*.py") if "node_modules" not in path.parts]


def test_no_module_imports_a_test() -> None:
    assert all(map(_IMPORTS_A_TEST.search, ("import test_other as here", "x\n  from tests.a.test_b import c")))
    found = {str(path): each[0] for path in IN_TESTS for each in _IMPORTS_A_TEST.finditer(path.read_text())}
    found.pop(__file__, None)
    assert not found, "what tests share stands in a package of tests/helpers"


def test_what_tests_share_stands_in_packages() -> None:
    beside = [path for path in IN_TESTS if path.relative_to(TESTS).parts[0] not in SHARED]
    assert not [str(path) for path in beside if not re.fullmatch(r"test_\w+|conftest", path.stem)]
    assert not list(HELPERS.glob("*.py")), "a helper stands in a package that says what it holds"
    packages = [path for path in HELPERS.iterdir() if any(path.glob("*.py"))]
    assert packages and all(ast.get_docstring(ast.parse((path / "__init__.py").read_text())) for path in packages)


def test_the_page_of_test_worlds_names_every_package() -> None:
    text = (PACKAGE.parent / "docs" / "testing.md").read_text(encoding="utf-8")
    packages = {path.parent.name for path in HELPERS.glob("*/__init__.py")}
    assert not {name for name in {*packages, *SHARED} if not re.search(rf"`(?:tests/)?{name}[`.]", text)}


# Prints which files are opened while the module that it is given is imported, those of Python itself left out.
_OPENED = """
import importlib, sys
import skyinfra
def note(event, arguments):
    if event == "open" and isinstance(arguments[0], str) and not arguments[0].endswith((".py", ".pyc", ".so")):
        print(arguments[0])
sys.addaudithook(note)
importlib.import_module(sys.argv[1])
"""


@pytest.mark.parametrize("path", sorted((HELPERS / "tasks_on_nodes").glob("*.py")), ids=lambda path: path.stem)
def test_what_nodes_import_of_the_tests_is_light(path: Path) -> None:
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else [each.name for each in node.names]
            assert {name.partition(".")[0] for name in names} <= sys.stdlib_module_names | {"skyinfra"}
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(PACKAGE.parent), str(HELPERS)])}
    module = "tasks_on_nodes" if path.stem == "__init__" else f"tasks_on_nodes.{path.stem}"
    command = [sys.executable, "-B", "-c", _OPENED, module]
    assert subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout == ""


def test_no_constant_of_a_module_is_assigned_twice() -> None:
    """The second one, of another purpose, is that of the first one's users too."""
    twice = []
    for path in sorted(PACKAGE.rglob("*.py")):
        named = [
            target.id
            for line in ast.parse(path.read_text(encoding="utf-8")).body
            if isinstance(line, ast.Assign)
            for target in line.targets
            if isinstance(target, ast.Name) and target.id.isupper()
        ]
        twice += [f"{path.relative_to(PACKAGE)}: {name}" for name in sorted({n for n in named if named.count(n) > 1})]
    assert twice == []
