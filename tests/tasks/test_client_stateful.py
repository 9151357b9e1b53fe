"""Objects that stay on the slots between tasks."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

import skyinfra as sky
from skyinfra.tasks import Task


@sky.cls
class Model:
    """Counts what happens to it in a file."""

    def __init__(self, path: str, factor: int = 2) -> None:
        self.path = path
        self.factor = factor
        self.calls = 0

    @sky.enter
    def load(self) -> None:
        self.note("enter")
        self.weights = self.factor

    @sky.exit
    def unload(self) -> None:
        self.note("exit")

    def note(self, what: str) -> None:
        with Path(self.path).open("a") as file:
            file.write(f"{what} {self.factor} {os.getpid()}\n")

    def predict(self, x: int) -> tuple[int, int, int]:
        self.calls += 1
        return self.weights * x, self.calls, os.getpid()

    def fail(self) -> None:
        raise LookupError("no such thing")


@sky.cls(keep=2, timeout=60)
class Pair(getattr(Model, "kind", Model)):  # on a node, it is the class itself
    pass


@sky.cls
class FailsAtExit:
    def __init__(self, number: int) -> None:
        self.number = number

    @sky.exit
    def leave(self) -> None:
        raise LookupError(self.number)

    def get(self) -> int:
        return self.number


def lines(path: Path) -> list[list[str]]:
    return [line.split() for line in path.read_text().splitlines()] if path.exists() else []


@pytest.fixture
def one(pool):
    """One slot of the fleet."""
    return pool.slots()[:1]


def test_an_object_is_made_once_and_stays_warm(pool, tmp_path, one):
    path = tmp_path / "notes"
    model = Model(str(path), factor=3)
    results = [pool.broadcast(model.predict(x), slots=one)[0] for x in range(5)]
    assert [value for value, _, _ in results] == [0, 3, 6, 9, 12]
    assert [calls for _, calls, _ in results] == [1, 2, 3, 4, 5]
    assert [what for what, _, _ in lines(path)] == ["enter"]


def test_its_methods_are_as_decorated_functions_are(pool, tmp_path):
    model = Model(str(tmp_path / "notes"))
    assert [value for value, _, _ in pool.map(model.predict, range(10))] == [2 * x for x in range(10)]
    assert pool.submit(model.predict, 4).result(timeout=60)[0] == 8
    assert [value for value, _, _ in sky.gather(model.predict(1), model.predict(2)) >> pool] == [2, 4]
    assert pool.submit(model.predict, 1).key.startswith("Model.predict-")


def test_every_slot_has_its_own(pool, tmp_path):
    path = tmp_path / "notes"
    model = Model(str(path))
    results = model.predict(1) @ pool
    assert len({pid for _, _, pid in results}) == 4
    assert len(lines(path)) == 4
    assert model.release() @ pool == [True] * 4
    assert sorted(what for what, _, _ in lines(path)) == ["enter"] * 4 + ["exit"] * 4
    assert model.release() @ pool == [False] * 4


def test_one_made_from_other_arguments_takes_its_place(pool, tmp_path, one):
    path = tmp_path / "notes"
    for factor in (2, 3, 2):
        pool.broadcast(Model(str(path), factor).predict(1), slots=one)
    assert [(what, factor) for what, factor, _ in lines(path)] == [
        ("enter", "2"),
        ("exit", "2"),
        ("enter", "3"),
        ("exit", "3"),
        ("enter", "2"),
    ]


def test_an_object_that_fails_as_it_goes_does_not_fail_the_one_that_takes_its_place(pool, one):
    for number in (1, 2):
        assert pool.broadcast(FailsAtExit(number).get(), slots=one) == [number]
    with pytest.raises(LookupError):
        pool.broadcast(FailsAtExit(2).release(), slots=one)


def test_as_many_stay_as_the_class_keeps(pool, tmp_path, one):
    path = tmp_path / "notes"
    for factor in (2, 3, 2, 4, 2):
        pool.broadcast(Pair(str(path), factor).predict(1), slots=one)
    # The 3 was used longest ago when the 4 came.
    assert [(what, factor) for what, factor, _ in lines(path)] == [
        ("enter", "2"),
        ("enter", "3"),
        ("exit", "3"),
        ("enter", "4"),
    ]


def test_what_it_raises_arrives_and_it_stays(pool, tmp_path, one):
    model = Model(str(tmp_path / "notes"))
    with pytest.raises(LookupError, match="no such thing"):
        pool.broadcast(model.fail(), slots=one)
    assert pool.broadcast(model.predict(1), slots=one)[0][1] == 1
    assert len(lines(tmp_path / "notes")) == 1


def test_one_that_cannot_be_entered_is_not_kept(pool, tmp_path, one):
    @sky.cls
    class Fragile:
        def __init__(self, path: str) -> None:
            self.path = path

        @sky.enter
        def load(self) -> None:
            if not Path(self.path).exists():
                raise FileNotFoundError(self.path)

        def ok(self) -> bool:
            return True

    fragile = Fragile(str(tmp_path / "weights"))
    with pytest.raises(FileNotFoundError):
        pool.broadcast(fragile.ok(), slots=one)
    (tmp_path / "weights").touch()
    assert pool.broadcast(fragile.ok(), slots=one) == [True]


def test_it_leaves_with_the_process_of_its_slot(fleets, tmp_path):
    fleet = fleets(nodes=("n0",), slots=1)
    path = tmp_path / "notes"
    from skyinfra.client import open_pool

    with open_pool(fleet.manifest) as pool:
        Model(str(path)).predict(1) >> pool
    fleet.close()
    assert [what for what, _, _ in lines(path)] == ["enter", "exit"]


def test_here_it_is_a_plain_object(tmp_path):
    model = Model.local(str(tmp_path / "notes"), 5)
    assert model.predict(2)[0] == 10
    assert [what for what, _, _ in lines(tmp_path / "notes")] == ["enter"]


def test_a_task_makes_plain_objects_of_it(pool, tmp_path):
    def use(path: str) -> int:
        return Model(path, 3).factor

    assert Task(use, (str(tmp_path / "notes"),)) >> pool == 3


def test_marks_of_a_base_class_count_once_and_an_override_may_drop_them():
    from skyinfra.worker.stateful import ENTER, marked

    class Base:
        @sky.enter
        def first(self) -> None: ...

        @sky.enter
        def second(self) -> None: ...

    class Derived(Base):
        def first(self) -> None: ...

        @sky.enter
        def third(self) -> None: ...

    assert marked(Base, ENTER) == ["first", "second"]
    assert marked(Derived, ENTER) == ["second", "third"]


def test_what_cannot_be(pool, tmp_path):
    with pytest.raises(TypeError, match="takes a class"):
        sky.cls(lambda: None)
    with pytest.raises(sky.InvalidField, match="keep"):
        sky.cls(keep=0)(Model.kind)
    for name in ("on", "release"):
        with pytest.raises(sky.InvalidField, match=rf"Kind\.{name}: .* have a method {name}\(\) of ours"):
            sky.cls(type("Kind", (), {name: lambda self: None}))
    kind = sky.cls(type("Kind", (), {"recipe": lambda self: None, "release": sky.exit(lambda self: None)}))
    assert kind().recipe().name == "Kind.recipe"
    with pytest.raises(TypeError, match="unexpected"):
        Model(str(tmp_path), wrong=1)
    with pytest.raises(AttributeError, match=r"no method 'guess'; its methods: .*predict"):
        Model(str(tmp_path)).guess(1)
    with pytest.raises(sky.TaskNotPicklable, match="lock"):
        Model(threading.Lock()).predict(1) >> pool
    with pytest.raises(sky.TaskNotPicklable, match=r"handle of Model.* its methods can be sent"):
        Task(print, (Model(str(tmp_path)),)) >> pool
    assert "Model" in repr(Model)
    assert "Model" in repr(Model(""))
