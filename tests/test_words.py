"""Words that are not ours: a name, a key or a message that has one of them says it in private English."""

from __future__ import annotations

import ast
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

from support import ROOT

PACKAGE = ROOT / "skyinfra"
FILES = sorted(PACKAGE.rglob("*.py"))
# The field says: notify or report, watchdog, drain or remove, apply, destroy, exist, select, queue.
WORDS = {"telling", "told", "teller", "keeper", "leaving", "followed", "goes", "stands", "standing", "chosen"}
WORDS |= {"cargo", "desk", "turns"}
# Names that hide what is in a file.
HIDING = {"found", "live", "placed", "known", "standing", "reach", "endings", "lost", "asked", "asking", "instead"}
HIDING |= {"parked", "surroundings", "misc", "utils"}
# What versions before wrote, which is read and written for one version more; and words on the wire between versions.
BEFORE = {
    "node/folder.py": {"leaving", "keeper.pid", "followed"},
    "protocol/fleet.py": {"leaving"},
    "deploy/fleet_status.py": {"leaving", "standing"},
    "cli/offers.py": {"chosen"},
    "deploy/transitions.py": {"goes"},
    "desired/file.py": {"told.json", "followed.json"},
    "first_boot/report.py": {"told"},
    "first_boot/report_client.py": {"told"},
    "first_boot/operations.py": {"stands_for"},
    "runner/partition_cli.py": {"standing"},
}


def words(name: str) -> list[str]:
    """Returns the words of an identifier or a key, in lower case."""
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower().replace(".", "_").replace("-", "_").split("_")


def names(path: Path) -> Iterator[tuple[int, str]]:
    with path.open("rb") as file:
        for token in tokenize.tokenize(file.readline):
            if token.type == tokenize.NAME:
                yield token.start[0], token.string


def texts(path: Path) -> Iterator[tuple[int, str]]:
    """Yields the strings of a file that are no docstrings."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    statements = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in statements:
            yield node.lineno, node.value


def test_names_keys_and_messages_have_the_words_of_the_field() -> None:
    wrong: list[tuple[str, int, str]] = []
    for path in FILES:
        where = str(path.relative_to(PACKAGE))
        before = BEFORE.get(where, set())
        found = {(line, name) for line, name in names(path) if WORDS & set(words(name))}
        found |= {(line, text) for line, text in texts(path) if WORDS & set(re.findall(r"[a-z]+", text.lower()))}
        wrong += [(where, *each) for each in sorted(found) if each[1] not in before]
        assert before <= {each for _, each in found}, f"{where}: an old name that is no longer there"
    assert wrong == []


def test_files_are_named_by_what_they_hold() -> None:
    assert [str(path.relative_to(PACKAGE)) for path in FILES if path.stem in HIDING] == []


def test_docstrings_begin_with_a_subject_or_a_verb() -> None:
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    wrong = [
        (str(path.relative_to(PACKAGE)), text.partition("\n")[0])
        for path in FILES
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, kinds) and re.match(r"(What|One that|That which)\b", text := ast.get_docstring(node) or "")
    ]
    assert wrong == []


def test_look_returns_what_a_fleet_is_now() -> None:
    returned = {
        (path.name, ast.unparse(node.returns) if node.returns else "")
        for path in FILES
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name == "look"
    }
    assert returned and {kind for _, kind in returned} <= {"Snapshot", "Look"}, returned
