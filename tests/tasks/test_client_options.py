"""Options of a task: how long it may run, how often it is tried, and where."""

from __future__ import annotations

import ctypes
import os
import sys
import time
from pathlib import Path

import pytest

import skyinfra as sky
from skyinfra.tasks import Task


@sky.compute
def spin(path: str) -> str:
    """Runs until it is interrupted; leaves a file for each start, and another where it could clean up."""
    try:
        with Path(path).open("a") as file:
            file.write(".")
        while True:
            time.sleep(0.02)
    except KeyboardInterrupt:
        Path(path + ".stopped").touch()
        raise


@sky.compute(timeout=0.3)
def hang() -> None:
    library, mutex = ctypes.CDLL(None), ctypes.create_string_buffer(64)
    for _ in range(2):
        library.pthread_mutex_lock(mutex)  # native code, which no signal wakes; other threads run


@sky.compute(timeout=0.3)
def hold(path: str) -> None:
    with Path(path).open("a") as file:
        file.write(".")
    ctypes.PyDLL(None).sleep(600)  # native code that holds the interpreter


@sky.compute(retries=2)
def succeed_at(path: str, start: int) -> int:
    with Path(path).open("a") as file:
        file.write(".")
        starts = file.tell()
    if starts < start:
        raise OSError(f"start {starts}")
    return starts


@sky.compute
def profile() -> str | None:
    return sky.instance_info().profile


@pytest.fixture(autouse=True)
def loaded(pool) -> None:
    """Every slot has imported this module: the time that it takes is a part of that of a task."""
    profile() @ pool


def test_a_task_that_runs_for_too_long_is_stopped_and_may_clean_up(pool, tmp_path):
    path = str(tmp_path / "starts")
    with pytest.raises(sky.TaskTimeout, match=r"spin ran for more than 0.2 s and was stopped.*\n.*timeout="):
        spin(path).options(timeout=0.2) >> pool
    assert Path(path + ".stopped").exists()
    assert Path(path).read_text() == "."


def test_a_task_that_swallows_the_interrupt_is_too_late_all_the_same(pool):
    def swallow() -> str:
        try:
            time.sleep(0)
            while True:
                time.sleep(0.01)
        except KeyboardInterrupt:
            return "done"

    with pytest.raises(sky.TaskTimeout):
        pool.submit(Task(swallow).options(timeout=0.2)).result(timeout=60)


@pytest.mark.parametrize("ends", ["exit", "raise"])
def test_a_task_whose_library_turns_the_interrupt_into_something_else_is_too_late_all_the_same(pool, ends):
    def turn() -> None:
        try:
            time.sleep(60)
        except KeyboardInterrupt as error:
            if ends == "exit":
                sys.exit(1)
            raise RuntimeError("stopped") from error

    with pytest.raises(sky.TaskTimeout, match=r"turn ran for more than 0\.2 s"):
        pool.submit(Task(turn).options(timeout=0.2)).result(timeout=60)


def test_native_code_that_runs_for_too_long_is_ended_with_its_process(pool):
    slot = pool.slots()[:1]
    pids = set(pool.broadcast(Task(os.getpid), slots=slot))
    with pytest.raises(sky.TaskTimeout, match=r"hang ran for more than 0\.3 s"):
        pool.broadcast(hang(), slots=slot)
    assert pids.isdisjoint(pool.broadcast(Task(os.getpid), slots=slot))


def test_native_code_that_holds_the_interpreter_is_ended_and_not_started_again(pool, tmp_path):
    path = str(tmp_path / "starts")
    slot = pool.slots()[:1]
    with pytest.raises(sky.TaskTimeout, match=r"hold ran for more than 0\.3 s"):
        pool.broadcast(hold(path), slots=slot)
    assert Path(path).read_text() == "."
    assert pool.broadcast(Task(os.getpid), slots=slot)


def test_a_timeout_is_that_of_the_running_task_not_of_its_wait(pool):
    slow = [pool.submit(Task(time.sleep, (0.4,)).options(timeout=30)) for _ in range(3 * len(pool.slots()))]
    assert [future.result(timeout=60) for future in slow] == [None] * len(slow)


def test_a_task_that_raises_is_tried_again(pool, tmp_path):
    assert succeed_at(str(tmp_path / "starts"), 3) >> pool == 3


def test_the_last_exception_of_all_attempts_arrives(pool, tmp_path):
    with pytest.raises(OSError, match="start 3"):
        succeed_at(str(tmp_path / "starts"), 9) >> pool


def test_options_of_one_call_stand_above_those_of_the_function(pool, tmp_path):
    with pytest.raises(OSError, match="start 1"):
        succeed_at(str(tmp_path / "starts"), 9).options(retries=0) >> pool


def test_what_cannot_pass_is_not_tried_again(pool, tmp_path):
    def unpicklable(path: str) -> object:
        with Path(path).open("a") as file:
            file.write(".")
        return (each for each in [1])

    with pytest.raises(sky.TaskNotPicklable):
        pool.submit(Task(unpicklable, (str(tmp_path / "starts"),)).options(retries=5)).result(timeout=60)
    assert (tmp_path / "starts").read_text() == "."


def test_a_task_runs_on_slots_of_its_profile(pool):
    task = profile().options(profile="3g.40gb")
    assert task >> pool == "3g.40gb"
    assert task @ pool == ["3g.40gb"] * len(pool.slots())
    with pytest.raises(sky.SlotLost, match=r"(?s)with the profile 1g.10gb.*3g.40gb\*4"):
        profile().options(profile="1g.10gb") >> pool
    with pytest.raises(sky.InvalidField, match=r"only slots with profile 3g\.40gb are selected"):
        profile().options(profile="1g.10gb") >> pool.select(profile="3g.40gb")


def test_slots_are_selected_by_accelerator(pool):
    assert len(pool.select(accelerator="H100").slots()) == len(pool.slots())
    assert profile() >> pool.select(accelerator="H100", node="n1") == "3g.40gb"
    with pytest.raises(sky.SlotLost, match="accelerator B200"):
        profile() >> pool.select(accelerator="B200")


@pytest.mark.parametrize("given", [{"timeout": 0}, {"timeout": float("inf")}, {"retries": -1}, {"slots": 0}])
def test_options_that_cannot_be(given):
    with pytest.raises(sky.InvalidField, match=next(iter(given))):
        profile().options(**given)
    with pytest.raises(sky.InvalidField):
        sky.compute(**given)
