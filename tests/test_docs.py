"""The documents: their workflow is one, and the commands in them exist."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import click
import pytest
import typer
import yaml
from support import ROOT

from skyinfra.cli.app import app
from skyinfra.terminal import help as helping

DOCUMENTS = sorted([ROOT / "README.md", *(ROOT / "docs").glob("*.md")])


def blocks(language: str, text: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)


def test_the_workflow_is_one() -> None:
    text, gitlab = blocks("yaml", (ROOT / "docs" / "hcp-terraform.md").read_text())
    assert yaml.safe_load(gitlab)["deploy"]["script"] == ["skyinfra deploy aws-mig --auto-approve"]
    before = yaml.safe_load(gitlab)["default"]["before_script"]
    # Its runner makes folders that everybody may write to, which `refuse_shared` refuses.
    [folder] = [line.removeprefix("cd ") for line in before if line.startswith("cd ")]
    assert before[0] == f"chmod go-w {folder}" and (ROOT / folder / "cdktf.json").is_file()
    workflow = yaml.safe_load(text)
    # YAML 1.1 reads `on` as a truth value, as GitHub's own reader does not.
    assert set(workflow) == {"name", True, "permissions", "concurrency", "jobs"}
    [job] = workflow["jobs"].values()
    assert all(("run" in step) != ("uses" in step) for step in job["steps"])
    deploys = [step for step in job["steps"] if "deploy" in step.get("run", "")]
    assert [step["if"] for step in deploys] == ["github.event_name == 'push'"]
    assert (ROOT / job["defaults"]["run"]["working-directory"] / "cdktf.json").is_file()


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_the_commands_exist(document: Path) -> None:
    text = document.read_text()
    known = {name.partition(" ")[0] for name in helping.COMMANDS}
    used = set(re.findall(r"(?:^ *|`|\$ |run: )skyinfra ([a-z]+)\b(?= |`|$)", text, re.MULTILINE))
    assert used, "a document without commands is not tested"
    assert used <= known, used - known
    for words, given in re.findall(r"skyinfra ((?:[a-z][a-z-]* )+)(STACK/POOL|STACK)\b", text):
        assert takes(words.split(), given), f"skyinfra {words}{given}"


def takes(words: list[str], given: str) -> bool:
    """Whether the first argument of a command is such a name."""
    command: Any = typer.main.get_command(app)
    for word in words:
        command = command.get_command(click.Context(command), word)
    if hasattr(command, "commands"):  # `jobs` alone is `jobs list`
        command = command.get_command(click.Context(command), "list")
    [first, *_] = [each for each in command.params if each.param_type_name == "argument"]
    named = (first.metavar or first.name).upper()
    return ("STACK" in named) if given == "STACK" else ("POOL" in named)


def test_ci_runs_every_python_that_is_supported() -> None:
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text())
    for job in workflow["jobs"].values():
        assert all(("run" in step) != ("uses" in step) for step in job["steps"])
    classifiers = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["classifiers"]
    supported = {text.rpartition(" ")[2] for text in classifiers if re.search(r":: 3\.\d+$", text)}
    assert set(re.findall(r'"(3\.\d+)"', (ROOT / ".github" / "workflows" / "ci.yml").read_text())) == supported


def test_the_tests_that_security_names_exist() -> None:
    """Each attack has a test, and each test that is named is there."""
    text = (ROOT / "docs" / "security.md").read_text().partition("## Attacks")[2].partition("\n## ")[0]
    rows = [row.strip("|").split(" | ") for row in text.splitlines() if row.startswith("| ")][1:]
    assert len(rows) > 20
    for attack, _, tests in rows:
        named = re.findall(r"`([^`]+)::(\w+)`", tests)
        assert named, f"no test holds: {attack}"
        for file, name in named:
            assert f"\ndef {name}(" in (ROOT / "tests" / file).read_text(), f"{file}::{name}"


def test_manifests_are_private_from_the_beginning() -> None:
    """Between a redirection and a `chmod` others could read the fleet secret."""
    files = [*DOCUMENTS, *(ROOT / "docs").rglob("*.md"), *(ROOT / "templates").rglob("*.j2")]
    assert not [str(file) for file in files if re.search(r"\.json && chmod", file.read_text())]
