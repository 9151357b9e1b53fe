"""Tasks that send tasks to their own fleet, functions that travel, and forked processes of a client."""

from __future__ import annotations

import asyncio
import functools
import multiprocessing
import os
import pickle
import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from local_fleets.running_node import BIG, RunningNode, h100
from tasks_on_nodes.jobs import manifest_of

import skyinfra as sky
from skyinfra.client.pool import Pool
from skyinfra.protocol.manifest import Manifest
from skyinfra.protocol.nodeconfig import NodeConfig

# What it shares is expensive: all of it in one process.
pytestmark = pytest.mark.xdist_group("nested_tasks")

ONE, OTHER = "n1/0", "n1/1"


@pytest.fixture(scope="module")
def manifest(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Manifest]:
    """A fleet of one node with two slots."""
    config = NodeConfig(1, "demo", "mig", "n1", "local", True, "127.0.0.1:0", accelerator=h100(BIG), simulate=True)
    head = RunningNode(tmp_path_factory.mktemp("fleet") / "n1", config)
    try:
        head.boot()
        yield manifest_of(head)
    finally:
        head.stop()


@pytest.fixture(scope="module")
def pool(manifest: Manifest) -> Iterator[Pool]:
    with sky.connect(manifest, progress=False) as pool:
        yield pool


@sky.compute(env={"FLAG": "1"})
def inner(x: int) -> tuple[int, str, str | None]:
    return 2 * x, sky.instance_info().slot, os.environ.get("FLAG")


@sky.compute
def outer(slot: str) -> Any:
    with sky.current_pool() as pool:
        assert pool is sky.current_pool()
        return pool.submit(inner.options(slot=slot), 3).result(), pool.node_names()


@sky.compute
def outer_of_a_job(slot: str) -> Any:
    return sky.current_pool().submit(inner.options(slot=slot), 3, detach="inner").result()


@sky.compute
def leaves_it_open() -> int:
    return next(sky.current_pool().map(inner.options(slot=OTHER), [4]))[0]


@sky.compute
def connects(manifest: str, slot: str) -> Any:
    with sky.connect(manifest) as pool:
        return pool.submit(inner.options(slot=slot), 3).result()


@sky.compute
def meet(folder: str) -> Any:
    """Waits for a task once both slots are held by tasks that do so."""
    Path(folder, sky.instance_info().slot.replace("/", "-")).touch()
    while len(list(Path(folder).iterdir())) < 2:
        pass
    return sky.current_pool().submit(inner, 1).result()[0]


@sky.compute
def wrong_way() -> Any:
    return inner(1) >> sky.current_pool()


# The pool of a task -------------------------------------------------------------------------------------------------


def test_a_task_sends_tasks_to_its_own_fleet(pool):
    for _ in range(2):
        assert outer(OTHER).options(slot=ONE) >> pool == ((6, OTHER, "1"), ["n1"])
    assert leaves_it_open().options(slot=ONE) >> pool == 8


def test_outside_of_a_task_there_is_none():
    with pytest.raises(sky.NotInTask):
        sky.current_pool()


def test_a_rank_has_it_too(pool):
    found = pool.launch(outer.options(slot=ONE), OTHER, framework="none")
    assert found == [((6, OTHER, "1"), ["n1"])]


def test_a_task_that_waits_for_its_own_slot_is_told(pool):
    with pytest.raises(sky.SlotsHeld, match=r"inner can never start: 1 slot of demo/mig \(n1/0\).*\n.*in the task"):
        outer(ONE).options(slot=ONE) >> pool
    with pytest.raises(sky.SlotsHeld):
        connects(pool.manifest, ONE).options(slot=ONE) >> pool


@pytest.mark.slow
def test_tasks_that_wait_for_one_another_are_told(pool, tmp_path):
    futures = [pool.submit(meet(str(tmp_path)).options(slot=slot)) for slot in (ONE, OTHER)]
    errors = [future.exception(timeout=120) for future in futures]
    assert any(isinstance(error, sky.SlotsHeld) for error in errors), errors


@pytest.mark.slow
def test_a_task_that_waits_for_a_job_is_told(pool):
    futures = [pool.submit(outer_of_a_job(ONE).options(slot=ONE)), pool.submit(outer(ONE).options(slot=OTHER))]
    assert isinstance(futures[0].exception(timeout=120), sky.SlotsHeld)
    futures[1].exception(timeout=120)


def test_a_call_in_a_task_runs_there_and_is_no_task(pool):
    with pytest.raises(TypeError, match=r"(?s)calling a decorated function runs it.*pool\.submit"):
        wrong_way() >> pool


# Functions that travel ----------------------------------------------------------------------------------------------


@sky.compute(timeout=5, retries=2)
def add(x: int, y: int = 1) -> int:
    """Adds."""
    return x + y


@sky.compute
def use(function: Any, *args: Any) -> Any:
    return (
        function(*args),
        function.local(*args),
        function.options(timeout=7).settings.timeout,
        function.settings.timeout,
        function.__wrapped__(*args),
        function.__doc__,
        functools.partial(function, 1)(2),
    )


@sky.compute
def use_by_name() -> Any:
    with ProcessPoolExecutor(1, multiprocessing.get_context("fork")) as executor:
        there = executor.submit(add, 1, 2).result()
    return add(1, 2), add.settings.timeout, pickle.loads(pickle.dumps(add)) is add, there


class Methods:
    @sky.compute
    def twice(self, x: int) -> int:
        return 2 * x


@sky.compute
def use_method() -> int:
    return Methods().twice(3)


def test_a_decorated_function_stays_one_as_an_argument(pool):
    assert use(add, 1) >> pool == (2, 2, 7, 5, 2, "Adds.", 3)
    assert use(add.options(timeout=6), 1) >> pool == (2, 2, 7, 6, 2, "Adds.", 3)

    @sky.compute(timeout=5)
    def nested(x: int, y: int = 1) -> int:
        """Adds."""
        return add(x, y)

    assert use(nested, 1) >> pool == (2, 2, 7, 5, 2, "Adds.", 3)


def test_a_decorated_function_stays_one_where_another_uses_it(pool):
    assert use_by_name() >> pool == (3, 5, True, 3)
    assert use_method() >> pool == 6


# Objects of one slot ------------------------------------------------------------------------------------------------


@sky.cls
class Counter:
    def __init__(self) -> None:
        self.count = 0

    def add(self, x: int) -> tuple[int, str]:
        self.count += x
        return self.count, sky.instance_info().slot


def test_an_object_stands_on_one_slot(pool):
    counter = Counter().on(OTHER)
    assert list(pool.map(counter.add, [1] * 5)) == [(n, OTHER) for n in range(1, 6)]
    assert counter.add(1) @ pool == [(6, OTHER)]
    assert pool.submit(counter.add(1), detach="count").result(timeout=60) == (7, OTHER)
    assert Counter().on(pool.slots()[1]).add(1) >> pool == (8, OTHER)  # who names the slot has the object
    assert counter.release() @ pool == [True]
    with pytest.raises(sky.SlotLost, match="n1/7"):
        Counter().on("n1/7").add(1) >> pool


# Forked processes ---------------------------------------------------------------------------------------------------


def in_fork(work: Any) -> Any:
    """What *work* gives or raises in a process that is forked from this one, while it is connected."""
    with multiprocessing.get_context("fork").Pool(1) as workers:
        return workers.apply_async(attempt, (work,)).get(timeout=60)


def attempt(work: Any) -> Any:
    try:
        return work()
    except Exception as error:  # noqa: BLE001 - it is what is asked for
        return f"{type(error).__name__}: {error}"


CONNECTED: dict[str, Any] = {}


def submit() -> Any:
    return add(1) >> CONNECTED["pool"]


def wait_for() -> Any:
    return CONNECTED["future"].result()


def await_it() -> Any:
    async def run() -> Any:
        return await CONNECTED["future"]

    return asyncio.run(run())


def take() -> Any:
    return next(CONNECTED["stream"])


def await_an_item() -> Any:
    async def run() -> Any:
        return await anext(CONNECTED["stream"])

    return asyncio.run(run())


def connect() -> Any:
    CONNECTED["pool"].close()
    with sky.connect(CONNECTED["pool"].manifest, progress=False) as pool:
        return add(1) >> pool


def test_a_forked_process_is_told_that_the_connection_is_its_parents(pool):
    CONNECTED["pool"] = pool
    assert "ConnectionForked: the connection to demo/mig" in in_fork(submit)
    gate = pool.submit(sleep.options(slot=ONE))
    CONNECTED["future"] = gate
    for work in (wait_for, await_it):
        assert "ConnectionForked: the connection to the fleet of sleep" in in_fork(work)
    gate.cancel()
    CONNECTED["stream"] = stream = pool.submit(one_item.options(slot=OTHER)).result()
    for work in (take, await_an_item):
        assert "ConnectionForked: the connection to the fleet of one_item" in in_fork(work)
    assert next(stream) == 1
    stream.close()
    assert add(1) >> pool == 2


@sky.compute
def sleep() -> None:
    while True:
        pass


@sky.compute
def one_item() -> Iterator[int]:
    yield 1
    while True:
        pass


def test_a_forked_process_may_connect(pool):
    CONNECTED["pool"] = pool
    assert in_fork(connect) == 2
    assert add(1) >> pool == 2


def test_a_forked_process_that_leaves_the_block_leaves_the_connection(manifest):
    with sky.connect(manifest, progress=False) as own:
        child = os.fork()
        if child == 0:
            try:
                own.close()
            finally:
                os._exit(0 if not own._fleet.closed else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert add(1) >> own == 2
    assert sys.exc_info() == (None, None, None)


def test_a_runner_without_the_client_says_what_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(vars(sky), "current_pool", raising=False)
    monkeypatch.setitem(sys.modules, "skyinfra.client", None)
    with pytest.raises(ModuleNotFoundError) as caught:
        sky.current_pool  # noqa: B018 - looking at it is what fails
    assert f'sky.Image(runner="skyinfra=={sky.__version__}")' in caught.value.__notes__[0]
