"""Large calls: what several have in common is a part of its own, and is said, once, by its name."""

from __future__ import annotations

import os
import pickle
import warnings
from collections.abc import Iterator
from typing import Any

import pytest

from skyinfra.blobs import payload
from skyinfra.tasks import Task, large, pickling
from skyinfra.tasks.needs import Needs

TABLE = os.urandom(12 * 2**20)


@pytest.fixture(autouse=True)
def _anew(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(large, "_calls", {})
    yield
    large._known.clear()


def parts(function: Any, *args: object) -> list[Any]:
    return list(pickling._pack_call(Task(function, args), Needs(None)).parts)


def loaded(function: Any, *args: object, **values: object) -> Any:
    """Returns the call as a node gets it, with *values* of global variables."""
    needs = Needs(None)
    needs.values.update(values)
    packed = pickling._pack_call(Task(function, args), needs)
    return pickle.loads(packed.joined(), buffers=[memoryview(bytes(each)) for each in packed.buffers])


def called(function: Any, *args: object) -> Any:
    run, given, named = loaded(function, *args)
    return run(*given, **named)


def of_table() -> Any:
    table = TABLE

    def size(n: int) -> int:
        return len(table) + n

    return size


def of_words() -> Any:
    words = {str(number): [f"{number:080}"] for number in range(120_000)}

    def count(n: int) -> int:
        return len(words) + n

    return count


@pytest.mark.parametrize(("make", "uses", "result"), [(of_table, "table", len(TABLE)), (of_words, "words", 120_000)])
def test_what_a_function_uses_is_one_part_of_all_its_calls(make: Any, uses: str, result: int) -> None:
    function = make()
    first = parts(function, 1)
    with pytest.warns(UserWarning, match=rf"^'{uses}', which .* uses, 1\d\.\d MiB, is in more than one call of .*once"):
        second = parts(function, 2)
    assert first[1] == second[1] and first[1].size > 10 * 2**20 and max(first[0].size, second[0].size) < 4096
    assert called(function, 5) == result + 5  # without another word


def test_an_argument_is_named() -> None:
    def size(table: bytes, n: int) -> int:
        return len(table) + n

    parts(size, TABLE, 1)
    with pytest.warns(UserWarning, match=r"^argument 'table' of .*size, 12\.0 MiB"):
        parts(size, TABLE, 2)
    assert called(size, TABLE, 3) == len(TABLE) + 3


def test_nothing_is_said_of_other_calls() -> None:
    function = of_table()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(3):  # as to every slot
            parts(function, 1)
        for number in range(3):
            parts(len, os.urandom(11 * 2**20))
            parts(len, b"x" * 2**20 + bytes([number]))


def test_what_changes_is_sent_as_it_is_then() -> None:
    words = {str(number): [f"{number:080}"] for number in range(120_000)}

    def value() -> object:
        return words["7"]

    assert len(called(value)) == 1
    words["7"].append("8")
    assert called(value)[1:] == ["8"]


def test_what_large_values_share_is_one_object_there_too() -> None:
    words: list[object] = [f"{number:080}" for number in range(150_000)]
    table: dict[str, object] = {"words": words}
    table["itself"] = table

    def shared(first: list[object], second: dict[str, object], n: int) -> bool:
        return first[0] is second["words"] and second["itself"] is second and n == 1

    assert called(shared, [words], table, 1)
    _, (values, _, n), _ = loaded(len, [1], TABLE=table, ROWS=[words], FIRST=2)
    assert values["ROWS"][0] is values["TABLE"]["words"] and (values["FIRST"], n) == (2, [1])


def test_a_large_argument_is_one_part_of_all_calls_that_have_it() -> None:
    def count(words: list[str], others: list[int]) -> int:
        return len(words) + len(others)

    words = [f"{number:080}" for number in range(150_000)]
    first = parts(count, words, [1])
    with pytest.warns(UserWarning, match=r"^argument 'words' of .*count, 1\d\.\d MiB, is in more than one call"):
        second = parts(count, words, [2])
    assert first[1] == second[1] and max(first[0].size, second[0].size) < 4096


def test_what_is_sent_once_is_not_kept() -> None:
    """The result of a task: the next one has other bytes."""
    before = dict(payload._digests)
    result = bytes(5 * 2**20)
    assert payload.pack(result).parts == payload.pack(result).parts
    assert payload._digests == before
    assert payload.pack(result, again=True).parts == payload.pack(result).parts
    assert id(result) in payload._digests


def test_a_job_is_said_to_travel_whole() -> None:
    function = of_table()

    def job(n: int) -> None:
        pickling.Shipment(Task(function, (n,)), topic="", whole=True)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        job(1)
    with pytest.warns(UserWarning, match=r"^'table', which .* uses, 1\d\.\d MiB, .*: each job, .* and is sent whole\."):
        job(2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        job(3)
