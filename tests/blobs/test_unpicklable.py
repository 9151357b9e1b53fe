"""Where in a value lies what cannot be pickled."""

from __future__ import annotations

import threading

import pytest

from skyinfra.blobs import payload, unpicklable

LOCK = threading.Lock()


class Plain:
    def __init__(self, **parts: object) -> None:
        self.__dict__.update(parts)


class Slotted:
    __slots__ = ("inner", "name")

    def __init__(self, inner: object) -> None:
        self.name = "slotted"
        self.inner = inner


class Careful(Plain):
    """Leaves its lock out."""

    def __getstate__(self) -> dict[str, object]:
        return {"rest": self.rest}  # type: ignore[attr-defined]


class Refuses:
    def __reduce_ex__(self, protocol: object) -> tuple[object, ...]:
        raise TypeError("not me")


def deep(levels: int) -> object:
    value: object = LOCK
    for _ in range(levels):
        value = [value]
    return value


def cyclic() -> Plain:
    value = Plain(lock=LOCK)
    value.__dict__ = {"self": value, "lock": LOCK}
    return value


@pytest.mark.parametrize(
    ("value", "path"),
    [
        (LOCK, ""),
        (Plain(inner={"conn": [1, LOCK]}), ".inner['conn'][1]"),
        (Slotted(Plain(lock=LOCK)), ".inner.lock"),
        ((1, {"a": 2, (3, 4): LOCK}), "[1][(3, 4)]"),
        (Careful(lock=LOCK, rest=[LOCK]), ".rest[0]"),
        ([Refuses()], "[0]"),
        (deep(30), "[0]" * 20),
        ({LOCK}, ""),
    ],
)
def test_the_way_to_what_cannot_be_pickled(value, path):
    assert unpicklable.where(value, payload.pack) == path


def test_a_value_that_refers_to_itself_comes_to_an_end():
    assert unpicklable.where(cyclic(), payload.pack).startswith(".self.self")


def test_a_value_without_such_a_part_has_no_way():
    assert unpicklable.where(Plain(inner=[1, 2]), payload.pack) == ""
