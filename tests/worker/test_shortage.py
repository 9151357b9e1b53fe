"""Exceptions that say that the memory of a device ran out, by their names and texts."""

from __future__ import annotations

import json
import pickle
import sys
import types
from pathlib import Path

import pytest

from skyinfra.protocol import failures
from skyinfra.protocol.instance import NODE_DIRECTORY, VARIABLE, InstanceInfo
from skyinfra.protocol.shortage import Shortage
from skyinfra.worker import shortage

# Of PyTorch 2.5, PyTorch 2.0, jaxlib, CuPy and TensorFlow, as people have reported them.
TORCH = (
    "CUDA out of memory. Tried to allocate 1.96 GiB. GPU 0 has a total capacity of 3.71 GiB of which 1.04 GiB is free. "
    "Including non-PyTorch memory, this process has 2.65 GiB memory in use. Of the allocated memory 2.46 GiB is "
    "allocated by PyTorch, and 77.64 MiB is reserved by PyTorch but unallocated."
)
OLD_TORCH = (
    "CUDA out of memory. Tried to allocate 2.00 GiB (GPU 0; 15.90 GiB total capacity; 14.75 GiB already allocated; "
    "231.75 MiB free; 14.99 GiB reserved in total by PyTorch)"
)
JAX = "RESOURCE_EXHAUSTED: Out of memory while trying to allocate 30.85GiB"
JAX_BYTES = "RESOURCE_EXHAUSTED: Out of memory while trying to allocate 49807360 bytes"
CUPY = "Out of memory allocating 1,610,612,736 bytes (allocated so far: 32,233,253,888 bytes)"
GIB = 2**30


def error(module: str, name: str, text: str, *above: type[BaseException]) -> BaseException:
    """An exception of a library that is not installed here."""
    return type(name, above or (RuntimeError,), {"__module__": module})(text)


@pytest.fixture(autouse=True)
def slot(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> InstanceInfo:
    found = InstanceInfo(
        "n0", 1, "n0/1", "partition", "stack/pool", profile="1g.10gb", accelerator="H100", gpu=0, memory_gb=10.0
    )
    monkeypatch.setenv(VARIABLE, json.dumps(found.to_json()))
    monkeypatch.setenv(NODE_DIRECTORY, str(tmp_path))
    return found


@pytest.mark.parametrize(
    ("raised", "taken", "asked", "measured"),
    [
        (error("torch", "OutOfMemoryError", TORCH), 2.65 * GIB, 1.96 * GIB, "PyTorch"),
        (error("torch.cuda", "OutOfMemoryError", OLD_TORCH), 14.75 * GIB, 2 * GIB, "PyTorch"),
        (error("builtins", "RuntimeError", TORCH), 2.65 * GIB, 1.96 * GIB, "PyTorch"),
        (error("jaxlib.xla_extension", "XlaRuntimeError", JAX), None, 30.85 * GIB, ""),
        (error("jax.errors", "JaxRuntimeError", JAX_BYTES), None, 49_807_360, ""),
        (error("cupy.cuda.memory", "OutOfMemoryError", CUPY, MemoryError), 32_233_253_888, 1_610_612_736, "CuPy"),
        (error("cupy.cuda.memory", "OutOfMemoryError", "", MemoryError), None, None, ""),
        (error("tensorflow.python.framework.errors_impl", "ResourceExhaustedError", "OOM"), None, None, ""),
        (RuntimeError("CUDA error: out of memory"), None, None, ""),
        (RuntimeError("HIP out of memory. Tried to allocate 512.00 MiB."), None, 512 * 2**20, ""),
        (RuntimeError("Call to cuMemAlloc results in CUDA_ERROR_OUT_OF_MEMORY"), None, None, ""),
    ],
    ids=lambda value: type(value).__module__ if isinstance(value, BaseException) else None,
)
def test_recognized(raised: BaseException, taken: float | None, asked: float | None, measured: str) -> None:
    found = shortage.of(raised)
    assert found is not None
    read = Shortage.read(found)
    assert (read.slot, read.profile, read.accelerator, read.has) == ("n0/1", "1g.10gb", "H100", 10_000_000_000)
    assert read.taken == (None if taken is None else round(taken))
    assert read.asked == (None if asked is None else round(asked))
    assert read.measured == measured
    assert raised.__notes__ == [str(read)]


@pytest.mark.parametrize(
    "raised",
    [
        MemoryError("out of memory"),
        ValueError("batch too large"),
        error("mine", "OutOfMemoryError", "of a shop"),
        RuntimeError("RESOURCE_EXHAUSTED: quota of the API"),
        KeyboardInterrupt(),
    ],
    ids=repr,
)
def test_others_are_left_alone(raised: BaseException) -> None:
    assert shortage.of(raised) is None
    assert not hasattr(raised, "__notes__")


def test_what_it_says() -> None:
    raised = error("torch", "OutOfMemoryError", TORCH)
    shortage.of(raised)
    assert raised.__notes__ == [
        "Slot n0/1 (1g.10gb of H100) has 10 GB; the task had taken 2.85 GB (PyTorch) and asked for 2.1 GB more: "
        "4.95 GB in all."
    ]
    assert (
        str(Shortage("n0/0", has=None, asked=5_000_000))
        == "Slot n0/0 has no room for it; the task asked for 5 MB more."
    )


def test_an_exception_that_it_caused() -> None:
    try:
        try:
            raise error("torch", "OutOfMemoryError", TORCH)
        except RuntimeError as cause:
            raise ValueError("training failed") from cause
    except ValueError as outer:
        assert shortage.of(outer) is not None and outer.__notes__
    handled = ValueError("something else")
    handled.__context__, handled.__suppress_context__ = RuntimeError(TORCH), True
    assert shortage.of(handled) is None


def test_without_a_slot_that_is_known_the_library_says_what_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    bare = InstanceInfo("n0", 0, "n0/0", "gpu", "stack/pool")
    monkeypatch.setenv(VARIABLE, json.dumps(bare.to_json()))
    found = shortage.of(RuntimeError(TORCH))
    assert found is not None and Shortage.read(found).has == round(3.71 * GIB)
    monkeypatch.delenv(VARIABLE)
    assert shortage.of(RuntimeError(TORCH)) is None


def test_an_exception_that_cannot_be_looked_at() -> None:
    class Broken(Exception):
        def __str__(self) -> str:
            raise ZeroDivisionError

    assert shortage.of(Broken()) is None


def test_the_readings_of_the_node_where_the_library_does_not_say(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    worker = types.SimpleNamespace(get_current_task=lambda: "train-1")
    monkeypatch.setitem(sys.modules, "distributed", types.SimpleNamespace(get_worker=lambda: worker))
    figures = {"samples": 3, "memory_peak": 9_000_000_000}
    # Those of a task that has just begun say nothing of it.
    none = {**figures, "memory_peak": 0}
    for task, read, taken in (("train-1", figures, 9_000_000_000), ("train-1", none, None), ("another", figures, None)):
        (tmp_path / "figures.json").write_text(json.dumps({"1": {"task": task, "figures": read}}))
        found = shortage.of(RuntimeError("CUDA error: out of memory"))
        assert found is not None and Shortage.read(found).taken == taken
    (tmp_path / "figures.json").write_text("{")
    assert shortage.of(RuntimeError(JAX)) is not None


def test_it_travels_with_a_failure() -> None:
    raised = error("torch", "OutOfMemoryError", TORCH)
    failure = failures.of(raised, below=__file__, shortage=shortage.of(raised))
    arrived = pickle.loads(pickle.dumps(failure))
    assert Shortage.read(arrived.shortage).profile == "1g.10gb"
    assert "Slot n0/1 (1g.10gb of H100) has 10 GB" in arrived.text
    assert "out of memory" in arrived.summary and "Slot" not in arrived.summary


def test_lines_of_a_program() -> None:
    lines = [["stdout", "epoch 1"], ["stderr", f"torch.OutOfMemoryError: {TORCH}"], ["stderr", "bye"]]
    line = shortage.in_lines(lines)
    assert line is not None and line.startswith("torch.OutOfMemoryError")
    assert Shortage.read(json.loads(shortage.of_line(line) or "")).asked == round(1.96 * GIB)
    assert shortage.in_lines(lines[:1]) is None


@pytest.mark.parametrize(("said", "taken"), [("", None), ("true", None), ("false", 7_000_000_000)])
def test_what_jax_takes_at_once_is_no_need_of_the_task(
    monkeypatch: pytest.MonkeyPatch, said: str, taken: int | None
) -> None:
    """Of an H100 it took 65 GB for any task; 280 GB were told to be needed where 215 GB were asked for."""
    monkeypatch.setattr(shortage, "_read", lambda _: 7_000_000_000)
    if said:
        monkeypatch.setenv("XLA_PYTHON_CLIENT_PREALLOCATE", said)
    found = shortage.of(error("jax.errors", "JaxRuntimeError", JAX))
    assert found is not None and Shortage.read(found).taken == taken
