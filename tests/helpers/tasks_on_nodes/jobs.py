"""Tasks for tests of jobs, and what the tests ask of their head."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from local_fleets.running_node import RunningNode

    from skyinfra.protocol.manifest import Manifest


def add(a: int, b: int) -> int:
    return a + b


def wait_for(path: str, value: object = None) -> object:
    """Leaves its process id for each start, and ends when it is let through."""
    with open(path, "a") as file:  # noqa: PTH123
        file.write(f"{os.getpid()}\n")
    print("started", flush=True)
    while not os.path.exists(f"{path}.open"):  # noqa: PTH110
        time.sleep(0.01)
    print("let through", flush=True)
    return value


def draw_bar(path: str) -> None:
    """Draws a bar as tqdm does, at 37 and then 38 of 100, and ends when it is let through."""
    for number in (37, 38):  # a bar is a line once the next one begins
        sys.stderr.write(f"\rfit:  {number}%|###       | {number}/100 [00:03<00:06, 10.0it/s, loss=0.3]")
    sys.stderr.flush()
    while not os.path.exists(path):  # noqa: PTH110
        time.sleep(0.01)


def say_sick(why: str) -> None:
    """Makes the head take the slot of this task for sick."""
    from distributed import get_worker

    from skyinfra.protocol.calls import SLOT_FAILS

    get_worker().log_event(SLOT_FAILS, why)


def run_out() -> None:
    """Raises what PyTorch raises where a device has no more memory."""
    raise RuntimeError("CUDA out of memory. Tried to allocate 50.00 GiB.")


def fail_until(path: str, starts: int) -> int:
    with open(path, "a") as file:  # noqa: PTH123
        file.write(".")
        found = file.tell()
    if found < starts:
        raise ValueError(f"start {found}")
    return found


def print_and_fail_until(path: str, starts: int) -> None:
    """Prints the number of its start, once it is let through."""
    with open(path, "a") as file:  # noqa: PTH123
        file.write(".")
        found = file.tell()
    while not os.path.exists(f"{path}.open"):  # noqa: PTH110
        time.sleep(0.01)
    print("attempt", found, flush=True)
    if found < starts:
        raise ValueError(f"start {found}")


def starts(path: Path) -> list[str]:
    return path.read_text().splitlines() if path.exists() else []


def manifest_of(head: RunningNode) -> Manifest:
    with head.pool() as pool:
        return pool.manifest
