"""Functions and methods as tasks, before they are sent."""

from __future__ import annotations

import dataclasses
import functools
import os
import pickle
from collections.abc import Callable, Iterator

import pytest

import skyinfra as sky
from skyinfra.tasks import Task, pickling


@dataclasses.dataclass
class Methods:
    x: int

    @classmethod
    @sky.compute
    def made(cls, x: int) -> Methods:
        return cls(x)

    @staticmethod
    @sky.compute
    def twice(x: int) -> int:
        return 2 * x

    @sky.compute
    def more(self, x: int) -> Methods:
        return Methods(self.x + x)

    @sky.compute(timeout=60)
    def upto(self, x: int) -> Iterator[int]:
        yield from range(self.x, x)


@sky.compute
def double(x: int) -> int:
    """Doubles."""
    return 2 * x


@sky.compute()
def add_next(x: int) -> int:
    return double(x) + following(5)


def following(x: int) -> int:
    return x + 1


def test_a_call_runs_nothing_and_keeps_its_arguments():
    task = double(3)
    assert isinstance(task, Task)
    assert task.args == (3,)
    assert task.name == "double"
    with pytest.raises(dataclasses.FrozenInstanceError):
        task.args = ()  # type: ignore[misc]


def test_the_decorator_keeps_name_and_doc_and_refuses_what_cannot_run():
    assert double.__name__ == "double"
    assert double.__doc__ == "Doubles."
    with pytest.raises(TypeError, match="takes a function, not int"):
        sky.compute(3)  # type: ignore[call-overload]

    async def coroutine() -> None: ...

    with pytest.raises(TypeError, match=r"asyncio\.run"):
        sky.compute(coroutine)


def test_local_runs_here_with_the_decorated_functions_it_calls():
    assert add_next.local(10) == 26
    assert isinstance(double(1), Task)


def test_pickled_it_keeps_its_function_and_its_options():
    again = pickle.loads(pickle.dumps(sky.compute(timeout=3)(os.path.basename)))
    assert (again.function, again.settings.timeout) == (os.path.basename, 3)
    assert pickle.loads(pickle.dumps(double)) is double  # by its name


class Twice:
    """A decorator that is a class, with names of its own for what it keeps."""

    def __init__(self, function: Callable[[int], int]) -> None:
        self.function = function
        self.settings = "its own"
        functools.update_wrapper(self, function)

    def __call__(self, x: int) -> int:
        return 2 * self.function(x)


def test_what_other_decorators_have_made_is_called_and_keeps_the_options():
    made = sky.compute(timeout=600)(Twice(following))
    assert (made.local(1), made.settings.timeout) == (4, 600)
    again = sky.compute(timeout=600, retries=5)(sky.compute(timeout=3)(following))
    assert (again.local(1), again.settings.timeout, again.settings.retries) == (2, 600, 5)


def test_a_method_keeps_its_object_and_its_options():
    one = Methods(1)
    tasks = [
        (one.upto(3), 60),
        (pickling.as_task(one.upto, (3,), {}), 60),
        (pickling.as_task(functools.partial(one.upto, 3), (), {}), 60),
        (pickling.as_task(one.upto.options(timeout=5), (3,), {}), 5),
        (pickling.as_task(pickle.loads(pickle.dumps(one.upto)), (3,), {}), 60),
    ]
    for task, timeout in tasks:
        assert (list(task.function(*task.args)), task.settings.timeout) == ([1, 2], timeout)
        assert pickling.Shipment(task, topic="").stream
    assert list(one.upto.local(3)) == [1, 2] and one.more.local(2) == Methods(3)
    assert pickling.as_task(Methods.made, (2,), {}).function.__name__ == "made" and Methods.made.local(2) == Methods(2)
    data, _ = pickling.dump_call(Methods.made(2))
    assert len(data) < 300, "it is named"


def test_the_name_of_a_task_can_be_sent():
    name = os.fsdecode(b"caf\xe9.py")
    assert pickling.Shipment(Task(len, ("1",)), topic="", name=name).name.encode() == rb"caf\udce9.py"


def test_gather_takes_tasks_only():
    with pytest.raises(TypeError, match="argument 1 is int"):
        sky.gather(double(1), 3)  # type: ignore[call-overload]


def test_a_task_goes_to_pools_only():
    with pytest.raises(TypeError):
        double(1) >> 3  # type: ignore[operator]
    with pytest.raises(TypeError):
        double(1) @ 3  # type: ignore[operator]


def test_methods_of_a_class(pool):
    assert Methods.made(2) >> pool == Methods(2) and Methods.twice(2) >> pool == 4
    assert Methods(1).more(2) >> pool == Methods(3)
    assert [each.x for each in pool.map(Methods(1).more, (2, 3))] == [3, 4]
    assert pool.submit(Methods.made, 2).result() == Methods(2)
    assert list(pool.submit(Methods(1).upto, 3).result()) == [1, 2]
