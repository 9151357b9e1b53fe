"""Progress: what takes longer than a second says what it does and how long it took; on stderr, and nothing sooner."""

from __future__ import annotations

import io
import json
import re
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
from front_ends.on_terminal import on_terminal, plain
from local_fleets.client_fixtures import Fleet, eventually
from rich.console import Console
from rich.text import Text

from skyinfra import folding
from skyinfra.client import Pool, run_script
from skyinfra.client.script import say_that_it_waits
from skyinfra.console import console
from skyinfra.deploy.reporting import Line, Reporter, say
from skyinfra.terminal import progress, tables
from skyinfra.terraform.text import Event


def test_short_work_is_not_mentioned(capsys: pytest.CaptureFixture[str]) -> None:
    with progress.working("plan"):
        pass
    assert capsys.readouterr() == ("", "")


def test_long_work_is_said_while_it_lasts(capsys: pytest.CaptureFixture[str]) -> None:
    said = ""
    with progress.working("plan", unwatched_s=0.01):
        deadline = time.monotonic() + 30
        while not said and time.monotonic() < deadline:
            time.sleep(0.01)
            said = capsys.readouterr().err
    assert said == "plan ...\n"
    found = capsys.readouterr()
    assert found.err.startswith("plan: ") and found.err.endswith(" s\n") and found.out == ""


def test_the_line_of_a_block_changes_on_a_terminal() -> None:
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=100)
    with Line("session", console) as line:
        line.begin("deploying 1 node of aws p5.48xlarge, H100:8, $55.04/h")
        line.take(Event("start", address='module.pool.terraform_data.node["pool-0"]'))
        line.end("ready, 1 node with 8 slots")
    shown = plain(out.getvalue())
    assert "$55.04/h: pool node pool-0" in shown
    # One line stays.
    assert shown.splitlines()[-1].strip() == "" or "session: ready, 1 node with 8 slots (0.0 s)" in shown
    assert shown.count("session: ready") == 1


def test_the_line_of_a_block_is_plain_lines_elsewhere() -> None:
    out = io.StringIO()
    with Line("session", Console(file=out)) as line:
        line.say("compiling its declaration")
        line.begin("deploying 1 node of local, H100:1 (simulated)")
        line.take(Event("start", address="module.pool.terraform_data.head"))
        line.end("ready, 1 node with 1 slot")
    first, last = out.getvalue().splitlines()
    assert first == "session: deploying 1 node of local, H100:1 (simulated) ..."
    assert last.startswith("session: ready, 1 node with 1 slot (")


def test_a_sentence_stands_above_the_line_that_changes() -> None:
    program = (
        "import time\nfrom skyinfra.deploy.reporting import Line, say\n"
        "with Line('session') as line:\n    line.begin('deploying')\n    say('session: its nodes end themselves')\n"
    )
    _, text = on_terminal(program=("-c", program))
    assert re.search(r"(\r|\x1b\[2K|^)session: its nodes end themselves\n", text), text


def test_what_a_message_holds_is_obeyed_by_no_log(capsys: pytest.CaptureFixture[str]) -> None:
    say("a\tb \x1b[31mred")
    folding.say(console(to_stderr=True), Text("a\tb \x1b[31mred"))
    assert capsys.readouterr().err == "a\tb \\x1b[31mred\n" * 2


def test_programs_read_whole_sentences(capsys: pytest.CaptureFixture[str]) -> None:
    tables.say("x" * 5000)
    assert capsys.readouterr().out == "x" * 5000 + "\n"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    "bar",
    [lambda: progress.working("plan"), lambda: Line("session"), lambda: Reporter("deploy quickstart")],
    ids=["working", "line", "reporter"],
)
def test_a_bar_leaves_the_standard_output_where_it_was_sent(
    bar: Callable[[], AbstractContextManager[object]], monkeypatch: pytest.MonkeyPatch
) -> None:
    out, err = io.StringIO(), Terminal()
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setattr(sys, "stderr", err)
    with bar():
        print("a result")
    assert out.getvalue() == "a result\n"
    assert err.getvalue() and "a result" not in err.getvalue()


def test_an_error_is_not_called_done(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ValueError, match="no"), progress.working("plan", unwatched_s=0.0):
        raise ValueError("no")
    assert "plan: " not in capsys.readouterr().err


def test_a_terminal_shows_it_at_once_and_is_left_as_it_was(tmp_path: Path) -> None:
    (tmp_path / "cdktf.json").write_text('{"app": "sleep 0.5; exit 1"}')
    code, text = on_terminal("synth", folder=tmp_path)
    assert code == 1 and "synth: sleep 0.5; exit 1 0:00:0" in plain(text)
    # The line is erased, and the cursor shown again.
    assert text.index("\x1b[?25l") < text.rindex("\x1b[?25h") and text.rindex("\x1b[2K") < text.rindex("error:")


def test_who_waits_for_a_head_is_told(fleet: Fleet, tmp_path: Path) -> None:
    manifest, script = tmp_path / "fleet.json", tmp_path / "train.py"
    manifest.write_text(json.dumps(fleet.manifest.to_json()))
    manifest.chmod(0o600)
    script.write_text("print('done')")
    for words in (["run", "fleet.json", "train.py"], ["jobs", "list", "fleet.json"]):
        text = on_terminal(*words, folder=tmp_path)[1]
        assert "fleet.json: connecting to its head" in plain(text)


def test_who_waits_for_a_slot_is_told(pool: Pool, tmp_path: Path) -> None:
    go, script, waits = tmp_path / "go", tmp_path / "train.py", threading.Event()
    script.write_text(
        f"import os, time\nprint('begun', flush=True)\nwhile not os.path.exists({str(go)!r}): time.sleep(0.1)"
    )
    said: list[str] = []

    def run(on_line: Callable[[str, str], object], on_wait: Callable[[], object], waits_s: float) -> int:
        return run_script(pool, script, on_line=on_line, on_wait=on_wait, waits_s=waits_s)

    def begun(_: str, text: str) -> None:
        said.append(text)

    with ThreadPoolExecutor() as threads:
        others = [threads.submit(run, begun, waits.set, 3600.0) for _ in pool.slots()]
        eventually(lambda: len(said) == len(others) == sum(map(len, running(pool).values())))
        one_more = threads.submit(run, begun, waits.set, 0.0)
        try:
            assert waits.wait(60)
            assert len(said) == len(others)
            # It is no news of one that runs.
            waits.clear()
            for key in [key for tasks in running(pool).values() for key, _, _ in tasks]:
                say_that_it_waits(pool._fleet, key, waits.set)
            assert not waits.is_set()
        finally:
            go.touch()
        assert [each.result(60) for each in (*others, one_more)] == [0] * (len(others) + 1)


def running(pool: Pool) -> dict[str, list[tuple[str, str, float]]]:
    return pool._fleet.from_head(pool._fleet.connection.running())
