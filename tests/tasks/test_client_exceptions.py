"""Exceptions of tasks on a fleet: in tasks, maps, coroutines, jobs and gangs."""

from __future__ import annotations

import asyncio
import concurrent.futures
import dataclasses
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import Any

import pytest

import skyinfra as sky
from skyinfra.tasks import Task


@dataclasses.dataclass(frozen=True)
class Frozen(Exception):
    number: int


def throw(kind: type[BaseException], *args: Any) -> None:
    raise kind(*args)


def throw_at(number: int, last: int) -> int:
    if number == last:
        raise StopIteration("empty")
    return number


class OfGpu:
    """Stands for a tensor of a GPU, which PyTorch refuses to make on a machine without one."""

    def __reduce__(self) -> tuple[Any, ...]:
        text = "Attempting to deserialize object on a CUDA device but torch.cuda.is_available() is False."
        return throw, (RuntimeError, text)


def test_a_result_that_is_on_a_gpu_says_what_to_return(pool: Any) -> None:
    with pytest.raises(RuntimeError, match="deserialize object on a CUDA device") as caught:
        Task(OfGpu, ()) >> pool
    assert caught.value.__notes__ == [
        "The result of OfGpu is on a device of its slot, and this machine has none for it: return tensor.cpu(), "
        "model.cpu() or array.get()."
    ]


KINDS = [KeyboardInterrupt, asyncio.CancelledError, GeneratorExit, StopIteration, StopAsyncIteration]


@pytest.mark.parametrize("kind", KINDS)
def test_what_would_act_on_the_program_here_is_a_cause(pool: Any, kind: type[BaseException]) -> None:
    with pytest.raises(sky.TaskFailed, match=f"throw raised .*{kind.__name__}") as caught:
        Task(throw, (kind, "x")) >> pool
    assert type(caught.value.__cause__) is kind and caught.value.__cause__.args == ("x",)
    assert traceback.extract_tb(caught.value.__cause__.__traceback__)[-1].name == "throw"


def test_in_every_way_to_run(pool: Any) -> None:
    task: Task[None] = Task(throw, (KeyboardInterrupt,))
    ways = [
        lambda: task @ pool,
        lambda: sky.gather(task, Task(len, ([],))) >> pool,
        lambda: list(pool.map(throw, [KeyboardInterrupt])),
        lambda: pool.launch(throw, KeyboardInterrupt, nodes=1, per_node=1, framework="none"),
        lambda: task.options(retries=1) >> pool,
    ]
    for way in ways:
        with pytest.raises(sky.TaskFailed, match="throw raised KeyboardInterrupt") as caught:
            way()
        assert isinstance(caught.value.__cause__, KeyboardInterrupt)
    future = pool.submit(task)
    assert isinstance(future.exception(60), sky.TaskFailed) and not future.cancelled()


def test_in_coroutines(fleet: Any) -> None:
    async def main() -> list[BaseException]:
        found: list[BaseException] = []
        async with sky.connect_async(fleet.manifest) as pool:

            async def one() -> None:
                await (Task(throw, (asyncio.CancelledError, "inner")) >> pool)

            try:
                async with asyncio.TaskGroup() as group:
                    group.create_task(one())
            except ExceptionGroup as error:
                found += error.exceptions
            results = []
            try:
                async for number in pool.map(throw_at, range(6), [3] * 6):
                    results.append(number)
            except sky.TaskFailed as error:
                found.append(error)
            assert results == [0, 1, 2]
        return found

    cancelled, stopped = asyncio.run(main())
    assert isinstance(cancelled, sky.TaskFailed) and isinstance(cancelled.__cause__, asyncio.CancelledError)
    assert isinstance(stopped.__cause__, StopIteration)


@pytest.mark.parametrize("count", [6, 400])
def test_a_map_does_not_end_without_a_word(pool: Any, count: int) -> None:
    results = []
    with pytest.raises(sky.TaskFailed, match="throw_at raised StopIteration: empty"):
        for number in pool.map(throw_at, range(count), [count - 3] * count):
            results.append(number)
    assert results == list(range(count - 3))


@pytest.mark.parametrize(("code", "starts"), [(None, 1), (0, 1), (3, 3), ("text", 3)])
def test_a_task_that_is_done_is_not_tried_again(pool: Any, tmp_path: Path, code: object, starts: int) -> None:
    def leave(path: str) -> None:
        with open(path, "a") as file:  # noqa: PTH123
            file.write("x")
        sys.exit(code)  # type: ignore[arg-type]

    file = tmp_path / "starts"
    with pytest.raises(sky.TaskFailed, match=r"leave called sys\.exit\("):
        Task(leave, (str(file),)).options(retries=2) >> pool
    assert file.read_text() == "x" * starts


def test_a_gang_that_leaves_is_not_started_again(pool: Any, tmp_path: Path) -> None:
    def leave(path: str) -> None:
        with open(path, "a") as file:  # noqa: PTH123
            file.write("x")
        sys.exit(0)

    task: Task[None] = Task(leave, (str(tmp_path / "starts"),)).options(retries=2)
    with pytest.raises(sky.TaskFailed, match=r"leave called sys\.exit\(0\)"):
        pool.launch(task, nodes=1, per_node=1, framework="none")
    assert (tmp_path / "starts").read_text() == "x"


def test_a_class_that_refuses_attributes(pool: Any) -> None:
    with pytest.raises(Frozen) as caught:
        pool.submit(throw, Frozen, 3).result(60)
    assert caught.value.number == 3
    with pytest.raises(Frozen):
        pool.launch(throw, Frozen, 3, nodes=1, per_node=1, framework="none")


# Code of the user that reports them ---------------------------------------------------------------------------------


class Hangs(Exception):
    def __init__(self, file: str) -> None:
        self.file = file

    def __str__(self) -> str:
        Path(self.file).touch()
        while True:
            time.sleep(0.02)


def test_a_text_that_is_never_made_is_over_the_time_of_the_task(pool: Any, tmp_path: Path) -> None:
    with pytest.raises(sky.TaskTimeout, match=r"throw ran for more than 0\.5 s"):
        Task(throw, (Hangs, str(tmp_path / "asked"))).options(timeout=0.5) >> pool
    assert pool.submit(len, [1]).result(60) == 1


def test_a_task_that_never_makes_its_text_can_be_cancelled(pool: Any, tmp_path: Path, wait_until: Any) -> None:
    future = pool.submit(throw, Hangs, str(tmp_path / "asked"))
    wait_until((tmp_path / "asked").exists)
    future.cancel()
    with pytest.raises(concurrent.futures.CancelledError):
        future.result(60)
    assert [pool.submit(len, [1]).result(60) for _ in range(8)] == [1] * 8


@pytest.mark.slow
def test_a_rank_whose_text_is_never_made_says_what_it_raised(pool: Any, tmp_path: Path) -> None:
    with pytest.raises(sky.TaskFailed, match="Hangs, whose text and content were not had in time"):
        pool.launch(throw, Hangs, str(tmp_path / "asked"), nodes=1, per_node=1, framework="none")


def test_large_exceptions(pool: Any) -> None:
    size = 6 * 2**20
    with pytest.raises(ValueError) as caught:
        pool.submit(lambda: throw(ValueError, "bad batch", bytes(size))).result(60)
    assert caught.value.args == ("bad batch", bytes(size))
    assert caught.value.__traceback__ is not None
    with pytest.raises(RuntimeError) as long:
        pool.submit(lambda: throw(RuntimeError, "x" * size)).result(60)
    assert len(str(long.value)) == size
    with pytest.raises(ValueError) as of_rank:
        pool.launch(lambda: throw(ValueError, bytes(size)), nodes=1, per_node=1, framework="none")
    assert of_rank.value.args == (bytes(size),)


def test_a_lock_in_a_group_is_text(pool: Any) -> None:
    def several() -> None:
        held = ValueError("held")
        held.lock = threading.Lock()  # type: ignore[attr-defined]
        raise ExceptionGroup("g", [ValueError(1), held])

    with pytest.raises(ExceptionGroup) as caught:
        pool.submit(several).result(60)
    plain, text = caught.value.exceptions
    assert repr(plain) == "ValueError(1)"
    assert isinstance(text, sky.TaskFailed) and "ValueError: held" in str(text)
