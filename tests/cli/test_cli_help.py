"""The help: groups, and two examples of each command that parse; and the completion of shells."""

from __future__ import annotations

import os
import shlex
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from support import missing, python_path

from skyinfra.cli.app import app
from skyinfra.terminal import help as helping
from skyinfra.terminal import names

ROOT: Any = typer.main.get_command(app)
START = "import sys; sys.argv[0] = 'skyinfra'; from skyinfra.cli import main; main()"


def commands(group: Any = ROOT, path: str = "") -> Iterator[tuple[str, Any]]:
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from commands(command, f"{path}{name} ")
        else:
            yield f"{path}{name}", command


def parse(line: str) -> str:
    """Parses a command line as the program does; returns the path of the command."""
    words = shlex.split(line.partition(" | ")[0].partition(" >")[0])
    assert words.pop(0) == "skyinfra"
    command, context, path = ROOT, None, []
    while True:
        context = command.make_context(command.name or "skyinfra", words, parent=context)
        if not hasattr(command, "commands"):
            return " ".join(path)
        rest = [*getattr(context, "_protected_args", ()), *context.args]
        name, command, words = command.resolve_command(context, rest)
        path.append(name)


@pytest.mark.parametrize("path", [path for path, _ in commands()])
def test_every_command_has_two_examples_that_parse(path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my-project").mkdir()
    monkeypatch.chdir(tmp_path)
    first, second = helping.EXAMPLES[path]
    assert first != second
    for line in (first, second):
        monkeypatch.chdir(tmp_path)
        assert parse(line) == path


def test_no_example_or_group_names_a_command_that_does_not_exist() -> None:
    known = {path for path, _ in commands()}
    assert set(helping.EXAMPLES) == known
    grouped = [name for group in helping.GROUPS.values() for name in group]
    assert sorted(grouped) == sorted(ROOT.commands)


def test_the_help_of_a_group_says_the_first_sentence_of_each_command() -> None:
    first = {path: " ".join(command.help.split()).partition(". ")[0].removesuffix(".") for path, command in commands()}
    assert {path: sentence for path, (_, sentence) in helping.COMMANDS.items()} == first


def test_a_shell_lists_commands_without_importing_them() -> None:
    words = {"_SKYINFRA_COMPLETE": "complete_zsh", "_TYPER_COMPLETE_ARGS": "skyinfra s"}
    program = f"import atexit, sys; atexit.register(lambda: print('skyinfra.cli.stacks' in sys.modules)); {START}"
    done = subprocess.run(
        [sys.executable, "-c", program], env={**os.environ, **words}, capture_output=True, text=True, check=True
    )
    assert '"status":"Show fleets, nodes' in done.stdout and '"ssh"' in done.stdout
    assert done.stdout.rstrip().endswith("False")


def shown(*arguments: str) -> str:
    done = subprocess.run([sys.executable, "-c", START, *arguments], capture_output=True, text=True, check=True)
    return done.stdout


def test_the_help_has_groups_and_examples() -> None:
    text = shown("--help")
    places = [text.index(f"\n{title}:\n") for title in helping.GROUPS]
    assert places == sorted(places)
    assert text.index("\n  deploy ") < text.index("\nRun:") < text.index("\n  run ")
    text = shown("mig", "show", "--help")
    assert text.rstrip().splitlines()[-3:] == ["  Examples:", *(f"    {line}" for line in helping.EXAMPLES["mig show"])]


@pytest.fixture
def completed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[[Path, str], list[str]]:
    """The words that bash is offered in a folder behind a line. No program is started, no connection made."""

    def complete(folder: Path, line: str) -> list[str]:
        monkeypatch.chdir(folder)
        for name, value in (
            ("_SKYINFRA_COMPLETE", "complete_bash"),
            ("COMP_WORDS", line),
            ("COMP_CWORD", str(line.count(" "))),
        ):
            monkeypatch.setenv(name, value)
        with monkeypatch.context() as forbidden, pytest.raises(SystemExit):
            forbidden.setattr(subprocess, "Popen", None)
            forbidden.setattr(socket, "create_connection", None)
            ROOT(prog_name="skyinfra")
        found = capsys.readouterr()
        assert found.err == ""
        return found.out.split()

    return complete


def test_a_shell_completes_names(
    project: Path, completed: Callable[[Path, str], list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(project)
    names.remember_jobs("lab/mig", ["train-20"])
    names.remember_jobs("lab/mig", ["eval-1"], more=True)
    assert completed(project, "skyinfra sta") == ["status"]
    assert completed(project, "skyinfra status ") == ["lab", "lab/mig"]
    assert completed(project, "skyinfra top l") == ["lab/mig"]
    assert completed(project, "skyinfra top lab/mig ") == ["mig-0", "mig-1"]
    assert completed(project, "skyinfra run lab/mig --node mig-") == ["mig-0", "mig-1"]
    assert completed(project, "skyinfra run lab/mig --profile ") == ["1g.10gb", "3g.40gb"]
    assert completed(project, "skyinfra jobs logs lab/mig ") == ["eval-1", "train-20"]
    assert "H100" in completed(project, "skyinfra mig show H")
    assert completed(project, "skyinfra mig show A30 1g") == ["1g.6gb", "1g.6gb+me"]
    assert completed(project.parent, f"skyinfra -C {project} status ") == ["lab", "lab/mig"]


def test_a_folder_without_a_project_completes_nothing(
    tmp_path: Path, completed: Callable[[Path, str], list[str]]
) -> None:
    assert completed(tmp_path, "skyinfra status ") == []
    assert completed(tmp_path, "skyinfra jobs logs lab/mig ") == []
    (tmp_path / "cdktf.json").write_text("{")
    assert completed(tmp_path, "skyinfra status ") == []


def test_the_completion_of_bash_works_in_bash(project: Path) -> None:
    bash = shutil.which("bash")
    if bash is None:
        missing("bash")
    folder = project / "bin"
    folder.mkdir()
    program = folder / "skyinfra"
    program.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -c {shlex.quote(START)} "$@"\n')
    program.chmod(0o755)
    script = (
        'eval "$(skyinfra completion bash)"\n'
        'COMP_WORDS=(skyinfra top lab/mig ""); COMP_CWORD=3; COMP_LINE="skyinfra top lab/mig "\n'
        '_skyinfra_completion skyinfra "" lab/mig; echo "${COMPREPLY[@]}"\n'
    )
    environment = {**os.environ, "PATH": f"{folder}{os.pathsep}{os.environ['PATH']}", "PYTHONPATH": python_path()}
    done = subprocess.run(
        [str(bash), "--norc", "-c", script], cwd=project, env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["mig-0", "mig-1"]


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_each_shell_has_a_completion(shell: str) -> None:
    text = shown("completion", shell)
    assert "_SKYINFRA_COMPLETE=complete_" + shell in text.replace("'", "")
