"""Secrets that stand in no environment: the task has them, no program that it starts, and no other process looks in."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import skyinfra as sky
from skyinfra.protocol.calls import Header, SecretUse
from skyinfra.tasks.secrets import Secrets
from skyinfra.worker import secrets

VALUE = "t0p-s3cret"
HELD = sky.Secret("A_TOKEN", environment=False)
GET_DUMPABLE, SET_DUMPABLE = 3, 4


@pytest.fixture
def inside(capfd: pytest.CaptureFixture[str]) -> Iterator[None]:
    """As in a task that has A_TOKEN beside its environment, and ANOTHER in it."""
    values = {"A_TOKEN": VALUE, "ANOTHER": "an0ther"}
    with secrets.given(values, secrets.Masker(values.values()), held=["A_TOKEN"]):
        yield


def dumpable() -> int:
    return int(ctypes.CDLL(None).prctl(GET_DUMPABLE, 0, 0, 0, 0))


def environment_of(pid: int | str) -> bytes:
    return Path(f"/proc/{pid}/environ").read_bytes()


def test_the_task_has_it_and_its_programs_have_not(inside: None) -> None:
    assert HELD.value == sky.Secret("A_TOKEN").value == VALUE
    assert "A_TOKEN" not in os.environ and os.environ["ANOTHER"] == "an0ther"
    program = subprocess.run(["env"], capture_output=True, text=True, check=True)
    assert "an0ther" in program.stdout and VALUE not in program.stdout


def test_a_program_gets_it_by_a_file_in_memory(inside: None) -> None:
    with HELD.descriptor() as number:
        script = f"cat /dev/fd/{number}; cat /dev/fd/{number}; tr '\\0' ' ' < /proc/self/environ"
        shown = subprocess.run(["sh", "-c", script], pass_fds=[number], capture_output=True, text=True, check=True)
        assert shown.stdout.startswith(VALUE * 2) and shown.stdout.count(VALUE) == 2
        other = subprocess.run(["cat", f"/dev/fd/{number}"], capture_output=True, check=False)
        assert other.returncode != 0  # who was not given it has it not
        with pytest.raises(PermissionError):
            os.write(number, b"x")
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(number)


@pytest.fixture(params=[1, 0])
def before(request: pytest.FixtureRequest) -> Iterator[int]:
    """Whether this process is open to others of its account, as it is in the test."""
    found = dumpable()
    ctypes.CDLL(None).prctl(SET_DUMPABLE, request.param, 0, 0, 0)
    yield request.param
    ctypes.CDLL(None).prctl(SET_DUMPABLE, found, 0, 0, 0)


def test_it_ends_with_its_task(before: int) -> None:
    values = {"A_TOKEN": VALUE}
    with secrets.given(values, secrets.Masker(values.values()), held=["A_TOKEN"]):
        assert dumpable() == 0
    assert dumpable() == before
    with pytest.raises(sky.SecretNotFound):
        _ = HELD.value
    with secrets.given(values, secrets.Masker(values.values())):
        assert os.environ["A_TOKEN"] == VALUE and dumpable() == before  # a task that does not ask is as before
    assert "A_TOKEN" not in os.environ


PROGRAM = """
import ctypes, os, sys, time
from skyinfra.worker import secrets
secrets._libc()
if os.getuid() == 0:  # who looks has no rights of root
    os.setgroups([]), os.setgid(65534), os.setuid(65534)
    ctypes.CDLL(None).prctl(4, 1, 0, 0, 0)  # which the change of the account has taken away
values = {"A_TOKEN": "t0p-s3cret"}
with secrets.given(values, secrets.Masker(values.values()), held=["A_TOKEN"] if sys.argv[1] == "held" else []):
    child = os.fork()
    if child == 0:
        time.sleep(600)
    os.write(3, f"{os.getpid()} {child}\\n".encode())
    sys.stdin.read()
"""
LOOKS = """
import os, sys
if os.getuid() == 0:
    os.setgroups([]), os.setgid(65534), os.setuid(65534)
for part in ("environ", "mem"):
    try:
        os.close(os.open(f"/proc/{sys.argv[1]}/{part}", os.O_RDONLY))
        print("open")
    except PermissionError:
        print("closed")
"""


@pytest.mark.parametrize(("how", "found"), [("held", "closed"), ("variables", "open")])
def test_another_task_of_the_account_does_not_look_in(how: str, found: str) -> None:
    """Where tasks are of one account. That the runner sees forks of it, to end what a task leaves, stays so."""
    reading, writing = os.pipe()
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "HOME": "/nonexistent"}

    def third() -> None:
        os.dup2(writing, 3)

    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM, how], stdin=subprocess.PIPE, env=environment, preexec_fn=third, close_fds=False
    ) as process:
        os.close(writing)
        try:
            line, child = b"", 0
            while not line.endswith(b"\n"):
                part = os.read(reading, 100)
                assert part, "it ended"
                line += part
            pid, child = map(int, line.split())

            def look(at: int) -> list[str]:
                program = [sys.executable, "-c", LOOKS, str(at)]
                return subprocess.run(program, capture_output=True, text=True, check=True).stdout.split()

            assert look(pid)[0] == found and look(child)[0] == "open"
            if how == "held":
                assert look(pid) == ["closed", "closed"]
        finally:
            os.close(reading)
            if child:
                os.kill(child, signal.SIGKILL)
            assert process.stdin is not None
            process.stdin.close()


def test_on_its_way() -> None:
    made = Secrets("topic", [])
    os.environ["A_TOKEN"], os.environ["ANOTHER"] = VALUE, "an0ther"
    try:
        plain, held = made.uses([HELD, "ANOTHER"])
        # Whoever asks for it once has it in no environment, whatever else names it.
        assert Secrets("topic", ["A_TOKEN"]).uses([HELD])[0].held and Secrets("t", [HELD]).uses(["A_TOKEN"])[0].held
    finally:
        del os.environ["A_TOKEN"], os.environ["ANOTHER"]
    assert (held.name, held.held, plain.name, plain.held) == ("A_TOKEN", True, "ANOTHER", False)
    sent = Header("key", "name", "topic", secrets=(held, plain)).dumps()
    assert Header.loads(sent).secrets == (held, plain)
    # Nodes of the version before get nothing that they do not know where nobody asks for it.
    assert "held" not in json.loads(Header("key", "name", "topic", secrets=(plain,)).dumps())["secrets"][0]
    assert isinstance(held, SecretUse) and VALUE not in sent.decode()
    assert HELD.__reduce__()[1] == ("A_TOKEN", None, False) and sky.Secret("B_KEY").__reduce__()[1] == ("B_KEY", None)
    assert repr(HELD) == "Secret('A_TOKEN', environment=False)"


def test_an_image_has_variables_alone() -> None:
    with pytest.raises(sky.InvalidField, match=r"Image\.env\.A_TOKEN"):
        sky.Image(env={"A_TOKEN": HELD})
