"""Nothing that a node, a task, a head or a cloud says is obeyed by the terminal that shows it.

Public reports of the kind: CVE-2021-25743 (kubectl prints escape sequences of objects), CVE-2024-52005 (git passes on
those of a remote), CVE-2021-42574 (bidirectional controls make source read as another).
"""

from __future__ import annotations

import io
import json
import logging
import re
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from local_fleets.forged_head import Head, starting
from rich.markup import escape
from rich.progress import Progress

import skyinfra as sky
from skyinfra import cli, page
from skyinfra.cli import app as commands
from skyinfra.cli import nodes, status
from skyinfra.cli.options import write
from skyinfra.client import open_questions
from skyinfra.deploy.fleet_status import fleet_status
from skyinfra.deploy.spending import pool_spent, priced_hours, summed
from skyinfra.errors import streams
from skyinfra.errors.printable import LONGEST, coloured, printable, program_output, undressed
from skyinfra.notebook import pictures
from skyinfra.protocol import questions, readings, services
from skyinfra.protocol.fleet import STATE_VERSION
from skyinfra.protocol.instance import STARTUP_KEY, InstanceInfo
from skyinfra.protocol.manifest import Manifest
from skyinfra.protocol.readings import HOURS_VERSION, FleetHours
from skyinfra.submission.watching import Watcher
from skyinfra.terminal import help as helping
from skyinfra.terminal import tables
from skyinfra.terminal.spent import show_spent

# A title, the clipboard, an erased screen, a question that the terminal answers; controls of 8 bits; a link; NUL and
# bell; text that reads backwards, or that nobody sees. Brackets, which rich would read as markup.
HOSTILE = (
    "a\x1b]0;title\x07b\x1b]52;c;cm0=\x07\x1b[2J\x1b[6n\x1b[1A\x9b2J\x9d0;x\x9c\x1b]8;;http://x\x1b\\\x00\x08"
    "\u202egpj.exe\u202c\u2066x\u2069\u200b\ufeff\U000e0041[link=http://x]y[/] [/bold] \x1b[8mhidden"
)
# Of these none may reach a terminal. Rich moves its cursor itself, by a line and in it.
OBEYED = re.compile(
    "\x1b(?!\\[[0-9;]*m|\\[[012]?K|\\[1A|\\[\\?25[lh])"
    "|[\x00-\x07\x0b\x0c\x0e-\x1a\x1c-\x1f\x7f-\x9f\u200b\u202a-\u202e\u2066-\u2069\ufeff\U000e0041]"
)
LONG = "x" * 1_000_000


class Screen(io.TextIOWrapper):
    """A terminal, or a file, that remembers what was written."""

    def __init__(self, *, terminal: bool) -> None:
        self.bytes = io.BytesIO()
        super().__init__(self.bytes, encoding="utf-8", write_through=True)
        self._terminal = terminal

    def isatty(self) -> bool:
        return self._terminal

    @property
    def text(self) -> str:
        return self.bytes.getvalue().decode()


def shown(monkeypatch: pytest.MonkeyPatch, *arguments: str, terminal: bool = True) -> tuple[int, str]:
    """Runs a command as a terminal, or a pipe, gets it. Its exit code and what both streams showed."""
    screen = Screen(terminal=terminal)
    monkeypatch.setattr(sys, "argv", ["skyinfra", *arguments])
    monkeypatch.setattr(sys, "stdout", screen)
    monkeypatch.setattr(sys, "stderr", screen)
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "200")
    with pytest.raises(SystemExit) as ended:
        cli.main()
    return int(ended.value.code or 0), screen.text


def slot(text: str) -> dict[str, Any]:
    made = InstanceInfo("n0", 0, "n0/0", "gpu", "stack/pool", accelerator="H100", uuid="u", gpu=0)
    return {**made.to_json(), "accelerator": text, "uuid": text, "profile": text}


def job(text: str) -> dict[str, Any]:
    told = {"host": text, "state": "failed", "problem": text}
    written = {"left": [{"path": text, "size": 3}], "left_count": 1, "left_bytes": 3, "problem": text}
    done = {"priority": 0, "state": "done", "submitted": 1.0, "started": 1.0, "ended": 2.0, "attempts": 1}
    words = {"name": "train", "task": text, "submitter": text, "slot": "n0/0", "problem": text}
    return {"id": "0" * 32, "kind": "function", **done, **words, "notifications": [told], "written": written}


def hours(text: str) -> dict[str, Any]:
    use = {"day": text, "submitter": text, "kind": "job", "name": text, "slot_seconds": 3600.0, "node_seconds": 3600.0}
    run = {"node": "n0", "machine": text, "began": 1.0, "seconds": 3600.0}
    return {"version": HOURS_VERSION, "ledger": text, "at": 3601.0, "runs": [run], "uses": [use]}


def answered(text: str) -> Callable[[dict[str, Any]], Any]:
    """The answers of the node."""

    def answer(request: dict[str, Any]) -> Any:
        return {
            questions.DOCTOR: [{"what": text, "result": "wrong", "found": text, "wanted": text, "to_do": text}],
            questions.METRICS: [{"slot": slot(text), "task": text}],
            questions.LOG: {"path": text, "text": f"{text}\n" if request["arguments"].get("offset") is None else ""}
            | {"offset": 7},
            questions.START: "identity",
            questions.OUTPUT: {"parts": [("stdout", f"{text}\n"), ("stderr", text)], "code": 3},
            questions.GET: {"done": True, "tree": text},
            questions.UPGRADE: {"version": text, "record": {"state": "failed", "error": text}},
        }.get(request["question"])

    return answer


def hostile(text: str, outcome: bytes = b"") -> Head:
    state = {"version": STATE_VERSION, "slots": {"n0": ["n0/0", "n0/1"]}, "draining": {"n0/0": [text]}}
    state |= {"failed": {"n0": {"step": text, "error": text, "lines": [text]}}, "leaving": {"n0": text}}
    answers: dict[str, Any] = {
        services.running.name: {"n0/0": [(text, text, 1.0)]},
        services.work.name: readings.FleetWork(
            1.0, 0, 10.0, progress={"n0/0": readings.Progress(1, 2, text)}
        ).to_json(),
        services.job_list.name: [job(text)],
        services.job_wait.name: job(text),
        services.job_cancel.name: True,
        services.job_outcome.name: (outcome, len(outcome)),
        services.records.name: [],
        services.ask_node.name: answered(text),
        services.job_secrets.name: job(text),
        services.job_notify.name: None,
        services.hours.name: hours(text),
    }
    workers = {"w": {"status": "running", STARTUP_KEY: slot(text)}}
    refusal = {"error": {"class": "NodeError", "message": text, "field": text, "given": text, "hint": text}}
    found = Head(lambda _: refusal, Path("/nowhere"), later=True, answers=answers)
    found.identity = {"workers": workers, STARTUP_KEY: state}
    return found


def refusing(text: str) -> Head:
    """Refuses all that it is asked."""
    found = hostile(text)
    found.answers.clear()
    return found


# Every command, with its arguments where it asks a fleet. The others show what this machine declares, what a cloud says
# or, as clients of Dask, what a script prints, by the same streams and consoles: see
# `test_whatever_a_command_prints_is_clean`.
FLEET = "FLEET"
ASKING: dict[str, list[str]] = {
    "run": ["--detach", FLEET, "script.py"],
    "dashboard": ["--no-browser", FLEET],
    "put": [FLEET, "script.py"],
    "get": [FLEET, "there"],
    "exec": [FLEET, "--", "true"],
    "ssh": [FLEET],
    "port-forward": [FLEET, "elsewhere", "80"],
    "status": ["stack"],
    "keep": [FLEET, "2h"],
    "cost": ["stack"],
    "top": [FLEET],
    "logs": [FLEET],
    "doctor": [FLEET],
    "manifest": [FLEET],
    "upgrade": ["stack/pool"],
    "mig plan": [FLEET, "off"],
    "mig advise": [FLEET],
    "jobs list": [FLEET],
    "jobs logs": [FLEET, "train"],
    "jobs keep": [FLEET],
    "jobs resume": ["stack/pool"],
    "jobs cancel": [FLEET, "train"],
    "jobs fetch": [FLEET, "train"],
    "jobs give": [FLEET, "train"],
    "jobs result": [FLEET, "train"],
}
ALONE = {
    *("init", "synth", "plan", "deploy", "scale", "destroy", "move", "watch", "completion", "recommend", "offers"),
    *("capacity", "preflight", "iam", "render", "open jupyter"),
    *("mig show", "mig check", "mig pack", "mig profiles", "mig layouts", "mig gallery", "mig export", "mig import"),
}


# It waits 15 s for a stream that the head does not open.
NAMES = [pytest.param(name, marks=pytest.mark.slow) if name == "run" else name for name in ASKING]


def test_no_command_is_forgotten() -> None:
    assert {*ASKING, *ALONE} == {*helping.COMMANDS} and not ALONE & {*ASKING}


@pytest.fixture
def heads(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Head], Manifest]]:
    # `dashboard` would wait until it is interrupted.
    monkeypatch.setattr(nodes, "_say_url", lambda fleet, url: print(fleet, url))
    with starting() as start:
        yield start


@pytest.mark.parametrize("make", [hostile, refusing], ids=["answers", "refuses"])
@pytest.mark.parametrize("name", NAMES)
def test_commands_show_nothing_that_a_terminal_obeys(
    heads: Callable[[Head], Manifest],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    make: Callable[[str], Head],
) -> None:
    monkeypatch.chdir(tmp_path)
    head = make(HOSTILE)
    (tmp_path / "fleet.json").write_text(json.dumps(heads(head).to_json()))
    (tmp_path / "script.py").write_text("")
    arguments = ["fleet.json" if each == FLEET else each for each in ASKING[name]]
    # `top` on a terminal goes on until it is interrupted.
    _, text = shown(monkeypatch, *name.split(), *arguments, terminal=name != "top")
    assert "defect of skyinfra" not in text
    assert OBEYED.search(text) is None, repr(text)
    if arguments[0] == "fleet.json" and name not in ("ssh", "manifest", "mig plan", "mig advise", "jobs keep"):
        assert head.asked and text


# What programs print.
WHOLE = {"exec", "logs", "jobs logs", "jobs result"}


@pytest.mark.parametrize("name", NAMES)
def test_commands_cut_long_lines(
    heads: Callable[[Head], Manifest], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "fleet.json").write_text(json.dumps(heads(hostile(LONG)).to_json()))
    (tmp_path / "script.py").write_text("")
    arguments = ["fleet.json" if each == FLEET else each for each in ASKING[name]]
    _, text = shown(monkeypatch, *name.split(), *arguments, terminal=name != "top")
    assert "defect of skyinfra" not in text
    assert (LONGEST + 1) * "x" not in text or name in WHOLE


@pytest.mark.parametrize("terminal", [True, False], ids=["terminal", "pipe"])
def test_a_stack_of_such_fleets(
    heads: Callable[[Head], Manifest], monkeypatch: pytest.MonkeyPatch, terminal: bool
) -> None:
    choices = {"name": "pool", "provider": "aws", "machine_types": [HOSTILE]}
    manifest = heads(hostile(HOSTILE))
    found = fleet_status(manifest, None, choices)
    spent = pool_spent("stack/pool", [priced_hours(FleetHours.read(hours(HOSTILE)), choices, manifest)])
    screen = Screen(terminal=terminal)
    monkeypatch.setattr(sys, "stdout", screen)
    with streams.guarded():
        show_spent([summed("stack", [spent])], None)
        status._print_stack({"stack": "stack", "pools": [found], "standing": None})
    assert "stack/pool" in screen.text and OBEYED.search(screen.text) is None


RAISED: dict[str, Callable[[], object]] = {
    "print": lambda: print(HOSTILE),
    "echo": lambda: typer.echo(HOSTILE, err=True),
    "stdout": lambda: sys.stdout.write(HOSTILE),
    "lines": lambda: sys.stderr.writelines([HOSTILE]),
    "output": lambda: write("stdout", HOSTILE),
    "parts of an output": lambda: [write("stdout", each) for each in HOSTILE],
    "logging": lambda: logging.lastResort.handle(logging.makeLogRecord({"msg": HOSTILE, "levelno": logging.ERROR})),
    "console": lambda: tables.console().print(escape(HOSTILE), soft_wrap=True),
    "table": lambda: row(HOSTILE),
    "bars": lambda: bars(HOSTILE),
    "error": lambda: raising(sky.FleetError(HOSTILE, field=HOSTILE, given=HOSTILE, hint=HOSTILE)),
    "defect": lambda: raising(ValueError(HOSTILE)),
}


def raising(error: Exception) -> None:
    raise error


def row(text: str) -> None:
    made = tables.table("NAME", "PROBLEM", ids=("NAME",), sentences=("PROBLEM",))
    made.add_row(escape(text), escape(text))
    tables.console().print(made)


def bars(text: str) -> None:
    """While bars are drawn, rich stands before the streams."""
    with Progress(console=tables.console(to_stderr=True)) as drawn:
        drawn.add_task(escape(text))
        print(text)
        sys.stderr.write(f"{text}\n")


@pytest.mark.parametrize("terminal", [True, False], ids=["terminal", "pipe"])
@pytest.mark.parametrize("way", RAISED)
def test_whatever_a_command_prints_is_clean(monkeypatch: pytest.MonkeyPatch, way: str, terminal: bool) -> None:
    """A command that is written tomorrow, too: the streams themselves are guarded."""
    monkeypatch.setattr(commands, "app", lambda **_: (RAISED[way](), sys.exit(0)))
    text = shown(monkeypatch, terminal=terminal)[1]
    if "output" in way and not terminal:
        assert text == HOSTILE  # a program that reads it gets what was printed
    else:
        assert OBEYED.search(text) is None, repr(text)
        assert "title" in text and "hidden" in text


def test_what_dask_warns_of_is_not_printed(monkeypatch: pytest.MonkeyPatch) -> None:
    def app() -> None:
        for module in ("distributed.client", "distributed.utils", "dask.config", "tornado.iostream", "my.module"):
            warnings.warn_explicit(f"of {module}", UserWarning, "file.py", 1, module=module)

    monkeypatch.setattr(commands, "app", lambda **_: (app(), sys.exit(0)))
    monkeypatch.setattr(warnings, "showwarning", lambda message, *_: print(message, file=sys.stderr))
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        assert shown(monkeypatch) == (0, "of my.module\n")


class Interrupted(io.StringIO):
    """Input that Ctrl-C ends."""

    def readline(self, *_: Any) -> str:
        raise KeyboardInterrupt


@pytest.mark.parametrize(
    ("given", "code", "said"), [(io.StringIO, 1, "Aborted!\n"), (Interrupted, 130, "interrupted\n")]
)
def test_ctrl_c_at_a_question_interrupts(
    monkeypatch: pytest.MonkeyPatch, given: type[io.StringIO], code: int, said: str
) -> None:
    monkeypatch.setattr(sys, "stdin", given())
    monkeypatch.setattr(commands, "app", lambda **_: typer.confirm("Deploy?", err=True))
    ended, text = shown(monkeypatch, terminal=False)
    assert ended == code and text.endswith(said)


LINE = """
import sys, typer
from skyinfra import cli
from skyinfra.cli import app as commands
commands.app = app = typer.Typer()
@app.command()
def line(flush: int) -> None:
    sys.stdin.read()
    print("line", flush=bool(flush))
cli.main()
"""


# What is written at once, the command itself cannot write.
@pytest.mark.parametrize(("flush", "code"), [(0, 0), (1, 1)])
def test_a_reader_that_has_gone_is_no_error(flush: int, code: int) -> None:
    """`skyinfra jobs logs ... | head -1` ended with what Python says of a pipe that is broken, and 120."""
    command = [sys.executable, "-c", LINE, str(flush)]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe) as started:
        assert started.stdin and started.stdout and started.stderr
        started.stdout.close()
        started.stdin.close()
        assert (started.stderr.read(), started.wait(60)) == (b"", code)


def test_no_other_console_is_made() -> None:
    """Rich writes past the guard: the words that it gets are cleaned by `console.console` alone."""
    package = Path(sky.__file__).parent
    assert [file for file in package.rglob("*.py") if re.search(r"\bConsole\(", file.read_text())] == []


def test_long_lines_are_cut_where_a_person_reads_them(monkeypatch: pytest.MonkeyPatch) -> None:
    for way in (lambda: row(LONG), lambda: raising(sky.FleetError(LONG)), lambda: raising(ValueError(LONG))):
        monkeypatch.setattr(commands, "app", lambda way=way, **_: (way(), sys.exit(0)))
        text = shown(monkeypatch, terminal=False)[1]
        assert 0 < len(text) < 3 * LONGEST and " more characters)" in text
    for way in (lambda: tables.print_json({"text": LONG}), lambda: write("stdout", LONG)):
        monkeypatch.setattr(commands, "app", lambda way=way, **_: (way(), sys.exit(0)))
        assert LONG in shown(monkeypatch)[1]


def test_json_says_it_without_controls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(commands, "app", lambda **_: (tables.print_json({"text": HOSTILE}), sys.exit(0)))
    text = shown(monkeypatch)[1]
    assert OBEYED.search(text) is None and json.loads(text) == {"text": HOSTILE}


def test_programs_keep_their_colours_and_leave_none(monkeypatch: pytest.MonkeyPatch) -> None:
    def app(**_: object) -> None:
        for part in ("\x1b[1;3", "1mred", "\x1b", "[0m 10%\r\x1b[K20%\r\n", "\x1b[32mgreen"):
            write("stdout", part)
        sys.stdout.write("ours\n")
        sys.exit(0)

    monkeypatch.setattr(commands, "app", app)
    assert shown(monkeypatch) == (0, "\x1b[1;31mred\x1b[0m 10%\r\x1b[K20%\r\n\x1b[32mgreen\x1b[0mours\n")


def test_names_of_characters() -> None:
    assert printable("a\tb\nc é 漢 👩\u200d🚀") == "a\tb\nc é 漢 👩\u200d🚀"
    assert printable("\x1b[31m\x9b\r\r\n\u202e\U000e0041\udcff") == r"\x1b[31m\x9b\r" + "\n" + r"\u202e\U000e0041\udcff"
    assert printable("ab\nabcdef", 3) == "ab\nabc… (3 more characters)"
    assert program_output("\x1b[1mx\x1b[2K\b\r\x1b[1A\x1b]0;t\x07") == "\x1b[1mx\x1b[2K\b\r\\x1b[1A\\x1b]0;t\\x07"
    assert coloured("\x1b[1;31mx\x1b[0m\ty\n\x1b[2K\b\r\x1b[2J") == "\x1b[1;31mx\x1b[0m\ty\n\\x1b[2K\\x08\\r\\x1b[2J"
    assert undressed("\x1b[1m10%\r20%\x1b[0m\r\n\x1b[2J") == "10%\n20%\n\\x1b[2J"


@pytest.mark.parametrize("terminal", [True, False], ids=["terminal", "pipe"])
def test_what_tasks_say_in_a_program_of_the_user(monkeypatch: pytest.MonkeyPatch, terminal: bool) -> None:
    """It is no command: its own streams are as they are."""
    out, err = Screen(terminal=terminal), Screen(terminal=terminal)
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setattr(sys, "stderr", err)
    watcher = Watcher(True, progress=True)
    watcher.begins(["key"])
    watcher.handle("output", "key", ("n0/0", "task", [HOSTILE]))
    watcher.handle("progress", "key", ("n0/0", HOSTILE, (1, 2, HOSTILE)))
    watcher.handle("output", "key", ("n0/0", "task", [HOSTILE]))
    watcher.ended("key")
    assert OBEYED.search(err.text) is None, repr(err.text)
    if terminal:
        assert OBEYED.search(out.text) is None, repr(out.text)
    else:
        assert out.text == f"n0/0 | {HOSTILE}\n" * 2


def test_pages_and_notebooks(heads: Callable[[Head], Manifest]) -> None:
    hidden = re.compile(OBEYED.pattern + "|\x1b")
    with open_questions(heads(hostile(HOSTILE))) as asked:
        for path, query in ((page.PATH + "/state", {}), (page.PATH + "/log", {"node": ["n0"], "task": ["k"]})):
            answer = page.answer(page.LiveFleet(asked), path, query)
            assert answer.status == 200 and b"title" in answer.body
            for text in texts(json.loads(answer.body)):
                assert hidden.search(text) is None
    drawn = pictures.fleet(asked.manifest, [HOSTILE], [InstanceInfo(**slot(HOSTILE))], {"n0/0": [HOSTILE]}, HOSTILE)
    assert "title" in drawn and hidden.search(drawn) is None


def texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for each in value.values() if isinstance(value, dict) else value:
            yield from texts(each)
