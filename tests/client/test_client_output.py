"""What tasks print, and how far they say they are, arrives while they run."""

from __future__ import annotations

import contextlib
import contextvars
import os
import pty
import re
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from local_fleets.client_fixtures import Fleet

import skyinfra as sky
from skyinfra.client import open_pool
from skyinfra.submission import dispatch, watching
from skyinfra.submission.watching import Watcher
from skyinfra.worker import streaming


@sky.compute
def speak(path: str) -> None:
    print("first")
    sys.stdout.flush()
    while not Path(path).exists():
        time.sleep(0.02)
    subprocess.run(["/bin/sh", "-c", "echo from a program; echo to the other stream >&2"], check=True)
    print("no end of line", end="")


@sky.compute
def shout(lines: int) -> None:
    for number in range(lines):
        print(number, "x" * 80)


@sky.compute
def step(total: int) -> int:
    for number in range(total + 1):
        sky.progress(number, total, "epochs")
    return total


@sky.compute
def step_and_speak(total: int) -> int:
    for number in range(total):
        print(number, flush=True)
        time.sleep(0.2)
    return total


@sky.compute
def speak_on_a_full_disk() -> int:
    with contextlib.suppress(OSError), open("full", "wb", buffering=0) as file:  # noqa: PTH123 - a task's code
        while file.write(b"x" * 4096):
            pass
    for number in range(2000):
        print(number, "x" * 80)
    print("to the other stream", file=sys.stderr, flush=True)
    sys.stdout.flush()
    os.unlink("full")  # noqa: PTH108 - as above
    print("there is space again")
    return number


@pytest.mark.skipif(os.geteuid() != 0, reason="root alone mounts a disk that is full soon")
def test_a_full_disk_fails_no_task_that_prints(tmp_path):
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=16m", "skyinfra-small", str(tmp_path)], check=True)
    seen: list[str] = []
    try:
        fleet = Fleet(tmp_path, nodes=("n0",), slots=1)
        with (
            contextlib.closing(fleet),
            open_pool(fleet.manifest, output=lambda slot, line: seen.append(line)) as pool,
        ):
            assert speak_on_a_full_disk() >> pool == 1999
    finally:
        subprocess.run(["umount", "--lazy", str(tmp_path)], check=True)
    assert seen[-1] == "there is space again"


def test_lines_arrive_while_the_task_runs(fleet, tmp_path, wait_until):
    seen: list[tuple[str, str]] = []
    with open_pool(fleet.manifest, output=lambda slot, line: seen.append((slot, line))) as pool:
        slot = pool.slots()[0]
        futures = pool.spread(speak(str(tmp_path / "go")), slots=[slot])
        wait_until(lambda: seen == [(slot.slot, "first")])
        (tmp_path / "go").touch()
        futures[0].result(timeout=60)
        lines = ["first", "from a program", "to the other stream", "no end of line"]
        assert seen == [(slot.slot, line) for line in lines], "all of it is here before the result"


def test_a_flood_is_cut_and_its_end_arrives(fleet):
    seen: list[str] = []
    with open_pool(fleet.manifest, output=lambda slot, line: seen.append(line)) as pool:
        shout(20_000) >> pool
    assert seen[0].startswith("0 x") and seen[-1].startswith("19999 x")
    cut = next(line for line in seen if "bytes of output are left out" in line)
    assert re.search(r"`skyinfra logs stack/pool --task shout-[0-9a-f]{32}` has all of it", cut)
    numbers = [int(line.split()[0]) for line in seen if line.endswith("x")]
    assert numbers == sorted(set(numbers)), "none twice, none torn, in order"


def test_it_is_printed_with_the_slot_in_front(fleet, tmp_path, capfd):
    (tmp_path / "go").touch()
    with open_pool(fleet.manifest) as pool:
        speak(str(tmp_path / "go")) >> pool.select(node="n1")
    out = capfd.readouterr().out.splitlines()
    assert out[0].startswith("n1/")
    assert [line.partition(" | ")[2] for line in out] == [
        "first",
        "from a program",
        "to the other stream",
        "no end of line",
    ]


_who: contextvars.ContextVar[str] = contextvars.ContextVar("who")


def _greet(number: int) -> int:
    print(f"hello {number}")
    return number


def _greet_late(number: int) -> int:
    if number == 60:
        time.sleep(0.3)
    return _greet(number)


def _large() -> bytes:
    sky.progress(1, 2)
    print("large")
    return bytes(100_000)


@pytest.mark.slow
def test_it_is_handed_over_in_the_context_of_who_submitted_the_task(fleet):
    seen: list[str] = []
    with open_pool(fleet.manifest, output=lambda slot, line: seen.append(_who.get("nobody"))) as pool:

        def use(who: str) -> None:
            _who.set(who)
            futures = [pool.submit(_greet, 0), *pool.spread(sky.compute(_greet)(1))]
            assert [future.result() for future in futures] == [0, 1, 1, 1, 1]
            assert list(pool.map(_greet, range(100))) == list(range(100))
            # What waits behind a long one is sent again, and said in the same place.
            assert list(pool.map(_greet_late, range(100))) == list(range(100))
            assert pool.launch(_greet, 2, nodes=1, per_node=2, framework="none") == [2, 2]

        for who in ("one", "two"):
            contextvars.Context().run(use, who)
    assert seen == ["one"] * 207 + ["two"] * 207


def test_nothing_is_kept_of_tasks_that_are_over(fleet, wait_until, monkeypatch):
    monkeypatch.setattr(dispatch, "_LAST_WORDS_S", 0.1)
    with open_pool(fleet.manifest, output=lambda slot, line: None) as pool:
        watcher = pool._fleet.watcher
        assert len(pool.submit(_large).result()) == 100_000
        assert list(pool.map(_greet, range(100))) == list(range(100))
        waiting = [pool.submit(time.sleep, 600) for _ in range(10)]
        wait_until(lambda: sum(map(len, pool.running().values())) == 4)
        for future in waiting:
            future.cancel()
        wait_until(lambda: not (watcher._contexts or watcher._rows or watcher._said or watcher._got))


def test_nothing_is_printed_where_nobody_wants_it(fleet, tmp_path, capfd):
    (tmp_path / "go").touch()
    with open_pool(fleet.manifest, output=False) as pool:
        speak(str(tmp_path / "go")) >> pool
    assert capfd.readouterr().out == ""


def test_a_terminal_that_takes_no_output_does_not_hold_the_connection(monkeypatch):
    read, write = os.pipe()
    monkeypatch.setattr(watching, "_STUCK_S", 0.1)
    watcher = Watcher(True, progress=False)
    with os.fdopen(read, "r") as reader, os.fdopen(write, "w") as writer:
        monkeypatch.setattr(sys, "stdout", writer)
        began = time.monotonic()
        for _ in range(3):
            watcher.handle("output", "k", ("n0/0", "f", ["x" * 70_000]))
        assert time.monotonic() - began < 5
        assert reader.readline() == f"n0/0 | {'x' * 70_000}\n"
        assert reader.readline() == "[2 lines left out here: nobody took them]\n"
        watcher.handle("output", "k", ("n0/0", "f", ["next"]))
        assert reader.readline() == "n0/0 | next\n"
        watching._stdout.settle()


_UNREAD = """
import sys
from skyinfra.submission import watching
watching._STUCK_S = 0.1
watcher = watching.Watcher(True, progress=False)
for name in ("first", "second"):
    watcher.handle("output", "k", ("n0/0", "f", [name + "x" * 100_000]))
sys.stderr.write("the end\\n")
"""


def test_what_nobody_has_read_at_the_end_of_the_program_is_not_lost():
    """As with ``| less``, where the program waits for its reader."""
    with subprocess.Popen(
        [sys.executable, "-c", _UNREAD], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stderr.readline() == "the end\n"
        time.sleep(0.5)
        first, said = process.stdout.read().splitlines()
        assert (first, said) == (f"n0/0 | first{'x' * 100_000}", "[1 line left out here: nobody took them]")
        assert (process.wait(60), process.stderr.read()) == (0, "")


_STOPPED = """
import os, sys, time
from skyinfra.submission import watching
watching._STUCK_S = 0.2
watcher, began = watching.Watcher(True, progress=True), time.monotonic()
for number in range(5):
    watcher.handle("progress", f"k{number}", ("n0/0", "f", (1, 2, "")))
    watcher.handle("output", "k0", ("n0/0", "f", ["x" * 20_000]))
for number in range(5):
    watcher.ended(f"k{number}")
os.write(int(sys.argv[1]), b"in time" if time.monotonic() - began < 5 else b"late")
"""


def test_bars_of_a_terminal_that_takes_no_output_do_not_hold_the_connection():
    main, terminal = pty.openpty()
    said, say = os.pipe()
    command = [sys.executable, "-c", _STOPPED, str(say)]
    with subprocess.Popen(
        command, stdout=terminal, stderr=terminal, pass_fds=[say], env={**os.environ, "TERM": "xterm"}
    ) as process:
        os.close(terminal)
        os.close(say)
        assert os.read(said, 100) == b"in time"
        shown = b""
        with contextlib.suppress(OSError):
            while data := os.read(main, 65536):
                shown += data
        assert process.wait(60) == 0
    os.close(main)
    os.close(said)
    assert re.search(rb"\[\d+ lines left out here: nobody took them\]", shown)


def test_an_exception_of_the_function_that_takes_lines_is_said_once(fleet, capfd):
    with open_pool(fleet.manifest, output=lambda line: None) as pool:
        assert step_and_speak(3) >> pool == 3
    err = capfd.readouterr().err
    assert re.match(r"output= raised an exception for a line of n\d/\d:\nTraceback ", err)
    assert err.count("TypeError: ") == 1


def test_progress_outside_of_a_task_is_nothing():
    assert sky.progress(1, 2) is None


def test_a_note_that_is_no_text_in_utf_8_can_be_sent():
    sent = []
    with streaming.sending_output(None, lambda *what: sent.append(what), str):
        sky.progress(1, 2, os.fsdecode(b"caf\xe9"))
        assert streaming.last_progress().note.encode() == rb"caf\udce9"
    assert sent == [("progress", [1.0, 2.0, r"caf\udce9"])]


def test_how_far_a_task_is_arrives(fleet, monkeypatch):
    told = []
    monkeypatch.setattr(Watcher, "_step", lambda self, key, *what: told.append(what))
    with open_pool(fleet.manifest) as pool:
        assert step(50) >> pool == 50
    assert told[0][1:] == (0, 50, "epochs")
    assert told[-1][1:] == (50, 50, "epochs")
    assert told[0][0].endswith(" step")
    assert len(told) < 20, "it is told now and then only"


@sky.compute
def step_and_wait(gate: str) -> None:
    sky.progress(37, 100, "x" * 500)
    while not os.path.exists(gate):  # noqa: PTH110 - a task's code
        time.sleep(0.01)


@pytest.mark.parametrize("echo", [True, False])
def test_how_far_a_task_is_can_be_asked(fleet, tmp_path, wait_until, echo):
    """Also where its client does not want to hear of it, as that of a job."""
    gate = tmp_path / "gate"
    with open_pool(fleet.manifest, output=echo, progress=echo) as pool:
        wait_until(lambda: not pool.work().progress)
        future = pool.submit(step_and_wait, str(gate))
        wait_until(lambda: pool.work().progress)
        [(slot, told)] = pool.work().progress.items()
        assert slot in {each.slot for each in pool.slots()}
        assert (told.done, told.total, told.note) == (37, 100, "x" * 200)
        gate.touch()
        future.result()
        wait_until(lambda: not pool.work().progress)


def test_lines_say_how_far_a_map_is_where_nobody_watches(fleet, monkeypatch, capfd):
    monkeypatch.setattr(watching, "_LINE_EVERY_S", 0.0)
    with open_pool(fleet.manifest) as pool:
        assert list(pool.map(step, [1] * 5)) == [1] * 5
    err = capfd.readouterr().err
    assert "tasks: 5 of 5 done" in err


def test_progress_can_be_switched_off(fleet, monkeypatch, capfd):
    monkeypatch.setattr(watching, "_LINE_EVERY_S", 0.0)
    with open_pool(fleet.manifest, progress=False) as pool:
        list(pool.map(step, [1] * 5))
    assert capfd.readouterr().err == ""


_WATCHED = """
import pathlib, sys, time
import skyinfra as sky
from skyinfra.client import open_pool
from skyinfra.submission import watching
from skyinfra.protocol.manifest import Manifest
watching._SHOW_AFTER_S = 0.05
def slow(x):
    print("line of", x)
    sky.progress(x, 8, "half way")
    time.sleep(0.2)
    return x
with open_pool(Manifest.load(pathlib.Path(sys.argv[1]))) as pool:
    for x in pool.map(slow, range(8)):
        sys.stdout.write(f"result {x}\\n")
"""


@pytest.mark.parametrize("redirected", [False, True])
def test_bars_where_someone_watches(fleet, tmp_path, redirected):
    import json

    manifest = tmp_path / "fleet.json"
    manifest.write_text(json.dumps(fleet.manifest.to_json()))
    main, terminal = pty.openpty()
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "100", "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", _WATCHED, str(manifest)]
    with (tmp_path / "out").open("wb") as out:
        stdout = out if redirected else terminal
        process = subprocess.Popen(command, stdin=terminal, stdout=stdout, stderr=terminal, env=environment)
    os.close(terminal)
    shown = b""
    with contextlib.suppress(OSError):
        while data := os.read(main, 65536):
            shown += data
    os.close(main)
    assert process.wait(60) == 0, shown.decode()
    text = shown.decode()
    assert "/8" in text
    assert "half way" in text
    said = (tmp_path / "out").read_text() if redirected else text
    for x in range(8):
        assert f"| line of {x}" in said and f"result {x}" in said
    assert not redirected or ("line of" not in text and "result" not in text)
    assert "Traceback" not in text


@pytest.mark.parametrize("size", [0, 1, 31, 32 * 1024, 100_000])
def test_a_tail_gives_every_line_once(tmp_path, size):
    from skyinfra.worker.streaming import _Tail

    file = tmp_path / "log"
    sent: list[str] = []
    file.write_bytes(b"")
    tail = _Tail(str(file), sent.extend, lambda: "key")
    text = "".join(f"{number} ä\r\n" for number in range(size // 8))
    data = text.encode()
    for start in range(0, len(data), 1000):
        with file.open("ab") as stream:
            stream.write(data[start : start + 1000])
        tail.advance()
    tail.advance(final=True)
    assert sent == [f"{number} ä" for number in range(size // 8)]


@pytest.mark.parametrize("cut", range(1, 24))
def test_what_is_held_of_a_line_is_counted_in_bytes(cut):
    """Where a process ends there, its task's next start reads on at the begin of a line."""
    from skyinfra.worker.streaming import Lines

    data, lines = b"one\r\n50%\r\xe2\x82\xac and \xff\r\n\nlast", Lines()
    first = lines.feed(data[:cut])
    begin = cut - lines.held
    assert first + lines.feed(data[cut:], final=True) == ["one", "50%", "\u20ac and \ufffd", "", "last"]
    assert first + Lines().feed(data[begin:], final=True) == ["one", "50%", "\u20ac and \ufffd", "", "last"]


@pytest.mark.parametrize("lost", ["nothing", "the last message", "all"])
def test_what_is_sent_again_is_shown_once(tmp_path, lost):
    """As the client has it, whichever messages were lost with two processes."""
    from skyinfra.engine.deaths import Death
    from skyinfra.submission.watching import Watcher
    from skyinfra.worker import output, streaming

    lines: list[str] = []
    watcher = Watcher(lambda _, line: lines.append(line), progress=False)
    watcher.begins(["k"])
    sent: list[tuple[str, list[str]]] = []
    file = Path(output.file_of("k", tmp_path))
    file.parent.mkdir(parents=True)
    file.write_bytes(b"a\nb\nc\n")
    if lost != "all":
        watcher.handle("output", "k", ("n0/0", "f", ["a", "b"]))
    streaming.send_rest("k", tmp_path, lambda *message: sent.append(message), Death(1, shown=4, sure=0))
    assert sent == [("again", ["a", "b"]), ("output", ["c"])]
    kept = sent[: {"nothing": 2, "the last message": 1, "all": 0}[lost]]
    for kind, what in kept:
        watcher.handle(kind, "k", ("n0/0", "f", what))
    sent.clear()
    with file.open("ab") as stream:
        stream.write(b"d\n")
    streaming.send_rest("k", tmp_path, lambda *message: sent.append(message), Death(1, shown=6, sure=0))
    assert sent == [("again", ["a", "b", "c"]), ("output", ["d"])]
    for kind, what in sent:
        watcher.handle(kind, "k", ("n0/0", "f", what))
    watcher.handle("output", "k", ("n0/0", "f", ["d"]))
    assert lines == ["a", "b", "c", "d", "d"]


def test_lines_are_written_where_no_thread_can_be_started(monkeypatch):
    from skyinfra.submission import watching

    def refuse(_):
        raise RuntimeError("can't start new thread")

    written: list[str] = []
    monkeypatch.setattr(threading.Thread, "start", refuse)
    writer = watching._Writer()
    writer.write(written.append, "x\n")
    writer.settle()
    assert written == ["x\n"]


def test_the_last_lines_of_a_log_end_whatever_a_node_answers():
    from skyinfra.protocol import questions

    asked: list[dict[str, int]] = []

    def ask(**given):
        asked.append(given)
        return {"text": "\r1%", "path": "log", "offset": len(asked)}

    assert questions.last_lines(ask, 5)["text"] == "\r1%" * 5 and len(asked) == 5
    asked.clear()
    endless = questions.last_lines(lambda **given: {"text": "x", "path": "log", "offset": 0}, 5)
    assert endless["text"] == "x" * questions._MOST_PARTS
