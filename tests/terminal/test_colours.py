"""Colours and folding, as public reports of other command lines have them wrong.

hashicorp/terraform#23708 (NO_COLOR, FORCE_COLOR), gruntwork-io/terratest#115 and aquasecurity/tfsec#50 (escape codes in
logs of CI), ray-project/ray#20485 (colours that are not the terminal's own eight), build-trust/ockam#5138 and
stevenvachon/broken-link-checker#26 (spinners in logs), a8m/pb#82 (TERM=dumb), Metta-AI/metta#964 (a pipe folded to 80
columns), dstackai/dstack#2572 (cells cut until they say nothing), skypilot-org/skypilot#1018 (one wide column takes the
rest), moby/moby#7477 (what one needs at the end), apache/openwhisk#1646 (names cut that the next command takes).
"""

from __future__ import annotations

import io
import os
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
from front_ends import on_terminal as terminals
from front_ends.on_terminal import plain
from rich.text import Text
from support import python_path

import skyinfra
from skyinfra import folding
from skyinfra.console import colours, console
from skyinfra.deploy import reporting
from skyinfra.deploy.reporting import Line
from skyinfra.terminal import spent, tables
from skyinfra.terminal.plans import show_plan
from skyinfra.terraform.program import Plan

ESCAPE = "\x1b"
VARIABLES = ("NO_COLOR", "FORCE_COLOR", "CLICOLOR", "CLICOLOR_FORCE", "COLORTERM", "TERM")


# What several tests ask for in the same way is run once.
pytestmark = pytest.mark.xdist_group("colours")
on_terminal = cache(terminals.on_terminal)


@cache
def piped(*arguments: str, **environment: str) -> str:
    kept = {name: value for name, value in os.environ.items() if name not in VARIABLES}
    command = [sys.executable, "-m", "skyinfra.cli", *arguments]
    done = subprocess.run(
        command, env={**kept, "PYTHONPATH": python_path(), **environment}, capture_output=True, text=True
    )
    return done.stdout + done.stderr


class Stream(io.StringIO):
    def __init__(self, *, terminal: bool) -> None:
        super().__init__()
        self.terminal = terminal

    def isatty(self) -> bool:
        return self.terminal


@pytest.mark.parametrize(
    ("given", "terminal", "pipe"),
    [
        ({}, "auto", None),
        ({"NO_COLOR": "1"}, None, None),
        ({"NO_COLOR": ""}, "auto", None),  # no-color.org: "when present and not an empty string"
        ({"NO_COLOR": "1", "FORCE_COLOR": "1"}, None, None),
        ({"FORCE_COLOR": "1"}, "standard", "standard"),
        ({"FORCE_COLOR": "2"}, "256", "256"),
        ({"FORCE_COLOR": "3"}, "truecolor", "truecolor"),
        ({"FORCE_COLOR": "0"}, None, None),
        ({"FORCE_COLOR": ""}, "auto", None),
        ({"FORCE_COLOR": "1", "TERM": "xterm-256color"}, "256", "256"),
        ({"CLICOLOR_FORCE": "1"}, "standard", "standard"),
        ({"CLICOLOR_FORCE": "0"}, "auto", None),
        ({"CLICOLOR_FORCE": "1", "COLORTERM": "truecolor"}, "truecolor", "truecolor"),
        ({"CLICOLOR": "0"}, None, None),
        ({"CLICOLOR": "1"}, "auto", None),
        ({"CLICOLOR": "0", "FORCE_COLOR": "1"}, "standard", "standard"),
    ],
)
def test_the_environment_decides(
    given: dict[str, str], terminal: str | None, pipe: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    assert colours(Stream(terminal=True)) == terminal
    assert colours(Stream(terminal=False)) == pipe


@pytest.mark.parametrize("arguments", [("--help",), ("mig", "show", "H100", "3g.40gb"), ("offers", "H100x"), ()])
def test_neither_colour_nor_weight_where_none_is_wanted(arguments: tuple[str, ...], tmp_path: Path) -> None:
    _, shown = on_terminal(*arguments, folder=tmp_path)
    assert ESCAPE in shown
    _, without = on_terminal(*arguments, folder=tmp_path, NO_COLOR="1")
    assert ESCAPE not in without and without == plain(shown)
    assert ESCAPE not in on_terminal(*arguments, folder=tmp_path, TERM="dumb")[1]
    assert ESCAPE not in piped("-C", str(tmp_path), *arguments)


def test_colours_that_are_forced_into_a_pipe_move_and_fold_nothing() -> None:
    plainly = piped("offers", "H100:8")
    forced = piped("offers", "H100:8", FORCE_COLOR="1")
    assert ESCAPE in forced and plain(forced) == plainly
    assert re.findall(r"\x1b\[(?![0-9;]*m)", forced) == []
    assert max(map(len, plainly.splitlines())) > 120


@pytest.mark.parametrize(
    "arguments", [("--help",), ("deploy", "--help"), ("recommend", "llama-3-8b"), ("offers", "T4")]
)
def test_only_the_eight_colours_of_the_terminal_itself(arguments: tuple[str, ...]) -> None:
    _, shown = on_terminal(*arguments, COLORTERM="truecolor")
    codes = {code for codes in re.findall(r"\x1b\[([0-9;]*)m", shown) for code in codes.split(";")}
    assert {*codes} & {"1", "36"} and not codes & {"38", "48"}


CHANGES = [("create", "32", "+"), ("delete", "31", "-"), ("update", "33", "~"), ("replace", "33", "±")]


@pytest.mark.parametrize("terminal", [True, False])
def test_a_plan_shows_each_change_in_its_colour(terminal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    err = Stream(terminal=terminal)
    monkeypatch.setattr(sys, "stderr", err)
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    changes = tuple((action, f'module.mig.terraform_data.node["{action}"]') for action, _, _ in CHANGES)
    show_plan("train", Plan(Path("plan"), changes), to_stderr=True)
    lines = err.getvalue().splitlines()
    signs = [f"\x1b[{colour}m{sign}\x1b[0m" if terminal else sign for _, colour, sign in CHANGES]
    assert lines[:-1] == [f"  {sign} mig node {action}" for sign, (action, _, _) in zip(signs, CHANGES, strict=True)]
    name = "\x1b[1mtrain\x1b[0m" if terminal else "train"
    assert lines[-1] == f"{name}: 1 to create, 1 to update, 1 to replace, 1 to delete"


@pytest.mark.parametrize("columns", [60, 80, 120])
@pytest.mark.parametrize("arguments", [("recommend", "llama-3-70b"), ("--help",), ("offers", "H100:8")])
def test_sentences_are_folded_between_words(arguments: tuple[str, ...], columns: int) -> None:
    _, text = on_terminal(*arguments, columns=columns)
    lines = plain(text).partition("import skyinfra")[0].splitlines()
    assert max(map(len, lines)) <= columns
    # The sentences stand below the table, and all of the help is some.
    last = {"recommend": "Left out: ", "offers": "Not deployable", "--help": "Usage"}[arguments[0]]
    words, whole = plain(text).partition(last)[2].split(), piped(*arguments).partition(last)[2].split()
    assert words == whole and len(words) > 20


def test_what_one_copies_is_not_folded() -> None:
    command = "`skyinfra move old-name new-name --a-long-option`"
    text = Text(f"Keep the nodes in the stack that declares them now: {command}, or not.")
    assert [line.plain for line in folding.sentences(text, 40)] == [
        "Keep the nodes in the stack that",
        "declares them now:",
        f"{command},",
        "or not.",
    ]
    assert [line.plain for line in folding.sentences(Text("    x = 1  # code" * 3), 20)] == ["    x = 1  # code" * 3]
    assert [line.plain for line in folding.sentences(Text("  - one two three"), 10)] == ["  - one", "  two", "  three"]


def test_names_in_cells_are_folded_where_their_parts_join() -> None:
    layout = Text.from_markup("[red]H100:8/3g.40gb+2g.20gb[/]+1g.10gb+me*2 (simulated)")
    assert folding.cell(layout, 17).plain.split("\n") == ["H100:8/3g.40gb+", "2g.20gb+", "1g.10gb+me*2", "(simulated)"]
    assert folding.cell(Text("gpu-mi300x1-192gb"), 12).plain == "gpu-mi300x1-\n192gb"
    assert folding.cell(Text("$14.94/h of 2026-05-20"), 11).plain.split("\n") == ["$14.94/h of", "2026-05-20"]


@pytest.mark.parametrize("columns", [60, 80])
def test_the_columns_that_one_needs_stay(columns: int) -> None:
    _, text = on_terminal("recommend", "llama-3-70b", columns=columns)
    head = next(line for line in plain(text).splitlines() if line.startswith("PER HOUR"))
    assert {"PROVIDER", "MACHINE", "ACCELERATOR"} <= set(head.split())
    assert "…" not in text


def test_one_place_decides_about_colours() -> None:
    package = Path(skyinfra.__file__).parent
    found = re.compile(r"NO_COLOR|FORCE_COLOR|CLICOLOR|color_system|force_terminal")
    places = {file.relative_to(package).as_posix() for file in package.rglob("*.py") if found.search(file.read_text())}
    assert places == {"console.py"}


# Looked at as pictures at 60, 80 and 120 columns ---------------------------------------------------------------------


def test_next_steps_stand_below_their_commands_where_there_is_no_room_beside_them(tmp_path: Path) -> None:
    _, text = on_terminal(folder=tmp_path, columns=60)
    lines = plain(text).partition("Next:")[2].splitlines()
    assert max(map(len, lines)) <= 60
    assert "      or one that shows what a fleet can do" in lines and "  skyinfra init my-tour --example tour" in lines
    assert (
        "  skyinfra --help                       every command" in plain(on_terminal(folder=tmp_path)[1]).splitlines()
    )


def test_an_option_whose_first_line_ends_in_a_colon_is_no_heading() -> None:
    _, text = on_terminal("init", "--help", columns=60)
    [line] = [line for line in text.splitlines() if "--example <" in plain(line) or "--example TEXT" in plain(line)]
    assert plain(line).endswith(":") and "\x1b[1m" not in line
    assert re.search(r"\x1b\[2m\[default:(?:\x1b\[0m)?\n", text), "dim, also over the end of a line"


@pytest.mark.parametrize("arguments", [("plan", "--help"), ("recommend", "--help"), ("run", "--help")])
def test_the_help_names_no_type_of_python(arguments: tuple[str, ...]) -> None:
    _, text = on_terminal(*arguments)
    assert re.findall(r"<(?:str|int|float|path|file|list\S*)>", plain(text)) == []


def test_a_table_that_fits_no_terminal_is_folded_at_the_seams_of_names() -> None:
    text = plain(on_terminal("offers", "H100", columns=60)[1])
    assert "gpu_1x_h100_ " in text and " pcie " in text, "and not gpu_1x_h100_p, cie"
    assert max(map(len, text.partition("Left out")[0].splitlines())) <= 60


@pytest.mark.parametrize(("given", "meant"), [("version", "skyinfra --version"), ("-y", "skyinfra deploy --yes")])
def test_wrong_usage_has_the_look_of_an_error_and_is_folded(given: str, meant: str, tmp_path: Path) -> None:
    code, text = on_terminal(given, folder=tmp_path, columns=60)
    assert code == 2 and "\x1b[1;31mError:" in text
    assert meant in " ".join(plain(text).split()) and max(map(len, plain(text).splitlines())) <= 60
    said = piped("-C", str(tmp_path), "deploy", "--nothing")
    assert ESCAPE not in said and "Error: No such option: --nothing" in said and " deploy --help` for help" in said


def test_lines_of_a_traceback_stay_as_they_are() -> None:
    text = Text(
        'Traceback (most recent call last):\n  File "/a/long/folder/of/a/project/train.py", line 19, in train\n'
    )
    assert [line.plain for line in folding.sentences(text, 40)][1].endswith("line 19, in train")


# What is written and no sentence: data, which others read.
DATA = {
    'f"{gpus}{kind}: {_said(layout)}',
    'f"GPU {gpu}: {_said(layout)}',
    'f"{_folder(self.manifest.pool, info)}/{_LOG}',
}
# Who prints what is folded already, or drawn.
FOLDED = {"folding.py", "terminal/drawing.py", "terminal/help.py", "terminal/overview.py", "cli/layouts.py"} | {
    "cli/render.py",  # a line to copy
    "cli/status.py",
}


def test_commands_say_sentences_in_a_way_that_folds_them() -> None:
    """`typer.echo`, `write` and `soft_wrap` leave that to the terminal, which breaks words and paths."""
    package = Path(skyinfra.__file__).parent
    sources = {file.relative_to(package).as_posix(): file.read_text() for file in package.rglob("*.py")}
    assert [name for name, text in sources.items() if re.search(r"echo\(.*err=True", text)] == []
    rooms = ("cli/", "deploy/", "folding.py", "terminal/")
    of_commands = {name: text for name, text in sources.items() if name.startswith(rooms)}
    written = {
        said
        for text in of_commands.values()
        for said in re.findall(r'\.write(?:lines)?\(\s*(f?"[^"\\]* [^"\\]*)', text)
    }
    assert written == DATA
    assert {name for name, text in of_commands.items() if "soft_wrap" in text} == FOLDED


def test_facts_of_a_layout_are_folded_beside_their_word() -> None:
    _, text = on_terminal("mig", "show", "H100", columns=60)
    lines = plain(text).splitlines()
    assert max(map(len, lines)) <= 60
    place = next(index for index, line in enumerate(lines) if line.startswith("fits "))
    assert lines[place].endswith(",") and re.fullmatch(r" {9}\S.*7g\.80gb", lines[place + 1])
    assert "1g.20gb, 2g.20gb, 3g.40gb, 4g.40gb, 7g.80gb\n" in piped("mig", "show", "H100")


@pytest.mark.parametrize("terminal", [True, False])
def test_what_is_said_is_folded_on_a_terminal_alone(terminal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    said = f"slurm: waiting: {'a node that is not there yet, ' * 4}\tand no other"
    out, err = Stream(terminal=terminal), Stream(terminal=terminal)
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setattr(sys, "stderr", err)
    monkeypatch.setenv("COLUMNS", "40")
    tables.say(said, to_stderr=True)
    reporting.say(said)
    Line("train", console(to_stderr=True))._print(said)
    spent.show_so_far({"text": "$3 " * 20, "unknown": ["a price"], "budget": None})
    lines = plain(err.getvalue() + out.getvalue()).splitlines()
    if terminal:
        assert max(map(len, lines)) <= 40 and len(lines) > 12
    else:
        assert lines == [said, said, f"train: {said}", f"It has cost {'$3 ' * 20}. Not known: a price."]
