"""Scripts on a slot: their lines, their end, and their being ended."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

import skyinfra as sky
from skyinfra.cli.run import GangOptions, ScriptOptions, run_on_slot
from skyinfra.client import open_pool, run_script
from skyinfra.worker import scripts


@pytest.fixture
def run(pool, tmp_path):
    """Runs a text as a script; gives its exit code and its lines."""

    def run(text: str, *args: str, **options) -> tuple[int, list[tuple[str, str]]]:
        path = tmp_path / "script.py"
        path.write_text(text)
        lines: list[tuple[str, str]] = []
        code = run_script(pool, path, args, on_line=lambda *line: lines.append(line), **options)
        return code, lines

    return run


def test_every_line_arrives_before_it_returns(run):
    code, lines = run("for i in range(5000): print(i)")
    assert code == 0
    assert lines == [("stdout", str(i)) for i in range(5000)]


def test_both_streams_arrive_with_the_exit_code(run):
    code, lines = run("import sys; print('out'); print('err', file=sys.stderr); sys.exit(3)")
    assert code == 3
    assert sorted(lines) == [("stderr", "err"), ("stdout", "out")]


def test_a_script_that_ends_by_a_signal_gives_its_negative_number(run):
    assert run("import os; os.kill(os.getpid(), 9)")[0] == -9


def test_the_command_line_ends_as_a_shell_would_for_that_signal(fleet, tmp_path):
    manifest, script = tmp_path / "fleet.json", tmp_path / "script.py"
    manifest.write_text(json.dumps(fleet.manifest.to_json()))
    for text, code in (("import os; os.kill(os.getpid(), 15)", 128 + 15), ("import sys; sys.exit(7)", 7)):
        script.write_text(text)
        assert run_on_slot(str(manifest), script, [], ScriptOptions()) == code


def test_a_script_over_its_time_is_ended(fleet, tmp_path):
    manifest, script = tmp_path / "fleet.json", tmp_path / "script.py"
    manifest.write_text(json.dumps(fleet.manifest.to_json()))
    script.write_text("import time; time.sleep(600)")
    with pytest.raises(sky.TaskTimeout, match=r"script\.py ran for more than 0\.3 s") as caught:
        run_on_slot(str(manifest), script, [], ScriptOptions(timeout=0.3))
    assert "--timeout" in str(caught.value.hint)


def test_options_that_a_script_cannot_have_are_refused():
    with pytest.raises(sky.InvalidField, match=r"--timeout: seconds, more than 0 \(given: 0\)"):
        ScriptOptions(timeout=0)
    with pytest.raises(sky.InvalidField, match="--retries: needs --detach"):
        GangOptions().check(ScriptOptions(retries=2), detach=False)
    with pytest.raises(sky.InvalidField, match="--gpu-memory-gb: cannot be used with --torchrun"):
        GangOptions(torchrun=True).check(ScriptOptions(gpu_memory_gb=20), detach=False)
    GangOptions().check(ScriptOptions(retries=2), detach=True)


def test_a_script_sees_its_arguments_its_slot_and_its_environment(run):
    code, lines = run(
        "import os, sys, skyinfra\n"
        "print(sys.argv[1:], os.environ['CUDA_VISIBLE_DEVICES'], skyinfra.instance_info().slot, os.environ['MINE'])\n"
        "print(os.listdir('.'), __file__ == os.getcwd() + '/script.py')\n"
        "print(os.path.dirname(os.getcwd()) == os.environ['SKYINFRA_NODE_DIR'])",
        "a b",
        "--c",
        node="n1",
        env={"MINE": "x"},
    )
    assert code == 0
    assert lines[0][1] in [f"['a b', '--c'] MIG-n1-{i} n1/{i} x" for i in (0, 1)]
    assert [text for _, text in lines[1:]] == ["['script.py'] True", "True"]


def test_lines_are_cut_at_carriage_returns_and_decoded_whatever_they_hold(run):
    code, lines = run("import sys; sys.stdout.buffer.write(b'10%\\r50%\\r\\n\\xff\\xc3\\xa4\\n\\nno end')")
    assert code == 0
    assert [text for _, text in lines] == ["10%", "50%", "\ufffdä", "", "no end"]


def test_lines_arrive_while_the_script_runs(run, tmp_path, pool):
    gate = tmp_path / "gate"
    path = tmp_path / "waits.py"
    path.write_text(f"import os, time\nprint('first')\nwhile not os.path.exists({str(gate)!r}): time.sleep(0.02)\n")
    seen = []
    # The script ends only when its first line has arrived here.
    assert run_script(pool, path, on_line=lambda _, text: (seen.append(text), gate.touch())) == 0
    assert seen == ["first"]


def test_how_far_its_bar_is_can_be_asked(run, tmp_path, pool, wait_until):
    """The fleet page shows it."""
    path, gate = tmp_path / "bar.py", tmp_path / "gate"
    # A bar is a line once the next one begins.
    bars = "".join(f"\r{n:3}%|###       | {n}/100 [00:03<00:06, 10.0it/s]" for n in (37, 38))
    path.write_text(
        "import pathlib, sys, time\nprint('begins', flush=True)\n"
        f"print({bars!r}, file=sys.stderr, end='', flush=True)\n"
        f"while not pathlib.Path({str(gate)!r}).exists(): time.sleep(0.01)\n"
    )

    def look(_, text):
        if text == "begins":
            # Until the slot says it, its head has what the task before has said.
            wanted = (37, 100, "10.0it/s")
            wait_until(lambda: wanted in [(p.done, p.total, p.note) for p in pool.work().progress.values()])
            gate.touch()

    assert run_script(pool, path, on_line=look) == 0


def ended(pid: str) -> bool:
    """Whether the process is gone, or a zombie that nobody has waited for yet."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


def test_a_script_that_leaves_a_process_behind_ends_with_its_own_end(run, wait_until):
    code, lines = run("import subprocess, sys; print(subprocess.Popen([sys.executable, '-c', 'while True: pass']).pid)")
    assert code == 0
    wait_until(lambda: ended(lines[0][1]))


def test_the_last_words_come_where_a_process_that_was_left_holds_the_streams(run):
    bar = "train:  37%|###       | 37/100 [00:03<00:06, 10.0it/s]"
    code, lines = run(
        "import subprocess, sys; subprocess.Popen(['sleep', '600'])\n"
        f"print({bar!r}, end='', file=sys.stderr, flush=True); print('no end', end='')"
    )
    assert (code, set(lines)) == (0, {("stderr", bar), ("stdout", "no end")})


def test_a_script_ends_with_its_worker_process_and_starts_again(pool, tmp_path, wait_until):
    path = tmp_path / "twice.py"
    path.write_text(
        f"import os, pathlib, time\nfirst = pathlib.Path({str(tmp_path / 'first')!r})\n"
        "print(os.getpid(), os.getppid())\nagain = first.exists()\nfirst.touch()\n"
        "while not again: time.sleep(0.05)\n"
    )
    lines: list[str] = []

    def kill_the_first_worker(_: str, text: str) -> None:
        lines.append(text)
        if len(lines) == 1:
            wait_until((tmp_path / "first").exists)
            os.kill(int(text.split()[1]), signal.SIGKILL)

    assert run_script(pool, path, on_line=kill_the_first_worker) == 0
    assert len(lines) == 2
    wait_until(lambda: ended(lines[0].split()[0]), timeout=20)


def test_an_exception_of_the_callback_ends_the_script(pool, tmp_path, wait_until):
    path = tmp_path / "endless.py"
    path.write_text("import os, time\nprint(os.getpid())\nwhile True: time.sleep(0.1)\n")
    pids: list[str] = []

    def refuse(_: str, text: str) -> None:
        pids.append(text)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_script(pool, path, on_line=refuse)
    wait_until(lambda: ended(pids[0]))


@pytest.mark.slow
def test_a_script_that_ignores_the_request_to_end_is_killed(pool, tmp_path, wait_until):
    path = tmp_path / "stubborn.py"
    path.write_text(
        "import os, signal, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "print(os.getpid())\nwhile True: time.sleep(0.1)\n"
    )
    pids: list[str] = []

    def refuse(_: str, text: str) -> None:
        pids.append(text)
        raise ZeroDivisionError

    started = time.monotonic()
    with pytest.raises(ZeroDivisionError):
        run_script(pool, path, on_line=refuse)
    assert time.monotonic() - started < 30
    wait_until(lambda: ended(pids[0]))


def test_a_node_that_is_not_there_is_refused_with_the_nearest(run):
    with pytest.raises(sky.SlotLost, match="no node of that name") as caught:
        run("", node="n")
    assert "n0" in str(caught.value)


def test_a_file_that_is_not_there_is_an_oserror(pool, tmp_path):
    with pytest.raises(FileNotFoundError):
        run_script(pool, tmp_path / "missing.py", on_line=print)


# The command line ---------------------------------------------------------------------------------------------------


@pytest.fixture
def command(fleet, tmp_path):
    """Starts ``skyinfra run`` with a text as the script."""
    started: list[subprocess.Popen[str]] = []

    def command(text: str, *, errors: bool = False) -> subprocess.Popen[str]:
        (tmp_path / "manifest.json").write_text(json.dumps(fleet.manifest.to_json()))
        (tmp_path / "script.py").write_text(text)
        words = [sys.executable, "-m", "skyinfra.cli", "run", "manifest.json", "script.py"]
        environment = {**os.environ, "PYTHONPATH": str(Path(sky.__file__).parents[1])}
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE if errors else None}
        process = subprocess.Popen(words, cwd=tmp_path, env=environment, text=True, **pipes)
        started.append(process)
        return process

    yield command
    for process in started:
        process.kill()
        process.communicate()


def test_the_exit_code_of_the_command_is_that_of_a_shell(command):
    process = command("import os; os.kill(os.getpid(), 9)")
    assert process.wait(60) == 128 + 9


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_command_that_is_ended_ends_its_script(command, wait_until, number):
    process = command("import os, time\nprint(os.getpid())\nwhile True: time.sleep(0.1)\n")
    pid = process.stdout.readline().strip()
    process.send_signal(number)
    assert process.wait(60) == 128 + number
    wait_until(lambda: ended(pid))


def test_a_script_on_several_slots_sees_their_devices(fleets, tmp_path):
    path = tmp_path / "wide.py"
    path.write_text(
        "import os, sys\nprint(os.environ['CUDA_VISIBLE_DEVICES'], os.environ['A'])\n"
        "tasks = os.listdir(os.environ['SKYINFRA_NODE_DIR'] + '/tasks')\n"
        "print(sum(each.startswith(sys.argv[2] + '-') for each in tasks))\nsys.exit(int(sys.argv[1]))\n"
    )
    with open_pool(fleets(nodes=("n0",), whole=True).manifest) as pool:
        for code, name in ((0, None), (5, "sweep_1")):
            lines: list[str] = []
            shown = name or path.name
            given = {"env": {"A": "b"}, "slots": 2, "on_line": lambda _, text: lines.append(text)}  # noqa: B023
            assert run_script(pool, path, [str(code), shown], name=name, **given) == code
            assert lines == ["GPU-n0-0,GPU-n0-1 b", "2"], "on both slots under its name"


def test_partitions_are_not_put_together(run):
    with pytest.raises(sky.NotSupported, match="slots: a process uses one partition"):
        run("", slots=2)


def test_a_running_script_bears_its_name(run):
    text = "import os\nprint(*os.listdir(os.environ['SKYINFRA_NODE_DIR'] + '/tasks'))"
    for name, shown in ((None, "script.py"), ("sweep_1", "sweep_1")):
        code, lines = run(text, name=name)
        assert code == 0
        assert re.search(rf"\b{re.escape(shown)}-[0-9a-f]{{32}}\.log", lines[0][1])


def test_an_interrupted_script_may_clean_up(pool, tmp_path):
    path = tmp_path / "cleans.py"
    path.write_text(
        "import time\ntry:\n    print('on', flush=True)\n    while True: time.sleep(0.05)\n"
        "finally:\n    time.sleep(0.3); print('cleaned')\n"
    )
    lines: list[str] = []
    where: list[str] = []

    def interrupt(_: str, text: str) -> None:
        lines.append(text)
        if len(lines) == 1:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_script(pool, path, on_line=interrupt, on_interrupt=where.append)
    assert "cleaned" in lines
    assert re.fullmatch("n[01]/[01]", where[0])


def test_an_interrupted_command_says_what_was_stopped(command):
    process = command(
        "import time\nprint('on', flush=True)\ntry:\n    time.sleep(60)\nfinally:\n    print('cleaned')\n", errors=True
    )
    assert process.stdout.readline() == "on\n"
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "cleaned" in out
    assert re.search(r"interrupted script\.py on slot n[01]/[01]: it may clean up; Ctrl-C again ends it at once\n", err)
    assert "script.py was stopped\n" in err


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--", "ls", "-l"], "`skyinfra exec fleet.json -- ls -l` runs a program on a node"),
        (["scrpt.py"], "Did you mean script.py?"),
    ],
)
def test_what_is_no_script(fleet, tmp_path, monkeypatch, words, says):
    monkeypatch.chdir(tmp_path)
    Path("script.py").touch()
    words = [word for word in words if word != "--"]
    with pytest.raises(sky.InvalidField, match=re.escape(says)):
        run_on_slot("fleet.json", Path(words[0]), words[1:], ScriptOptions())


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"slots": 2, "torchrun": True}, "--slots: cannot be used with --torchrun"),
        ({"slots": 2, "detach": True}, "--slots: a job takes one slot"),
        ({"name": "a", "torchrun": True}, "--name: cannot be used with --torchrun"),
        ({"name": "a b"}, "name: at most 63"),
    ],
)
def test_options_that_do_not_go_together(given, says):
    with pytest.raises(sky.InvalidField, match=says):
        options = ScriptOptions(slots=given.get("slots", 1), name=given.get("name"))
        GangOptions(given.get("torchrun", False)).check(options, detach=given.get("detach", False))


def test_a_script_that_prints_without_end_waits(monkeypatch):
    """The head and the client would keep all that comes faster than somebody takes it."""
    sent: list[list[str]] = []
    worker = SimpleNamespace(log_event=lambda topic, message: sent.extend(message[2]))
    monkeypatch.setattr(scripts, "get_worker", lambda: worker)
    line = "x" * 99
    with subprocess.Popen(["yes", line], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        timer = threading.Timer(1, process.kill)
        timer.start()
        began = time.monotonic()
        scripts.stream(process, "topic", "run")
        assert time.monotonic() - began < 10
        timer.join()
    size = sum(len(text) for _, text in sent)
    assert size < 2 * scripts._MOST_PER_S, "much less than it can print"
    assert size > scripts._MOST_PER_S / 20


def test_a_script_that_ends_soon_waits_for_nothing(monkeypatch):
    sent: list[list[str]] = []
    worker = SimpleNamespace(log_event=lambda topic, message: sent.extend(message[2]))
    monkeypatch.setattr(scripts, "get_worker", lambda: worker)
    monkeypatch.setattr(scripts, "_MOST_PER_S", 1)
    with subprocess.Popen(["echo", "x" * 10_000], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        began = time.monotonic()
        scripts.stream(process, "topic", "run")
        assert time.monotonic() - began < 5
    assert sent == [["stdout", "x" * 10_000]]
