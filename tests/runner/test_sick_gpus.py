"""A GPU that fails takes its slots out of service before a task meets it; those of the other GPUs go on.

What others met: a GPU that fell off the bus or has ECC errors is given away further (aws/containers-roadmap#2432,
microsoft/pai#4409), one is closed for an error of a task (Xid 94), and for ever (NVIDIA/gpu-operator#1065,
NVIDIA/k8s-device-plugin#234).
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from fake_nvml.fake_machine import FakeMachine
from local_fleets.running_node import BIG, RunningNode, h100, until

import skyinfra as sky

Machine = Callable[..., FakeMachine]
MakeNode = Callable[..., RunningNode]
TASKS = 40


def where(number: int, seconds: float) -> tuple[int, str]:
    time.sleep(seconds)
    return number, sky.instance_info().slot


@pytest.fixture
def told(
    fake_machine: Machine, make_node: MakeNode, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[RunningNode, Path]]:
    """A node with two GPUs of two partitions each, and the file of what its driver says of them."""
    machine, file = fake_machine("h100_80gb,h100_80gb"), tmp_path / "readings"
    file.write_text("0.temperature=30")
    for name, value in machine.environment(READINGS=f"@{file}").items():
        monkeypatch.setenv(name, value)
    node = make_node(accelerator=h100(BIG, BIG), simulate=False)
    node.boot()
    yield node, file


@pytest.mark.parametrize(
    ("says", "why"),
    [
        ("0.recovery=1", "the driver asks for a reset of the GPU"),
        pytest.param("0.rows_failed=1", "could not be remapped: replace the machine", marks=pytest.mark.slow),
        pytest.param("0.recovery=99", "the driver asks for recovery action 99", marks=pytest.mark.slow),
    ],
)
def test_the_slots_of_a_gpu_that_fails_take_no_tasks_and_are_back_when_it_works(
    told: tuple[RunningNode, Path], says: str, why: str
) -> None:
    node, file = told
    with node.pool() as pool:
        until(lambda: len(pool.slots()) == 4, "all slots are there")
        futures = [pool.submit(where, number, 0.5) for number in range(TASKS)]
        file.write_text(says)
        sick = until(lambda: len(pool.look().state.sick) == 2 and pool.look().state.sick, "the head knows", seconds=60)
        assert set(sick) == {"n1/0", "n1/1"} and all(why in text for text in sick.values())
        assert sorted(future.result(timeout=60)[0] for future in futures) == list(range(TASKS)), "no task is lost"
        after = {slot for _, slot in pool.map(where, range(8), itertools.repeat(0.1))}
        assert after == {"n1/2", "n1/3"}
        assert why.removeprefix("the driver asks for ").partition(":")[0] in node.run("doctor", check=False).stdout
        file.write_text("0.temperature=30")
        until(lambda: len(pool.slots()) == 4, "its slots are back", seconds=60)
        assert pool.look().state.sick == {}


@pytest.mark.slow
def test_what_needs_no_reset_closes_no_slot(told: tuple[RunningNode, Path]) -> None:
    """A remapped row waits for the next reset, corrected and contained errors are over, an old driver says nothing."""
    node, file = told
    with node.pool() as pool:
        until(lambda: len(pool.slots()) == 4, "all slots are there")
        file.write_text("0.rows_pending=1,0.ecc_errors=3,0.recovery=-1,1.recovery=2")
        until(lambda: len(pool.look().state.sick) == 2, "the head knows of the other GPU", seconds=60)
        assert set(pool.look().state.sick) == {"n1/2", "n1/3"}
