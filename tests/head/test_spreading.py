"""No task waits behind a long one while a slot is free, however long Dask takes either to be."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from distributed.core import Status
from local_fleets.client_fixtures import Fleet, eventually

from skyinfra.client import Pool, open_pool
from skyinfra.engine.dask_scheduler import spread
from skyinfra.head.execution import Execution
from skyinfra.protocol.instance import GPU_MEMORY
from skyinfra.tasks import Task

# From then on, the slots with shorter tasks are idle to Dask, whatever waits behind them.
LONG_S = 4.0
PATIENCE_S = 60.0


class Slot(SimpleNamespace):
    """A worker as its scheduler has it, in sets."""

    __hash__ = object.__hash__


def hold(path: str) -> str:
    while not Path(path).exists():
        time.sleep(0.01)
    return path


def sometimes(path: str | None) -> str | None:
    """Is over at once, or when it is let through: what it took before says nothing."""
    return None if path is None else hold(path)


def other(path: str) -> str:
    return hold(path)


def busy(pool: Pool) -> list[str]:
    return [slot for slot, tasks in pool.running().items() if tasks]


def sent(pool: Pool) -> int:
    """How many tasks slots have been given."""

    async def ask() -> int:
        return sum(map(len, (await pool._fleet.connection.client.processing()).values()))

    return pool._fleet.in_loop(ask())


@pytest.fixture
def pools(tmp_path: Path) -> Iterator[tuple[Pool, Pool]]:
    """Two clients: each sends as many tasks as there are slots."""
    made = Fleet(tmp_path, nodes=("n0",), slots=3)
    try:
        with open_pool(made.manifest) as pool, open_pool(made.manifest) as second:
            eventually(lambda: len(pool.slots()) == 3)
            yield pool, second
    finally:
        made.close()


@pytest.mark.parametrize(
    "known",
    [
        pytest.param(False, id="a new function"),
        pytest.param(True, id="one that was short before", marks=pytest.mark.slow),
    ],
)
def test_a_task_leaves_a_slot_with_a_long_one_for_a_free_slot(
    pools: tuple[Pool, Pool], tmp_path: Path, known: bool
) -> None:
    pool, second = pools
    paths = [str(tmp_path / name) for name in ("long", "second", "third")]
    held: Callable[[str], object] = sometimes if known else other
    if known:
        assert list(pool.map(sometimes, [None] * 30)) == [None] * 30
    long = pool.submit(hold, paths[0])
    eventually(lambda: any(each.seconds > LONG_S for tasks in pool.running().values() for each in tasks))
    others = [pool.submit(held, path) for path in paths[1:]]
    eventually(lambda: sum(map(len, pool.running().values())) == 3)
    # One of them, at least, is behind the second or the third.
    waiting = [second.submit(sometimes, None) for _ in range(3)]
    eventually(lambda: sent(pool) == 6)
    Path(paths[1]).touch()
    assert [future.result(timeout=PATIENCE_S) for future in waiting] == [None] * 3
    assert not any(future.done() for future in (long, others[1]))
    for path in paths:
        Path(path).touch()
    assert [future.result(timeout=PATIENCE_S) for future in (long, *others)] == paths


def test_small_tasks_leave_the_large_slots_to_large_ones(tmp_path: Path) -> None:
    made = Fleet(tmp_path, nodes=("n0",), slots=4, memory=[40, 40, 40, 10])
    paths = [str(tmp_path / name) for name in ("small", "one", "two", "three")]
    try:
        with open_pool(made.manifest) as pool:
            eventually(lambda: len(pool.slots()) == 4)
            small = pool.submit(Task(hold, (paths[0],)).options(gpu_memory_gb=10))
            eventually(lambda: busy(pool) == ["n0/3"])
            large = [pool.submit(Task(hold, (path,)).options(gpu_memory_gb=40)) for path in paths[1:]]
            eventually(lambda: len(busy(pool)) == 4)
            for path in paths:
                Path(path).touch()
            assert [future.result(timeout=PATIENCE_S) for future in (small, *large)] == paths
    finally:
        made.close()


def test_a_task_that_waits_behind_another_one_gets_the_smallest_slot_that_is_free() -> None:
    def slot(name: str, gb: int, *tasks: str) -> Slot:
        return Slot(
            name=name,
            address=name,
            status=Status.running,
            nthreads=1,
            processing=dict.fromkeys(tasks),
            executing=tasks[:1],
            resources={GPU_MEMORY: gb * 1000.0},
        )

    moved: list[tuple[str, str]] = []
    _, *free = slots = [
        slot("n/0", 10, "runs", "one", "two", "three"),
        slot("n/1", 40),
        slot("n/2", 20),
        slot("n/4", 10),
        slot("n/3", 10),
    ]
    stealing = SimpleNamespace(move_task_request=lambda task, _, to: moved.append((task, to.name)))
    for takers in (None, set(free)):
        moved.clear()
        scheduler = SimpleNamespace(
            running=set(slots),
            workers={each.name: each for each in slots},
            extensions={"stealing": stealing},
            valid_workers=lambda _, takers=takers: takers,
        )
        spread(scheduler, ())  # type: ignore[arg-type]
        assert moved == [("one", "n/3"), ("two", "n/4"), ("three", "n/2")]


def test_the_slots_of_a_fleet_and_those_that_take_no_others() -> None:
    states = "running", "paused", "closing_gracefully"
    workers = {each: SimpleNamespace(status=Status[each], resources={"slot": 1.0}) for each in states}
    tasks = {each: SimpleNamespace(processing_on=worker) for each, worker in workers.items()}
    tasks["waits"] = SimpleNamespace(processing_on=None)
    scheduler = SimpleNamespace(workers=workers, tasks=tasks)
    execution = Execution(scheduler, SimpleNamespace(ask=None), None)  # type: ignore[arg-type]
    assert len(execution.slots()) == 1
    closed = [key for key in (*tasks, "unknown") if execution.on_closed_slot(key)]
    assert closed == ["paused", "closing_gracefully"]
