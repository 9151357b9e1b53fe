"""Exceptions on their way: each arrives as it was raised, or is told as text; never as another one."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import pickle
import subprocess
import traceback
import types
from decimal import Decimal
from pathlib import Path
from typing import Any

import cloudpickle
import pydantic
import pytest
from checks.exceptions import (
    Another,
    Below,
    Boxed,
    Circular,
    Composes,
    Costly,
    Dumps,
    Forgets,
    Frozen,
    Grows,
    KeywordsOnly,
    Listed,
    Locked,
    NewTakesMore,
    NoArguments,
    NoText,
    OfPath,
    Prefixed,
    Scaled,
    Slotted,
    Tensor,
    Unlocked,
    Words,
)

import skyinfra as sky
from skyinfra.protocol import failures, pickles
from skyinfra.protocol.calls import Outcome
from skyinfra.tasks import outcomes
from skyinfra.worker.secrets import Masker


def raised(error: BaseException) -> BaseException:
    try:
        raise error
    except BaseException as caught:  # noqa: BLE001 - any of them
        return caught


def text(error: BaseException) -> str:
    try:
        return str(error)
    except RuntimeError:
        return "no text"


def arrived(error: BaseException) -> BaseException:
    outcome = pickle.loads(pickle.dumps(Outcome(failure=failures.of(error, below=""))))
    found = outcomes.exception(outcome, "f")
    assert found is not None
    return found


def noted(error: BaseException) -> BaseException:
    error.add_note("a note")
    return error


def invalid() -> BaseException:
    """An exception whose class is not made as others are, and has its own way to be pickled."""
    with pytest.raises(pydantic.ValidationError) as caught:
        pydantic.TypeAdapter(int).validate_python("x")
    return noted(caught.value)


def flat(error: BaseException) -> tuple[Any, ...]:
    rest = {name: value for name, value in vars(error).items() if name != "lock"}
    return type(error), text(error), rest, [flat(each) for each in getattr(error, "exceptions", ())]


KINDS = [
    ValueError("v", {"a": [1]}),
    noted(ValueError("v")),
    KeyError("k"),
    Composes("no such bucket", code=404),
    Prefixed("name"),
    NoArguments(),
    KeywordsOnly(code=5),
    OfPath("/nowhere"),
    FileNotFoundError(2, "No such file", "/nowhere"),
    UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid start byte"),
    subprocess.CalledProcessError(1, ["false"], b"out"),
    json.JSONDecodeError("bad", "{", 1),
    noted(json.JSONDecodeError("bad", "{", 1)),
    SyntaxError("bad", ("f.py", 1, 2, "text")),
    ImportError("no", name="x", path="/x"),
    Slotted(3),
    NewTakesMore(1, 2),
    Frozen(3),
    Dumps("d"),
    NoText("x"),
    ExceptionGroup("g", [ValueError(1), KeywordsOnly(code=2), Prefixed("z"), ExceptionGroup("h", [Composes("y")])]),
    Words("w", [Composes("y")]),
    Scaled(2.0),
    Scaled(float("nan")),
    Boxed("no bucket"),
    Below("q"),
    Listed(1, float("nan")),
    Unlocked(2.0),
    ValueError({"b", "a"}, Path("/a"), Decimal("nan"), Circular()),
    ValueError("holds others", [Composes("inside")]),
    ValueError(object),
    ValueError(float("nan")),
    sky.TaskTooLarge("x", hint="y"),
    noted(Dumps("d")),
    invalid(),
]


@pytest.mark.parametrize("error", KINDS, ids=lambda error: type(error).__name__)
def test_it_arrives_as_it_was_raised(error: BaseException) -> None:
    there = arrived(raised(error))
    assert flat(there) == flat(error)
    assert traceback.extract_tb(there.__traceback__)[0].line == "raise error"


def test_one_that_cannot_even_be_looked_at_is_told() -> None:
    class Broken(Exception):
        @property
        def args(self) -> tuple[Any, ...]:  # type: ignore[override]
            raise RuntimeError("args")

    there = arrived(raised(Broken("x")))
    assert type(there) is sky.TaskFailed and "Broken, which raises RuntimeError when described" in str(there)


def test_what_is_in_its_slots_arrives_too() -> None:
    there = arrived(OfPath("/nowhere"))
    assert isinstance(there, OfPath) and (there.errno, there.filename) == (2, "/nowhere")
    there = arrived(Slotted(3))
    assert isinstance(there, Slotted) and (there.extra, there._Slotted__hidden) == (3, 7)  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "error",
    [ValueError("diverged", Tensor()), AssertionError(Tensor()), ValueError({"loss": Tensor()}), KeyError(Tensor())],
)
def test_what_its_arguments_say_of_themselves_is_not_compared(error: BaseException) -> None:
    assert type(arrived(raised(error))) is type(error)


@pytest.mark.parametrize(
    "error",
    [
        Locked("held"),
        Grows("x"),
        ExceptionGroup("g", [Locked("held")]),
        Costly(2.0),
        ValueError(Forgets(2.0)),
        ValueError(Another("x")),
    ],
    ids=repr,
)
def test_what_would_be_another_one_is_text(error: BaseException) -> None:
    there = arrived(raised(error))
    there = getattr(there, "exceptions", [there])[0]
    assert type(there) is sky.TaskFailed
    assert "f raised an exception that cannot be shipped:" in str(there)
    assert any(
        each in str(there) for each in ("Locked: held", "Grows: x! ", "Costly: 2.4", "ValueError: 2.0", "ValueError: x")
    )


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (KeyboardInterrupt(), "f raised KeyboardInterrupt"),
        (asyncio.CancelledError("inner"), "f raised asyncio.exceptions.CancelledError: inner"),
        (GeneratorExit(), "f raised GeneratorExit"),
        (StopIteration("empty"), "f raised StopIteration: empty"),
        (StopAsyncIteration(), "f raised StopAsyncIteration"),
        (SystemExit(3), "f called sys.exit(3)"),
        (SystemExit("text"), "f called sys.exit('text')"),
        (BaseExceptionGroup("g", [KeyboardInterrupt()]), "f raised BaseExceptionGroup: g (1 sub-exception)"),
        (type("Stop", (BaseException,), {})("x"), "Stop: x"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else "",
)
def test_what_would_act_on_the_program_here_is_a_cause(error: BaseException, says: str) -> None:
    there = arrived(raised(error))
    assert type(there) is sky.TaskFailed and says in str(there)
    cause = there.__cause__
    assert type(cause) is type(error) and cause.args[:1] == error.args[:1] and cause.__traceback__ is not None


def nested(count: int) -> BaseException:
    error: BaseException = ValueError(0)
    for number in range(1, count):
        before, error = error, ValueError(number)
        error.__cause__ = before
    return error


def chain(error: BaseException | None) -> list[BaseException]:
    found = []
    while error is not None:
        found.append(error)
        error = error.__cause__
    return found


def test_a_long_chain_keeps_its_ends() -> None:
    there = arrived(nested(10_000))
    links = chain(there)
    assert len(links) == 100 and links[0].args == (9999,) and links[-1].args == (0,)
    assert there.__notes__ == ["It has 9900 more exceptions before it or in it, which are left out."]
    assert [each.args[0] for each in chain(arrived(nested(100)))] == list(range(99, -1, -1))


def test_circles_and_exceptions_that_are_reached_twice() -> None:
    first, second = ValueError("first"), KeyError("second")
    first.__cause__, second.__cause__, second.__context__ = second, first, second
    assert list(map(repr, chain(arrived(first)))) == ["ValueError('first')", "KeyError('second')"]
    # Each from the one before, which is its context too.
    error: BaseException = ValueError(0)
    for number in range(1, 90):
        try:
            raise ValueError(number) from error
        except ValueError as caught:
            caught.__context__ = error
            error = caught
    failure = Masker(["secret-value"]).failure(failures.of(error, below=""))
    assert len(pickle.dumps(failure)) < 200_000


def test_large_and_deep_groups() -> None:
    many = arrived(ExceptionGroup("many", [ValueError(number) for number in range(500)]))
    assert isinstance(many, ExceptionGroup) and len(many.exceptions) == 99
    assert "401 more exceptions" in many.__notes__[0]
    deep: Exception = ValueError(1)
    for _ in range(3000):
        deep = ExceptionGroup("deep", [deep])
    assert isinstance(arrived(deep), ExceptionGroup)


def test_the_text_of_a_group_has_its_members() -> None:
    text = failures.of(ExceptionGroup("g", [ValueError("one"), ExceptionGroup("h", [KeyError("two")])]), below="").text
    assert "ValueError: one" in text and "KeyError: 'two'" in text and "  |   | " in text


def test_it_is_asked_for_its_text_once_and_no_one_else_is() -> None:
    class Counts(Exception):
        asked = 0

        def __str__(self) -> str:
            type(self).asked += 1
            return "counted"

    def cause(self: Exception) -> None:
        raise AssertionError("the chain is no part of it")

    error = Counts("x")
    error.__context__ = type("Other", (Exception,), {"__str__": lambda self: "other"})()
    failure = failures.of(error, below="")
    # Once for the text, and once of what arrives.
    assert Counts.asked == 2 and failure.summary.endswith("Counts: counted") and "other" not in failure.text


def test_large_ones_are_told_in_short() -> None:
    failure = failures.of(ValueError("bad batch", bytes(2**20)), below="")
    assert failure.size > 2**20 and len(failure.text) < 1000 and "(1048576 bytes)" in failure.text
    brief = failure.brief()
    assert brief.error is None and brief.size == 0 and brief.text == failure.text
    long = failures.of(RuntimeError("x" * 2**20), below="")
    assert len(long.text) < 40_000 and "characters are left out here" in long.text
    whole = Outcome(failure=brief, result=pickle.dumps(failure))
    there = outcomes.exception(whole, "f")
    assert isinstance(there, ValueError) and there.args[1] == bytes(2**20)


def deeper(x: int) -> float:
    return [
        1,
        2 / x,
    ][1]


def deep(x: int) -> float:
    try:
        return deeper(x)
    except ZeroDivisionError as error:
        raise KeyError("k") from error


def test_the_traceback_is_that_of_python() -> None:
    with pytest.raises(KeyError) as caught:
        deep(0)
    error = caught.value
    here = "".join(traceback.format_exception(error))
    assert "2 / x" in here
    there = arrived(error)
    assert "".join(traceback.format_exception(there)) == here
    frame = there.__cause__.__traceback__.tb_next.tb_frame  # type: ignore[union-attr]
    assert frame.f_code.co_firstlineno == deeper.__code__.co_firstlineno
    assert frame.f_globals["__name__"] == __name__ and frame.f_code.co_qualname == "deeper"


@pytest.mark.parametrize("hidden", [False, True])
def test_the_context_is_shown_where_python_shows_it(hidden: bool) -> None:
    with pytest.raises(KeyError) as caught:
        try:
            deeper(0)
        except ZeroDivisionError as error:
            if hidden:
                raise KeyError(error) from None
            raise KeyError(error)  # noqa: B904 - as people write it
    there = arrived(caught.value)
    assert "".join(traceback.format_exception(there)) == "".join(traceback.format_exception(caught.value))
    assert isinstance(there.__context__, ZeroDivisionError) and there.__suppress_context__ == hidden


def test_lines_that_only_the_node_has() -> None:
    failure = failures.of(raised(ValueError("x")), below="")
    there = failure.frames.replace(__file__.encode(), b"/nowhere/node.py")  # type: ignore[union-attr]
    found = outcomes.exception(Outcome(failure=dataclasses.replace(failure, frames=there)), "f")
    assert found is not None
    shown = "".join(traceback.format_exception(found))
    assert 'File "/nowhere/node.py"' in shown and "raise error" in shown


def test_a_debugger_finds_the_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    import io
    import pdb

    with pytest.raises(KeyError) as caught:
        deep(0)
    out = io.StringIO()
    debugger = pdb.Pdb(stdin=io.StringIO("l\nll\nq\n"), stdout=out, nosigint=True)
    debugger.reset()
    there = arrived(caught.value)
    debugger.interaction(None, there.__cause__.__traceback__)  # type: ignore[union-attr]
    assert "in deeper" not in out.getvalue() and "deeper()" in out.getvalue()
    assert "def deeper(x: int) -> float:" in out.getvalue() and "->" in out.getvalue()


def test_a_masked_failure_shows_nothing_in_any_field() -> None:
    error = ExceptionGroup("s3cret-value", [raised(ValueError("s3cret-value")), KeyError(1)])
    error.__cause__ = raised(KeyError("s3cret-value"))
    failure = failures.of(raised(error), below="", shortage={"slot": "s3cret-value", "has": 1})
    masked = Masker(["s3cret-value"]).failure(failure)
    assert b"s3cret-value" in pickle.dumps(failure) and b"s3cret-value" not in pickle.dumps(masked)
    assert masked.shortage == {"slot": "***", "has": 1}
    there = outcomes.exception(Outcome(failure=masked), "f")
    assert isinstance(there, ExceptionGroup) and there.exceptions[0].args == ("************",)
    assert there.__traceback__ is not None and there.exceptions[0].__traceback__ is not None


def test_an_outcome_of_an_earlier_version_is_read() -> None:
    error = pickle.dumps(ValueError("x"))
    earlier = failures.Failure(error=error, traceback=None, text="t", summary="ValueError: x")
    for name in ("frames", "members", "left_out"):
        del vars(earlier)[name]
    there = outcomes.exception(outcomes.read_outcome(pickle.dumps(Outcome(failure=earlier))), "f")
    assert isinstance(there, ValueError)


# Functions by value -------------------------------------------------------------------------------------------------


def test_code_keeps_its_file_with_every_cloudpickle(monkeypatch: pytest.MonkeyPatch) -> None:
    """From 3.1.3 on, cloudpickle writes another name."""
    table = cloudpickle.Pickler.dispatch_table
    reduce = table[types.CodeType]

    def dynamic(code: types.CodeType) -> Any:
        kind, arguments = reduce(code)
        return kind, tuple("<dynamic-code>" if each == code.co_filename else each for each in arguments)

    monkeypatch.setitem(table.maps[0], types.CodeType, dynamic)
    import io

    space: dict[str, Any] = {"__name__": "__main__"}
    exec(compile("def outer():\n    return lambda: 1 / 0", "/a/cell.py", "exec"), space)
    for pickler, name in ((cloudpickle.Pickler, "<dynamic-code>"), (pickles.Pickler, "/a/cell.py")):
        file = io.BytesIO()
        pickler(file).dump(space["outer"])
        outer = pickle.loads(file.getvalue())
        assert {outer.__code__.co_filename, outer().__code__.co_filename} == {name}
