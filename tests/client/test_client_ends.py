"""Client programs that end: SIGTERM is as Ctrl-C, and after SIGKILL their slots are free within seconds."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from support import python_path

from skyinfra.client import Pool
from skyinfra.engine import dask_client

TASK = """
import json, os, signal, sys, time
import skyinfra as sky
from skyinfra.client import open_pool
from skyinfra.protocol.manifest import Manifest

manifest = Manifest.read(json.loads(sys.stdin.readline()))

@sky.compute
def hold(folder):
    note = os.path.join(folder, str(os.getpid()))
    open(note, "w").close()
    try:
        while True:
            time.sleep(0.05)
    finally:
        os.rename(note, note + ".ended")
"""
BLOCK = """
with open_pool(manifest) as pool:
    for _ in pool.map(hold, [sys.argv[1]] * 4):
        pass
"""
PLAIN = """
pool = open_pool(manifest)
pool.submit(hold, sys.argv[1]).result()
"""
COROUTINE = """
import asyncio, functools
from skyinfra.client.asynchronous import Connecting

async def main():
    async with Connecting(functools.partial(open_pool, manifest)) as pool:
        await (hold(sys.argv[1]) >> pool)

asyncio.run(main())
"""
HELD = """
import os, sys, time

open(os.path.join(sys.argv[1], str(os.getpid())), "w").close()
time.sleep(300)
"""
OWN = """
signal.signal(signal.SIGTERM, lambda *_: os._exit(7))
with open_pool(manifest) as pool:
    pool.submit(hold, sys.argv[1]).result()
"""


class Client:
    """The program *text*, with tasks that hold slots."""

    def __init__(self, text: str, manifest: object, folder: Path, *, nohup: bool = False) -> None:
        self.folder = folder
        folder.mkdir()
        self.process = subprocess.Popen(
            [*(["nohup"] if nohup else []), sys.executable, "-c", TASK + textwrap.dedent(text), str(folder)],
            env={**os.environ, "PYTHONPATH": python_path()},
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            # A group of its own, as `timeout` has it: the signal comes twice.
            start_new_session=True,
        )
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(manifest) + "\n")
        self.process.stdin.flush()

    def running(self) -> list[str]:
        return [name for name in os.listdir(self.folder) if name.isdigit()]  # noqa: PTH208

    def ended(self) -> list[str]:
        return [name for name in os.listdir(self.folder) if name.endswith(".ended")]  # noqa: PTH208


@pytest.fixture
def client(fleet, tmp_path: Path) -> Iterator[object]:
    made: list[Client] = []

    def make(text: str, **options: bool) -> Client:
        made.append(Client(text, fleet.manifest.to_json(), tmp_path / f"client{len(made)}", **options))
        return made[-1]

    yield make
    for each in made:
        each.process.kill()
        each.process.wait()
        each.process.stdin.close()
        each.process.stderr.close()


@pytest.mark.parametrize(
    "text",
    [BLOCK, pytest.param(PLAIN, marks=pytest.mark.slow), pytest.param(COROUTINE, marks=pytest.mark.slow)],
    ids=["block", "plain", "coroutine"],
)
def test_sigterm_ends_a_program_and_its_tasks(client, wait_until, text: str) -> None:
    program = client(text)
    wait_until(lambda: len(program.running()) == (4 if text is BLOCK else 1))
    # At each moment of its end, also of Python's own.
    while program.process.poll() is None:
        program.process.send_signal(signal.SIGTERM)
        time.sleep(0.005)
    assert program.process.returncode == 128 + signal.SIGTERM
    assert "Traceback" not in program.process.stderr.read()
    if text is PLAIN:  # nothing closes the pool
        wait_until(lambda: not program.running(), timeout=30)
    assert program.running() == []
    assert program.ended()


def test_sigterm_ends_a_command_and_what_it_has_begun(fleet, tmp_path: Path, wait_until) -> None:
    """`timeout 60 skyinfra run` sends it twice: the second one left the script on its slot."""
    (tmp_path / "held").mkdir()
    (tmp_path / "fleet.json").write_text(json.dumps(fleet.manifest.to_json()))
    (tmp_path / "fleet.json").chmod(0o600)
    (tmp_path / "hold.py").write_text(HELD)
    command = [sys.executable, "-m", "skyinfra.cli", "run", "--alone", "fleet.json", "hold.py", str(tmp_path / "held")]
    environment = {**os.environ, "PYTHONPATH": python_path()}
    process = subprocess.Popen(command, cwd=tmp_path, env=environment, stderr=subprocess.PIPE, text=True)
    wait_until(lambda: list((tmp_path / "held").iterdir()), timeout=60)
    while process.poll() is None:
        process.send_signal(signal.SIGTERM)
        time.sleep(0.005)
    assert process.stderr is not None and "Traceback" not in process.stderr.read()
    process.stderr.close()
    assert process.returncode == 128 + signal.SIGTERM
    [held] = (tmp_path / "held").iterdir()
    wait_until(lambda: not psutil.pid_exists(int(held.name)), timeout=30)


@pytest.mark.slow
@pytest.mark.parametrize("nohup", [False, True])
def test_a_terminal_that_closes_ends_a_program_unless_it_ignores_that(client, wait_until, nohup: bool) -> None:
    program = client(BLOCK, nohup=nohup)
    wait_until(lambda: len(program.running()) == 4)
    for number in (signal.SIGHUP, signal.SIGTERM):
        program.process.send_signal(number)
        time.sleep(0.1)
    assert program.process.wait(60) == 128 + (signal.SIGTERM if nohup else signal.SIGHUP)
    assert "Traceback" not in program.process.stderr.read()
    wait_until(lambda: not program.running(), timeout=30)


@pytest.mark.slow
def test_a_program_keeps_its_own_handler(client, wait_until) -> None:
    program = client(OWN)
    wait_until(program.running)
    program.process.send_signal(signal.SIGTERM)
    assert program.process.wait(60) == 7


def test_the_slots_of_a_program_that_is_killed_are_free(client, wait_until, pool: Pool) -> None:
    """Within 10 s, by the clock of the head: however long this machine takes for all else."""

    program = client(BLOCK)
    wait_until(lambda: len(program.running()) == 4)
    program.process.kill()
    # They were kept for 46 s, for a client that connects again.
    wait_until(lambda: not program.running(), timeout=60)
    assert len(program.ended()) == 4
    ends = pool._fleet.in_loop(pool._fleet.connection.head.test_ends())
    [(keys, left)] = [(keys, when) for keys, when in ends if len(keys) == 4][-1:]
    ended = [when for each, when in ends if len(each) == 1 and each[0] in keys]
    assert len(ended) == 4 and max(ended) - left < 10
    assert list(pool.map(len, [b"x"] * 4)) == [1] * 4


@pytest.mark.slow
def test_a_client_that_connects_again_keeps_its_tasks(fleet, pool: Pool, tmp_path: Path, wait_until) -> None:
    held = tmp_path / "held"
    held.mkdir()

    def hold(folder: str) -> int:
        import time

        open(os.path.join(folder, str(os.getpid())), "x").close()  # noqa: PTH118, PTH123
        while not os.path.exists(os.path.join(folder, "open")):  # noqa: PTH110, PTH118
            time.sleep(0.01)
        return os.getpid()

    future = pool.submit(hold, str(held))
    wait_until(lambda: list(held.iterdir()))
    connection = pool._fleet.connection

    async def close() -> None:
        connection.client.scheduler_comm.comm.abort()

    pool._fleet.loop.run(close())
    wait_until(lambda: connection.alive and dask_client.client_stream(connection.client) is connection._prepared)

    async def wait() -> None:
        await asyncio.sleep(7)  # longer than a client has to be back

    pool._fleet.loop.run(wait())
    (held / "open").touch()
    assert str(future.result(timeout=60)) in {each.name for each in held.iterdir()}
    assert len(list(held.iterdir())) == 2


@pytest.mark.parametrize(
    ("error", "cut"),
    [
        (OSError(errno.ETIMEDOUT, "no answer"), True),
        (OSError(errno.EHOSTUNREACH, "no way"), True),
        (ConnectionResetError(errno.ECONNRESET, "reset"), False),
        (None, False),
    ],
)
def test_a_connection_that_broke_is_not_one_whose_client_ended(error: Exception | None, cut: bool) -> None:
    assert dask_client.was_cut(SimpleNamespace(error=error)) is cut
