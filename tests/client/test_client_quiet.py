"""What a client says on its standard error when its fleet fails it: its own error, once, and nothing of Dask's."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from front_ends.notebooks import Kernel, write_manifest
from support import python_path

OF_OTHERS = re.compile(
    r"distributed|tornado|asyncio|never retrieved|never awaited|was destroyed but|StreamClosedError|CommClosedError"
)
# What a program does while its fleet fails it: tasks that run, for the whole of its patience.
BEGIN = """
import concurrent.futures, os, sys, time
from pathlib import Path
import skyinfra as sky
from skyinfra.client import open_pool
from skyinfra.protocol.manifest import Manifest

def hold(path):
    with open(path + str(os.getpid()), "w"):
        pass
    time.sleep(600)

pool = sky.connect("fleet.json", timeout=20)
running = [pool.submit(sky.compute(hold)(path)) for path in sys.argv[1:]]
"""
WAITS = """
try:
    with pool:
        print([future.result() for future in running])
except sky.SkyinfraError as error:
    sys.exit(f"ours: {type(error).__name__}")
"""
CLOSES = """
while not all(list(Path(path).parent.glob(Path(path).name + "*")) for path in sys.argv[1:]):
    time.sleep(0.02)
pool.close()
for future in running:
    try:
        future.result()
    except concurrent.futures.CancelledError:
        print("cancelled", file=sys.stderr)
"""


def started(folder: Path, wait_until: Any, name: str = "runs", count: int = 2) -> list[int]:
    """Returns the processes of the tasks, once all of them run."""
    wait_until(lambda: len({file.name.rpartition("-")[2] for file in folder.glob(f"{name}-*-*")}) >= count)
    return [int(file.name.rpartition("-")[2]) for file in folder.glob(f"{name}-*-*")]


class Program:
    """A client program in *folder*, with two tasks that run."""

    def __init__(self, fleet: Any, folder: Path, text: str) -> None:
        write_manifest(folder, fleet.manifest)
        self.folder = folder
        (folder / "program.py").write_text(BEGIN + text)
        paths = [f"{folder}/runs-{number}-" for number in range(2)]
        self.process = subprocess.Popen(
            [sys.executable, "program.py", *paths],
            cwd=folder,
            env={**os.environ, "PYTHONPATH": python_path()},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def ended(self) -> str:
        """Returns what it said on its standard error."""
        said = self.process.communicate(timeout=300)[1]
        assert OF_OTHERS.findall(said) == [], said
        return said


@pytest.mark.slow
@pytest.mark.parametrize("event", ["head", "worker"])
def test_a_program_whose_fleet_dies_says_its_own_error_once(fleets, tmp_path, wait_until, event):
    folder = tmp_path / "client"
    folder.mkdir()
    fleet = fleets()
    program = Program(fleet, folder, WAITS)
    first = started(folder, wait_until)
    if event == "head":
        fleet.kill()
    else:  # until it is given up: each of its attempts ends in this way
        killed: set[int] = set()
        while program.process.poll() is None:
            for pid in {*started(folder, wait_until)} - killed or ():
                killed.add(pid)
                os.kill(pid, signal.SIGKILL)
        assert len(killed) > len(first)
    assert program.ended().count("ours: ") == 1


@pytest.mark.slow
def test_a_pool_that_is_closed_while_tasks_run_leaves_cancelled_futures_and_no_line(fleet, tmp_path):
    said = Program(fleet, tmp_path, CLOSES).ended()
    assert said.splitlines() == ["cancelled"] * 2, said


class Link:
    """A way to the head that can be cut: all of its connections end at once, and new ones are taken."""

    def __init__(self, port: int) -> None:
        self._to = port
        self._ends: list[socket.socket] = []
        self._server = socket.create_server(("127.0.0.1", 0))
        self.port = self._server.getsockname()[1]
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                here = self._server.accept()[0]
                there = socket.create_connection(("127.0.0.1", self._to))
                self._ends += [here, there]
                for one, other in ((here, there), (there, here)):
                    threading.Thread(target=self._pump, args=(one, other), daemon=True).start()

    def _pump(self, one: socket.socket, other: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := one.recv(65536):
                other.sendall(data)
        self._end(other)

    @staticmethod
    def _end(each: socket.socket) -> None:
        with contextlib.suppress(OSError):
            each.shutdown(socket.SHUT_RDWR)

    def cut(self) -> None:
        """Ends every connection."""
        for each in self._ends:
            self._end(each)

    def close(self) -> None:
        """Takes no more, and leaves no socket."""
        self._end(self._server)
        self.cut()
        for each in (self._server, *self._ends):
            each.close()


LATER = """
path = sys.argv[1]
def until(path, name):
    with open(path + str(os.getpid()), "w"):
        pass
    while not os.path.exists(name):
        time.sleep(0.02)
    return name
with pool:
    print(pool.submit(sky.compute(until)(path, sys.argv[2])).result())
"""


@pytest.mark.slow
def test_a_connection_that_is_lost_in_the_middle_of_a_task_is_not_said(fleet, tmp_path, wait_until):
    link = Link(fleet.manifest.head.port)
    write_manifest(tmp_path, replace(fleet.manifest, head=replace(fleet.manifest.head, port=link.port)))
    (tmp_path / "program.py").write_text(BEGIN.replace("for path in sys.argv[1:]", "for path in ()") + LATER)
    command = [sys.executable, "program.py", f"{tmp_path}/runs-0-", f"{tmp_path}/gate"]
    environment = {**os.environ, "PYTHONPATH": python_path()}
    try:
        with subprocess.Popen(
            command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        ) as process:
            started(tmp_path, wait_until, count=1)
            link.cut()
            (tmp_path / "gate").touch()
            out, said = process.communicate(timeout=300)
        assert (process.returncode, out.strip(), said) == (0, f"{tmp_path}/gate", ""), said
    finally:
        link.close()


@pytest.mark.slow
def test_a_notebook_whose_head_dies_shows_the_error_of_its_cell_alone(fleets, tmp_path, wait_until):
    folder = tmp_path / "notebook"
    folder.mkdir()
    fleet = fleets()
    write_manifest(folder, fleet.manifest)
    kernel = Kernel(folder)
    try:
        kernel.run(f"import sys; sys.argv = ['', '{folder}/runs-0-', '{folder}/runs-1-']")
        kernel.run(BEGIN)
        cell = kernel.start("running[0].result()")
        started(folder, wait_until)
        fleet.kill()
        kernel.until(lambda: cell.idle, 240)
        assert cell.error is not None and "skyinfra" in cell.traceback
        # What comes later is shown below a later cell.
        later = kernel.run("import time; time.sleep(5); pool.close()")
        assert OF_OTHERS.findall(cell.streams + later.streams) == [], cell.streams + later.streams
    finally:
        kernel.close()


@pytest.mark.slow
def test_skyinfra_run_whose_head_dies_says_its_own_error_once(fleets, tmp_path, wait_until):
    folder = tmp_path / "client"
    folder.mkdir()
    fleet = fleets()
    file = write_manifest(folder, fleet.manifest)
    (folder / "script.py").write_text(
        f"import os, time; open('{folder}/runs-0-' + str(os.getpid()), 'w').close(); time.sleep(600)\n"
    )
    command = [sys.executable, "-m", "skyinfra.cli", "run", str(file), str(folder / "script.py")]
    environment = {**os.environ, "PYTHONPATH": python_path()}
    with subprocess.Popen(command, cwd=folder, env=environment, stderr=subprocess.PIPE, text=True) as process:
        started(folder, wait_until, count=1)
        fleet.kill()
        said = process.communicate(timeout=300)[1]
    assert process.returncode == 1
    assert OF_OTHERS.findall(said) == [] and said.count("error: ") == 1, said
