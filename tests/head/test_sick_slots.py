"""Slots whose worker processes end again and again, under tasks that run elsewhere, take no tasks any more."""

from __future__ import annotations

import asyncio
import os
import types

import pytest
from distributed.core import Status
from local_fleets.client_fixtures import eventually

from skyinfra.client import open_pool
from skyinfra.head.sick import TIMES, WITHIN_S, Killers, Sick, Suspects, _few, _with_nodes
from skyinfra.protocol.instance import instance_info
from skyinfra.tasks import Task


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def suspects(clock: Clock) -> Suspects:
    return Suspects(lambda address: address, clock)


def ends(suspects: Suspects, key: str, slot: str) -> None:
    suspects.transition(key, "processing", "memory", worker=slot)


def test_deaths_under_tasks_that_end_elsewhere_speak_against_a_slot_for_an_hour(suspects: Suspects, clock: Clock):
    for number in range(TIMES):
        assert suspects.found() == {}
        suspects.died("a/0", [f"t{number}"])
        ends(suspects, f"t{number}", "a/1")
    assert set(suspects.found()) == {"a/0"}
    clock.now += WITHIN_S + 1
    assert suspects.found() == {}


def test_a_task_that_ends_each_process_speaks_against_none(suspects: Suspects):
    for number in range(5):
        for slot in ("a/0", "a/1", "b/0"):
            suspects.died(slot, [f"t{number}", f"waits{number}{slot}"])
            ends(suspects, f"waits{number}{slot}", "b/1")
        ends(suspects, f"t{number}", "b/1")
    # The first death of each is not known to be its own before the second.
    assert suspects.found() == {}


def test_tasks_that_end_on_their_slot_or_nowhere_speak_against_none(suspects: Suspects):
    for number in range(5):
        suspects.died("a/0", [f"t{number}", f"c{number}"])
        ends(suspects, f"t{number}", "a/0")
        suspects.transition(f"c{number}", "processing", "forgotten")
    assert suspects.found() == {}


def test_another_machine_is_not_suspected(suspects: Suspects):
    for number in range(TIMES):
        suspects.died("a/0", [f"t{number}"])
        ends(suspects, f"t{number}", "b/0")
    suspects.forget("a")
    assert suspects.found() == {}


def test_half_of_the_slots_take_their_node_out_of_service_but_not_the_last_one():
    there = {f"{node}/{index}" for node in "ab" for index in range(4)}
    sick = _with_nodes({"a/0": "x", "a/1": "x"}, there)
    assert sick["a/3"] == "2 of the 4 slots of its node are sick: x"
    assert set(sick) == {f"a/{index}" for index in range(4)}
    assert set(_with_nodes({"a/0": "x"}, there)) == {"a/0"}
    assert set(_with_nodes({"a/0": "x", "a/1": "x"}, {f"a/{index}" for index in range(4)})) == {"a/0", "a/1"}
    both = {"a/0": "x", "a/1": "x", "b/0": "x", "b/1": "x"}
    assert len({slot[0] for slot in there - _with_nodes(both, there).keys()}) == 1


@pytest.mark.parametrize("ends_task", [False, True])
def test_a_process_that_ends_for_a_cancelled_task_speaks_against_no_slot(ends_task: bool):
    """The task itself is forgotten by then; another one waits behind it."""
    there = {"tcp://b": types.SimpleNamespace(name="b/0")}
    sick = Sick(types.SimpleNamespace(workers=there), {})  # type: ignore[arg-type]
    for number in range(TIMES):
        waits = types.SimpleNamespace(key=f"t{number}")
        there["tcp://a"] = types.SimpleNamespace(name="a/0", status=Status.running, processing=[waits])
        if ends_task:
            sick.ends_task("tcp://a")
        sick.gone("tcp://a", expected=False)
        sick.suspects.transition(waits.key, "processing", "memory", worker="tcp://b")
    assert set(sick.suspects.found()) == (set() if ends_task else {"a/0"})


@pytest.mark.parametrize(("slots", "sick"), [(1, {"a/0"}), (2, set())])
def test_a_runner_that_ends_with_all_its_processes_speaks_against_no_slot(
    slots: int, sick: set[str], clock: Clock
) -> None:
    """Of a node with one slot nobody knows which of both it was."""
    there = {"tcp://b": types.SimpleNamespace(name="b/0")}
    promised = {"a": [f"a/{index}" for index in range(slots)], "b": ["b/0"]}
    found = Sick(types.SimpleNamespace(workers=there), promised)  # type: ignore[arg-type]
    found.suspects._clock = clock
    for number in range(TIMES):
        clock.now += 60
        for index in range(slots):
            task = types.SimpleNamespace(key=f"t{number}-{index}")
            there[f"tcp://a{index}"] = types.SimpleNamespace(
                name=f"a/{index}", status=Status.running, processing=[task]
            )
        for index in range(slots):
            found.gone(f"tcp://a{index}", expected=False)
            del there[f"tcp://a{index}"]
            # The first one's task may have ended elsewhere by then.
            ends(found.suspects, f"t{number}-{index}", "tcp://b")
    assert set(found.suspects.found()) == sick


def test_tasks_that_end_processes_on_most_slots_speak_against_none():
    there = {f"{node}/{index}" for node in "ab" for index in range(4)}
    one, half = {"a/0": "x"}, {f"a/{index}": "x" for index in range(4)}
    assert _few(one, there) == one and _few(half, there) == half
    assert _few({**half, "b/0": "x"}, there) == {}
    # Most of the slots, of one bad node of two.
    big = {f"c/{index}": "x" for index in range(9)}
    assert _few(big, there | big.keys()) == big


def end_there(slot: str) -> str:
    here = instance_info().slot
    if here == slot:
        os._exit(9)
    return here


def test_such_a_slot_takes_no_tasks_and_is_said_to_be_sick(fleets) -> None:
    made = fleets(nodes=("n0", "n1"), slots=1)
    with open_pool(made.manifest) as pool:
        eventually(lambda: len(pool.slots()) == 2)
        for _ in range(20):
            if pool.look().state.sick:
                break
            both = [pool.submit(Task(end_there, ("n0/0",))) for _ in range(2)]
            assert {each.result(timeout=60) for each in both} == {"n1/0"}
            eventually(lambda: pool.look().state.sick or len(pool.slots()) == 2)
        eventually(lambda: set(pool.look().state.sick) == {"n0/0"})
        assert "ended 3 times within an hour" in pool.look().state.sick["n0/0"]
        eventually(lambda: {slot.slot for slot in pool.slots()} == {"n1/0"})


def test_the_report_of_a_death_is_waited_for_and_one_of_an_earlier_process_is_none() -> None:
    """Without it, a task that ends its processes starts a fourth time."""

    async def main() -> None:
        killers = Killers()
        # Of a process that ended while no task ran on it, for which nobody waits.
        killers.tell("a/0", "", 1, False)
        assert not killers.restarted("a/0")
        waiting = asyncio.create_task(killers.heard("a/0"))
        # Longer than a loaded machine takes for it, as was seen.
        await asyncio.sleep(1.0)
        assert not waiting.done()
        killers.tell("a/0", "key", 1, False)
        await waiting
        assert killers.ended_by("key") == []
        # A slot that has its next process has been told of, or never will be.
        waiting = asyncio.create_task(killers.heard("a/0"))
        await asyncio.sleep(0)
        assert not killers.restarted("a/1") and killers.restarted("a/0")
        await asyncio.wait_for(waiting, 0.5)

    asyncio.run(main())
