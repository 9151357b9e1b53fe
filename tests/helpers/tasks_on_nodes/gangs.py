"""Tasks of ranks, and starting ranks without a framework.

Each rank is a new process, which imports the module of its function: a test module would bring pytest and Dask along.
"""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path

import skyinfra as sky


def none(pool, target, *args, **options):
    """A gang without a framework, which warns of nothing."""
    return pool.launch(target, *args, framework="none", **options)


def environment() -> dict[str, str]:
    return dict(os.environ)


def place() -> tuple[int, str, str]:
    return sky.gang().rank, sky.instance_info().slot, os.environ["CUDA_VISIBLE_DEVICES"]


def wait_for(path: str) -> None:
    while not Path(path).exists():
        time.sleep(0.01)


def hold(folder: str, name: str) -> None:
    """Says that it runs, and runs until it may end."""
    Path(folder, f"{name}.{sky.gang().rank}").write_text(str(os.getpid()))
    wait_for(f"{folder}/{name}.end")


def say_rank(word: str) -> int:
    print(word, flush=True)
    return sky.gang().rank


def stop(folder: str) -> None:
    Path(folder, str(sky.gang().rank)).touch()
    time.sleep(600)


def fail_as(number: int) -> None:
    if sky.gang().rank == number:
        raise LookupError("not here")
    time.sleep(600)


def report(gate: str) -> None:
    sky.progress(sky.gang().rank + 1, 100, "loss 0.3")
    wait_for(gate)


def lean_on_rank_0(path: str, end: Callable[[], object]) -> None:
    """Rank 1 ends as *end* does; what the others do fails because of that."""
    gang = sky.gang()
    Path(path, str(gang.rank)).write_text(str(os.getpid()))
    if gang.rank == 1:
        with socket.create_server((gang.master_address, 0)) as server:
            Path(path, "new").write_text(str(server.getsockname()[1]))
            Path(path, "new").rename(Path(path, "port"))
            kept = [server.accept()[0] for _ in range(gang.world_size - 1)]
            end()
            time.sleep(600)
            del kept
    while not Path(path, "port").exists():
        time.sleep(0.01)
    with socket.create_connection((gang.master_address, int(Path(path, "port").read_text()))) as connection:
        if connection.recv(1) == b"":
            raise ConnectionResetError("rank 1 is gone")


def break_off() -> None:
    raise ZeroDivisionError("the cause")


def kill_own_process() -> None:
    print("before it ends")
    os.kill(os.getpid(), signal.SIGKILL)


def surroundings() -> tuple[str | None, str | None, list[str], str]:
    return os.environ.get("A"), os.environ.get("B"), sorted(os.listdir()), os.getcwd()  # noqa: PTH109, PTH208
