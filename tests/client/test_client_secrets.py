"""Secrets of tasks on a fleet: the task has them, and nothing else does: no file, no process, no line, no exception."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path

import pytest
from checks.leaks import files_with, processes_with

import skyinfra as sky
from skyinfra.cli.run import GangOptions, ScriptOptions, run_gang, run_on_slot
from skyinfra.client import connect, open_pool


@pytest.fixture
def secret(monkeypatch: pytest.MonkeyPatch) -> str:
    """The value of A_TOKEN of this client, which no other test knows."""
    value = f"t0p-{uuid.uuid4().hex}"
    monkeypatch.setenv("A_TOKEN", value)
    return value


@sky.compute(secrets=["A_TOKEN"])
def token() -> str:
    return os.environ["A_TOKEN"]


@sky.compute(secrets=[sky.Secret("A_TOKEN", environment=False)])
def beside_the_environment() -> tuple[str, list[str], str]:
    """The length of the value, the variables with it, and what a program reads of it."""
    key = sky.Secret("A_TOKEN")
    print("it has", key.value)
    variables = [name for name, value in os.environ.items() if key.value in value]
    program = subprocess.run(["env"], capture_output=True, text=True, check=True).stdout
    with key.descriptor() as number:
        read = subprocess.run(["wc", "-c", f"/dev/fd/{number}"], pass_fds=[number], capture_output=True, check=True)
    return str(len(key.value)), variables + [key.value] * (key.value in program), read.stdout.split()[0].decode()


@sky.compute(secrets=["A_TOKEN"])
def leaves_a_program(path: str) -> None:
    """Leaves a program in a session of its own, whose parent has ended, with the secret in its environment."""
    script = f"setsid sh -c 'echo $$ > {path}; trap \"\" HUP INT TERM; while :; do sleep 1; done' & exit 0"
    subprocess.run(["sh", "-c", script], check=True)
    while not Path(path).exists() or not Path(path).read_text().strip():
        time.sleep(0.01)


@sky.compute
def environment() -> dict[str, str]:
    return dict(os.environ)


@sky.compute
def length(given: sky.Secret) -> int:
    return len(given.value)


@sky.compute(secrets=["A_TOKEN"])
def speak(how: str) -> int:
    value = os.environ["A_TOKEN"]
    if how == "pieces":
        for piece in ("first ", value[:10], value[10:], " last"):
            print(piece, end="", flush=True)
            time.sleep(0.25)
        print(flush=True)
    elif how == "program":
        subprocess.run(["/bin/sh", "-c", "echo $A_TOKEN; echo $A_TOKEN >&2"], check=True)
    elif how == "native":
        os.write(2, f"native {value}\n".encode())
    else:
        sky.progress(1, 2, f"with {value}")
        time.sleep(0.5)
    return os.getpid()


@sky.compute(secrets=["A_TOKEN"])
def fail() -> None:
    try:
        raise KeyError(os.environ["A_TOKEN"])
    except KeyError as error:
        error.add_note(f"a note about {os.environ['A_TOKEN']}")
        raise RuntimeError(f"refused: {os.environ['A_TOKEN']}", [os.environ["A_TOKEN"]]) from error


@sky.compute(secrets=["A_TOKEN"])
def wait_for(path: str) -> int:
    """Leaves the id of its process, and waits to be let through."""
    # Its own program has the secret, as every process of the task.
    with Path(path).open("a") as file, subprocess.Popen(["sleep", "600"]) as program:
        file.write(f"{os.getpid()} {program.pid}\n")
        file.flush()
        print("it runs with", os.environ["A_TOKEN"], flush=True)
        while not Path(f"{path}.open").exists():
            time.sleep(0.01)
        program.kill()
    return len(os.environ["A_TOKEN"])


@sky.compute(secrets=["A_TOKEN"])
def die_once(path: str) -> str:
    if not Path(path).exists():
        Path(path).touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return os.environ["A_TOKEN"]


@sky.compute(timeout=0.3, secrets=["A_TOKEN"])
def hold() -> None:
    ctypes.PyDLL(None).sleep(600)  # native code that holds the interpreter


@sky.cls
class Hub:
    def __init__(self, token: sky.Secret) -> None:
        self.token = token

    def length(self) -> int:
        return len(self.token.value)


def rank(given: sky.Secret) -> tuple[int, int]:
    print("rank with", given.value)
    if os.environ.get("FAILS"):
        raise RuntimeError(f"no such token: {given.value}")
    return sky.gang().rank, len(given.value)


def test_a_task_has_its_secret_and_the_next_one_has_not(pool, secret):
    assert token() >> pool == secret
    for seen in environment() @ pool:
        assert secret not in seen.values() and "SKYINFRA_SECRETS" not in seen
    assert length(sky.Secret("A_TOKEN")) @ pool == [len(secret)] * 4
    assert Hub(sky.Secret("A_TOKEN")).length() @ pool == [len(secret)] * 4


def test_a_task_whose_secret_is_nowhere_is_not_sent(pool, monkeypatch):
    monkeypatch.delenv("A_TOKEN", raising=False)
    with pytest.raises(sky.SecretNotFound, match="--secret A_TOKEN=@FILE"):
        token() >> pool
    with pytest.raises(sky.SecretNotFound, match=r'secrets=\["A_TOKEN"\]'):
        sky.compute(lambda: sky.Secret("A_TOKEN").value)() >> pool


def test_all_tasks_of_a_connection_have_its_secrets(fleet, secret, tmp_path):
    (tmp_path / "key").write_text("the key of a file\n")
    with open_pool(fleet.manifest, secrets=["A_TOKEN", sky.Secret("B_KEY", file=str(tmp_path / "key"))]) as pool:
        found = environment() >> pool
        assert found["A_TOKEN"] == secret and found["B_KEY"] == "the key of a file"
        many = list(pool.map(lambda number: (number, os.environ["A_TOKEN"]), range(30)))
        assert many == [(number, secret) for number in range(30)]
    with open_pool(fleet.manifest) as other:
        assert secret not in (environment() >> other).values()


def test_a_value_that_changes_is_the_new_one_for_the_next_task(pool, secret, monkeypatch):
    assert token() >> pool == secret
    monkeypatch.setenv("A_TOKEN", "another-value")
    assert token() >> pool == "another-value"


@pytest.mark.parametrize("how", ["pieces", "program", "native", "progress"])
def test_what_a_task_prints_is_masked(fleet, secret, how):
    lines: list[str] = []
    with open_pool(fleet.manifest, output=lambda slot, line: lines.append(line)) as pool:
        speak(how) >> pool
    expected = {"pieces": ["first *** last"], "program": ["***", "***"], "native": ["native ***"], "progress": []}
    assert lines == expected[how]
    assert files_with(secret, fleet.root) == []


def test_an_exception_is_masked_with_those_before_it(pool, secret):
    with pytest.raises(RuntimeError) as raised:
        fail() >> pool
    error = raised.value
    assert error.args == (f"refused: {'*' * len(secret)}", ["*" * len(secret)])
    assert isinstance(error.__cause__, KeyError) and error.__cause__.args == ("*" * len(secret),)
    assert error.__cause__.__notes__ == [f"a note about {'*' * len(secret)}"]
    assert "fail" in [entry.name for entry in raised.traceback]


def test_no_file_and_no_other_process_has_it_while_the_task_runs(fleet, secret, tmp_path, wait_until):
    path = tmp_path / "run"
    with open_pool(fleet.manifest) as pool:
        # Large arguments are blobs on the disks of head and node.
        future = pool.submit(wait_for(str(path)))
        assert length(sky.Secret("A_TOKEN")) >> pool == len(secret)
        large = pool.submit(sky.compute(secrets=["A_TOKEN"])(lambda data: len(data)), b"x" * 2**21)
        assert large.result() == 2**21
        wait_until(lambda: path.exists() and path.read_text().endswith("\n"))
        worker, program = map(int, path.read_text().split())
        wait_until(lambda: any("it runs" in file.read_text() for file in fleet.root.glob("*/tasks/*.log")))
        assert files_with(secret, fleet.root, tmp_path) == []
        assert set(processes_with(secret)) == {program}
        # The worker has it in its memory, and not in the environment that the kernel shows.
        assert secret.encode() not in Path(f"/proc/{worker}/environ").read_bytes()
        Path(f"{path}.open").touch()
        assert future.result() == len(secret)
    assert processes_with(secret) == {}
    assert files_with(secret, fleet.root) == []


def test_the_head_forgets_it_with_its_client(fleet, secret):
    with open_pool(fleet.manifest) as other:

        def kept() -> int:
            return other._fleet.in_loop(other._fleet.connection.head.test_secrets())

        before = kept()
        with open_pool(fleet.manifest) as pool:
            assert token() >> pool == secret
            assert kept() == before + 1
        assert kept() == before


@pytest.mark.slow
def test_the_stacks_of_a_task_that_holds_the_interpreter_are_kept(fleet, secret):
    with open_pool(fleet.manifest) as pool, pytest.raises(sky.TaskTimeout):
        hold() >> pool
    assert any("in hold" in file.read_text() for file in fleet.root.glob("*/tasks/hold-*.log"))
    assert files_with(secret, fleet.root) == []


def test_a_task_starts_again_with_it_where_its_process_died(pool, secret, tmp_path):
    assert die_once(str(tmp_path / "died")) >> pool == secret


def test_a_client_gives_it_again_to_a_head_that_starts_anew(fleets, secret):
    fleet = fleets(nodes=("n0",), slots=1)
    with open_pool(fleet.manifest) as pool:
        assert token() >> pool == secret
        head = pool._fleet
        head.in_loop(head.connection.head.test_forget_secrets())
        assert token() >> pool == secret


def test_the_secrets_of_an_image_are_those_of_each_client(fleets, secret, monkeypatch):
    fleet = fleets(nodes=("n0",), slots=1, secrets={"HUB": "A_TOKEN"})
    with open_pool(fleet.manifest) as pool:
        assert (environment() >> pool)["HUB"] == secret
        monkeypatch.setenv("A_TOKEN", "mine-of-another")
        with open_pool(fleet.manifest) as other:
            assert (environment() >> other)["HUB"] == "mine-of-another"
            monkeypatch.delenv("A_TOKEN")
            with pytest.raises(sky.SecretNotFound, match="A_TOKEN"):
                environment() >> other


@pytest.mark.slow
def test_ranks_have_it_and_show_it_to_nobody(fleet, secret, wait_until):
    lines: list[str] = []
    with open_pool(fleet.manifest) as pool:
        found = pool.launch(
            rank,
            sky.Secret("A_TOKEN"),
            nodes=1,
            framework="none",
            on_line=lambda rank, stream, text: lines.append(text),
        )
        assert found == [(0, len(secret)), (1, len(secret))]
        assert lines == ["rank with ***"] * 2
        with pytest.raises(RuntimeError) as raised:
            pool.launch(rank, sky.Secret("A_TOKEN"), nodes=1, per_node=1, framework="none", env={"FAILS": "1"})
        assert str(raised.value) == f"no such token: {'*' * len(secret)}"
    assert files_with(secret, fleet.root) == []


@pytest.fixture
def manifest(fleet, tmp_path) -> str:
    path = tmp_path / "fleet.json"
    path.write_text(json.dumps(fleet.manifest.to_json()))
    return str(path)


SCRIPT = """
import os, subprocess, sys
print("here", os.environ["A_TOKEN"], len(os.environ["A_TOKEN"]))
print(open("/proc/self/cmdline").read().count(os.environ["A_TOKEN"]))
sys.stdout.flush()
subprocess.run(["/bin/sh", "-c", "echo $A_TOKEN >&2"])
raise RuntimeError("no such token: " + os.environ["A_TOKEN"])
"""


@pytest.mark.parametrize("source", ["environment", "file"])
def test_a_script_has_the_secrets_of_its_command_line(fleet, manifest, tmp_path, monkeypatch, capfd, secret, source):
    script, given = tmp_path / "script.py", "A_TOKEN"
    script.write_text(SCRIPT)
    if source == "file":
        monkeypatch.delenv("A_TOKEN")
        (tmp_path / "token").write_text(f"{secret}\n")
        given = f"A_TOKEN=@{tmp_path / 'token'}"
    assert run_on_slot(manifest, script, [], ScriptOptions(alone=True, secret=(given,))) == 1
    out, err = capfd.readouterr()
    assert secret not in out + err
    assert out == f"here *** {len(secret)}\n0\n"
    assert err.startswith("***\n") and err.endswith("RuntimeError: no such token: ***\n")
    assert files_with(secret, fleet.root) == []


@pytest.mark.slow
def test_ranks_of_a_script_have_them_too(fleet, manifest, tmp_path, capfd, secret):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    goes = ScriptOptions(alone=True, secret=("A_TOKEN",))
    assert run_gang(manifest, script, [], goes, GangOptions(True, 1, 1)) == 1
    out, err = capfd.readouterr()
    assert secret not in out + err
    assert f"0: here *** {len(secret)}\n" in out and "0: RuntimeError: no such token: ***\n" in err
    assert files_with(secret, fleet.root) == []


def test_a_connection_names_its_secrets(manifest, secret):
    with connect(manifest, secrets=["A_TOKEN"]) as pool:
        assert (environment() >> pool)["A_TOKEN"] == secret


def test_a_script_that_is_interrupted_leaves_no_secret(fleet, manifest, tmp_path, secret, wait_until):
    script, started = tmp_path / "script.py", tmp_path / "started"
    script.write_text(f"import time\nopen({str(started)!r}, 'w').close()\ntime.sleep(600)\n")
    program = [sys.executable, "-c", "from skyinfra.cli import main; main()", "run", "--alone", "--secret", "A_TOKEN"]
    process = subprocess.Popen([*program, manifest, str(script)], stdout=subprocess.DEVNULL)
    wait_until(started.exists)
    # The client has it in its own environment, from its shell; the script, as the task's process.
    holders = processes_with(secret, but=[process.pid])
    assert len(holders) == 1 and "script.py" in next(iter(holders.values()))
    process.send_signal(signal.SIGINT)
    process.wait(60)
    wait_until(lambda: not processes_with(secret))


def test_a_secret_beside_the_environment(pool: sky.Pool, secret: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert beside_the_environment() >> pool == (str(len(secret)), [], str(len(secret)))
    assert secret not in capfd.readouterr().out
    assert secret not in str(environment() >> pool)
    with pytest.raises(sky.NotSupported, match="secret A_TOKEN"):
        beside_the_environment.options(slots=2)() >> pool


def test_a_program_that_a_task_leaves_ends_with_it(pool: sky.Pool, secret: str, tmp_path: Path) -> None:
    """In a session of its own, deaf to signals, with no parent: the next task could read the secret in /proc."""
    leaves_a_program(str(tmp_path / "pid")) >> pool
    pid = int((tmp_path / "pid").read_text())
    assert not Path(f"/proc/{pid}").exists()
    assert processes_with(secret) == {}


LEAVING = """
import pathlib, subprocess, sys, time
script = "setsid sh -c 'echo $$ > " + sys.argv[1] + "; trap \\"\\" HUP INT TERM; while :; do sleep 1; done' & exit 0"
subprocess.run(["sh", "-c", script], check=True)
while not pathlib.Path(sys.argv[1]).exists() or not pathlib.Path(sys.argv[1]).read_text().strip():
    time.sleep(0.01)
"""


@pytest.mark.parametrize("how", ["script", pytest.param("rank", marks=pytest.mark.slow)])
def test_a_program_that_a_script_leaves_ends_with_it(
    manifest: str, secret: str, tmp_path: Path, how: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """As that of a task: it has left the group and the session of the script, and of the rank."""
    script, pid = tmp_path / "script.py", tmp_path / "pid"
    script.write_text(LEAVING)
    options = ScriptOptions(alone=True, secret=("A_TOKEN",))
    if how == "script":
        assert run_on_slot(manifest, script, [str(pid)], options) == 0
    else:
        assert run_gang(manifest, script, [str(pid)], options, GangOptions(True, 1, 1)) == 0
    assert not Path(f"/proc/{int(pid.read_text())}").exists()
    assert processes_with(secret) == {}
