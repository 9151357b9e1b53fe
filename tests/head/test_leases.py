"""Which gang gets which slots, and what ends it, as the scheduler of the head decides that."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from skyinfra.head import leases
from skyinfra.head.leases import Leases

FOUR = {"n0/0": False, "n0/1": False, "n1/0": False, "n1/1": False}
BOTH = [["n0", ["n0/0", "n0/1"], 2], ["n1", ["n1/0", "n1/1"], 2]]
EITHER = [["n0", ["n0/0", "n0/1"], 1], ["n1", ["n1/0", "n1/1"], 1]]


class Head:
    """Leases of a fleet of *slots*, whose clients are those in *clients*."""

    def __init__(self, slots: dict[str, bool] = FOUR) -> None:
        self.slots = dict(slots)
        self.clients = {"c0", "c1"}
        self.leases = Leases(lambda: self.slots, lambda client: client in self.clients)

    async def ask(self, gang: str, candidates: list[Any], *, nodes: int = 2, client: str = "c0") -> dict[str, Any]:
        return await self.leases.ask(gang, client, nodes, candidates, wait_s=0)

    async def phase(self, gang: str) -> str:
        return (await self.leases.state(gang, seen="", wait_s=0))["phase"]

    async def join_all(self, gang: str, count: int = 4) -> list[dict[str, Any]]:
        joins = [self.leases.join(gang, rank, f"w{rank}", "10.0.0.1", 4000 + rank, 5) for rank in range(count)]
        return await asyncio.gather(*joins)


def scenario(function: Callable[[Head], Coroutine[Any, Any, None]]) -> Callable[[], None]:
    """A test that runs *function* in an event loop."""

    def run() -> None:
        asyncio.run(function(Head()))

    run.__name__ = function.__name__
    return run


@scenario
async def test_a_gang_gets_all_its_slots_or_none(head):
    assert (await head.ask("a", BOTH))["slots"] == ["n0/0", "n0/1", "n1/0", "n1/1"]
    assert (await head.ask("b", EITHER, nodes=1))["phase"] == "waiting"
    head.leases.release("a")
    assert (await head.ask("b", EITHER, nodes=1))["slots"] == ["n0/0"]


@scenario
async def test_gangs_get_their_slots_in_the_order_in_which_they_asked(head):
    await head.ask("first", EITHER, nodes=1)
    await head.ask("big", BOTH)
    # A slot is free that it could have; the big one, which came before, wants it too.
    assert (await head.ask("small", EITHER, nodes=1))["phase"] == "waiting"
    head.leases.release("first")
    assert await head.phase("big") == "granted"
    assert await head.phase("small") == "waiting"
    head.leases.release("big")
    assert await head.phase("small") == "granted"


@scenario
async def test_a_gang_that_waits_leaves_what_it_may_not_have_to_others(head):
    await head.ask("holds", [["n0", ["n0/0"], 1]], nodes=1)
    assert (await head.ask("waits", [["n0", ["n0/0", "n0/1"], 2]], nodes=1))["phase"] == "waiting"
    assert (await head.ask("other", [["n1", ["n1/0", "n1/1"], 2]], nodes=1))["phase"] == "granted"


@scenario
async def test_slots_without_a_task_come_first(head):
    head.slots["n0/0"] = head.slots["n0/1"] = True
    assert (await head.ask("a", EITHER, nodes=1))["slots"] == ["n1/0"]
    head.slots["n1/0"] = True
    head.leases.release("a")
    assert (await head.ask("b", EITHER))["slots"] == ["n0/0", "n1/1"]


@scenario
async def test_a_slot_that_is_not_in_service_is_waited_for(head):
    del head.slots["n1/1"]
    waiting = asyncio.create_task(head.leases.ask("a", "c0", 2, BOTH, 5))
    await asyncio.sleep(0)
    assert await head.phase("a") == "waiting"
    head.slots["n1/1"] = False
    head.leases.grant()
    assert (await waiting)["phase"] == "granted"


@scenario
async def test_ranks_hear_of_all_when_the_last_one_has_come(head):
    await head.ask("a", BOTH)
    early = asyncio.create_task(head.leases.join("a", 3, "w3", "10.0.0.4", 4003, 5))
    await asyncio.sleep(0)
    assert (await head.leases.state("a", "", 0))["missing"] == ["n0/0", "n0/1", "n1/0"]
    states = [*await head.join_all("a", 3), await early]
    assert {state["phase"] for state in states} == {"started"}
    assert all(state["members"][3] == ("10.0.0.4", 4003) for state in states)


@scenario
async def test_a_rank_that_waits_and_loses_its_worker_comes_again(head):
    await head.ask("a", EITHER)
    lost = asyncio.create_task(head.leases.join("a", 0, "old", "10.0.0.1", 1, 5))
    await asyncio.sleep(0)
    head.leases.worker_gone("old")
    assert await head.phase("a") == "granted"
    states = await head.join_all("a", 2)
    assert (await lost)["members"] == states[0]["members"] == [("10.0.0.1", 4000), ("10.0.0.1", 4001)]


@scenario
async def test_a_gang_is_over_with_its_first_failure_however_late_that_is_told(head):
    await head.ask("a", BOTH)
    await head.join_all("a")
    watch = asyncio.create_task(head.leases.state("a", "started", 5))
    head.leases.report("a", 2, age=0.0)
    head.leases.report("a", 1, age=0.03)
    assert (await watch)["first"] == 1
    assert await head.phase("a") == "over"


@scenario
async def test_a_process_that_died_failed_before_those_that_lost_it(head):
    await head.ask("a", BOTH)
    await head.join_all("a")
    head.leases.report("a", 2, age=0.01)
    head.leases.worker_gone("w3")
    state = await head.leases.state("a", "started", 5)
    assert (state["phase"], state["first"], state["died"]) == ("over", 3, True)


@scenario
async def test_a_rank_that_has_ended_well_may_lose_its_worker(head):
    await head.ask("a", BOTH)
    await head.join_all("a")
    head.leases.report("a", 0, ok=True)
    head.leases.worker_gone("w0")
    await asyncio.sleep(2 * leases.SETTLE_S)
    assert await head.phase("a") == "started"


@scenario
async def test_a_rank_that_starts_again_on_another_worker_is_lost(head):
    await head.ask("a", BOTH)
    await head.join_all("a")
    state = await head.leases.join("a", 1, "new", "10.0.0.1", 1, 5)
    assert (state["phase"], state["first"]) == ("over", 1)


@scenario
async def test_the_gangs_of_a_client_end_with_its_connection(head):
    await head.ask("a", BOTH)
    await head.ask("b", BOTH, client="c1")
    await head.join_all("a")
    watch = asyncio.create_task(head.leases.state("a", "started", 5))
    await asyncio.sleep(0)
    head.leases.client_gone("c0")
    state = await watch
    assert (state["phase"], state["first"]) == ("over", None)
    assert await head.phase("b") == "granted"


@scenario
async def test_a_client_that_is_not_connected_gets_nothing(head):
    assert (await head.ask("a", BOTH, client="stranger"))["phase"] == "unknown"
    assert (await head.ask("b", BOTH))["phase"] == "granted"


@scenario
async def test_what_is_unknown_is_said_so(head):
    assert await head.phase("nothing") == "unknown"
    assert (await head.leases.join("nothing", 0, "w", "a", 0, 0))["phase"] == "unknown"
    head.leases.report("nothing", 0)
    head.leases.release("nothing")


gangs = st.lists(
    st.tuples(st.integers(1, 2), st.lists(st.sampled_from(sorted(FOUR)), min_size=1, max_size=4, unique=True)),
    min_size=1,
    max_size=6,
)


@settings(max_examples=60, deadline=None)
@given(gangs, st.randoms(use_true_random=False))
def test_no_slot_is_held_twice_and_every_gang_that_can_has_its_turn(wanted, random):
    async def play() -> None:
        head = Head()
        waiting = []
        for number, (count, slots) in enumerate(wanted):
            candidates = [["n", slots, min(count, len(slots))]]
            await head.ask(str(number), candidates, nodes=1)
            waiting.append(str(number))
        while waiting:
            states = {gang: await head.leases.state(gang, "", 0) for gang in waiting}
            held = [slot for state in states.values() for slot in state["slots"]]
            assert len(held) == len(set(held))
            running = [gang for gang, state in states.items() if state["slots"]]
            assert waiting[0] in running, "the one that asked first waits"
            ended = random.choice(running)
            head.leases.release(ended)
            waiting.remove(ended)

    asyncio.run(play())


@pytest.mark.parametrize("seen", ["waiting", ""])
def test_an_answer_comes_after_the_time_that_it_may_take(seen):
    async def play() -> None:
        head = Head()
        await head.ask("a", BOTH)
        assert (await head.ask("b", BOTH))["phase"] == "waiting"
        assert (await head.leases.state("b", seen, 0.01))["phase"] == "waiting"

    asyncio.run(play())
