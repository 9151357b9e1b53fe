"""Tasks over a real fleet: what arrives there, and what comes back."""

from __future__ import annotations

import dataclasses
import importlib
import itertools
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import skyinfra as sky
from skyinfra.client import Pool, open_pool
from skyinfra.tasks import Task, included

OFFSET = 5
LOCK = threading.Lock()


class OwnError(Exception):
    """An exception whose constructor differs from its args, as in many libraries."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(f"{code}: {text}")
        self.code = code


@dataclasses.dataclass(frozen=True)
class Point:
    x: int


@sky.compute
def double(x: int) -> int:
    """Doubles."""
    return 2 * x


@sky.compute()
def add_offset(x: int) -> int:
    return double(x) + helper(OFFSET)


def helper(x: int) -> int:
    return x + 1


@sky.compute
def where() -> tuple[str, str]:
    return sky.instance_info().slot, os.environ["CUDA_VISIBLE_DEVICES"]


@sky.compute
def fail(x: int) -> None:
    fail_deeper(x)


def fail_deeper(x: int) -> None:
    try:
        raise KeyError("before")
    except KeyError as error:
        raise OwnError(x, "no such thing") from error


@sky.compute
def recurse(x: int) -> int:
    return recurse(x + 1)


@sky.compute
def raise_unpicklable() -> None:
    error = ValueError("has a lock")
    error.lock = threading.Lock()  # type: ignore[attr-defined]
    error.args = ("has a lock", threading.Lock())
    raise error


@sky.compute
def leave() -> None:
    sys.exit(7)


def closure_of(lock: threading.Lock) -> Callable[[], None]:
    def use_its_lock() -> None:
        with lock:
            pass

    return use_its_lock


@sky.compute
def use_lock() -> None:
    with LOCK:
        pass


@sky.compute
def make_lock() -> object:
    return threading.Lock()


@sky.compute
def point(x: int) -> Point:
    return Point(x)


@sky.compute
def nap(seconds: float) -> float:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        time.sleep(0.02)
    return seconds


# Results ------------------------------------------------------------------------------------------------------------


def test_one_slot(pool):
    assert double(21) >> pool == 42


def test_functions_of_modules_that_the_node_does_not_have_and_decorated_ones_among_them(pool):
    assert __name__ not in ("__main__", "skyinfra")
    assert add_offset(10) >> pool == 26


def test_classes_keep_their_identity_on_the_way(pool):
    assert point(3) >> pool == Point(3)


def test_every_slot_in_slot_order_with_its_own_device(pool):
    assert where() @ pool == [(f"n{n}/{i}", f"MIG-n{n}-{i}") for n in (0, 1) for i in (0, 1)]


def test_broadcast_to_some_slots(pool):
    assert [slot for slot, _ in pool.broadcast(where(), slots=pool.slots()[1:3])] == ["n0/1", "n1/0"]


def test_gather_gives_results_in_the_order_of_the_tasks(pool):
    assert sky.gather(nap(0.3), double(2), point(1)) >> pool == (0.3, 4, Point(1))
    assert sky.gather(*(double(x) for x in range(20))) >> pool == tuple(range(0, 40, 2))


def test_a_streamed_gather_is_ordered_or_as_completed(pool):
    tasks = [nap(1.5), nap(0.0)]
    assert list(sky.gather(*tasks, stream=True) >> pool) == [1.5, 0.0]
    assert list(sky.gather(*tasks, stream=True, ordered=False) >> pool) == [0.0, 1.5]


def test_arguments_and_results_of_many_megabytes(pool):
    data = os.urandom(12_000_000)
    assert pool.submit(bytes.__add__, data, b"end").result() == data + b"end"


def test_submit_takes_tasks_decorated_and_plain_functions(pool):
    assert pool.submit(double(1)).result() == 2
    assert pool.submit(double, x=2).result() == 4
    assert pool.submit(helper, 2).result() == 3
    with pytest.raises(TypeError, match="has its arguments already"):
        pool.submit(double(1), 2)


def test_a_future_tells_how_it_went(pool):
    future = pool.submit(nap, 60)
    with pytest.raises(TimeoutError):
        future.result(timeout=0.01)
    assert not future.done()
    assert repr(future) == "<Future nap: waiting>"
    future.cancel()
    good, bad = pool.submit(double, 1), pool.submit(fail, 1)
    assert good.exception() is None
    assert good.traceback() is None
    assert isinstance(bad.exception(), OwnError)
    assert [f.name for f in traceback.extract_tb(bad.traceback())] == ["fail", "fail_deeper"]
    assert bad.done() and not bad.cancelled()


def test_many_threads_share_a_pool(pool):
    results: list[int] = []
    threads = [threading.Thread(target=lambda x=x: results.append(double(x) >> pool)) for x in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(results) == list(range(0, 24, 2))


# map ----------------------------------------------------------------------------------------------------------------


def test_map_over_an_infinite_iterator_is_lazy(pool):
    taken = itertools.count()
    results = pool.map(double, taken, window=3)
    assert next(taken) == 0  # nothing has started
    assert [next(results) for _ in range(10)] == list(range(2, 22, 2))
    results.close()
    assert next(taken) <= 1 + 10 + 6  # 3 in flight and 3 kept at most


class Unsized:
    """Has a length, as a bar of tqdm over a generator has, which cannot be asked for."""

    def __iter__(self) -> Iterator[int]:
        return iter((1, 2))

    def __len__(self) -> int:
        raise TypeError("object of type 'generator' has no len()")


def test_map_takes_what_does_not_know_its_length(pool):
    assert list(pool.map(double, Unsized())) == [2, 4]


def test_map_stays_within_its_window(pool, tmp_path):
    def note(x: int, folder: str) -> int:
        path = os.path.join(folder, str(x))  # noqa: PTH118
        open(path, "w").close()  # noqa: PTH123
        seen = len(os.listdir(folder))  # noqa: PTH208
        time.sleep(0.05)
        os.unlink(path)  # noqa: PTH108
        return seen

    inside = list(pool.map(note, range(12), itertools.repeat(str(tmp_path)), window=2))
    assert 1 <= max(inside) <= 2


def test_unordered_map_gives_what_is_ready(pool):
    assert list(pool.map(nap, [1.5, 0.0, 0.1], ordered=False))[-1] == 1.5


def test_map_ends_with_the_first_exception(pool):
    results = pool.map(lambda x: 1 // x, [1, 0, 1])
    assert next(results) == 1
    with pytest.raises(ZeroDivisionError):
        next(results)
    with pytest.raises(StopIteration):
        next(results)


def test_map_refuses_a_window_below_one_and_no_iterables(pool):
    with pytest.raises(ValueError, match="at least 1, not 0"):
        pool.map(double, [1], window=0)
    with pytest.raises(TypeError, match="at least one iterable"):
        pool.map(double)


# Exceptions ---------------------------------------------------------------------------------------------------------


def test_an_exception_arrives_with_its_class_its_frames_and_its_cause(pool):
    with pytest.raises(OwnError, match="3: no such thing") as caught:
        fail(3) >> pool
    assert caught.value.code == 3
    remote = [frame.name for frame in traceback.extract_tb(caught.value.__traceback__)]
    assert remote[-2:] == ["fail", "fail_deeper"]
    assert "run" not in remote  # the node's wrapper is not in the way
    assert 'raise OwnError(x, "no such thing") from error' in "".join(traceback.format_exception(caught.value))
    assert isinstance(caught.value.__cause__, KeyError)


def test_a_runaway_recursion_arrives_as_one(pool):
    with pytest.raises(RecursionError) as caught:
        recurse(0) >> pool
    assert 10 < len(traceback.extract_tb(caught.value.__traceback__)) < 120


def test_an_exception_that_cannot_be_shipped_arrives_as_text(pool):
    with pytest.raises(sky.TaskFailed, match="has a lock") as caught:
        raise_unpicklable() >> pool
    assert "raise error" in str(caught.value) or "in raise_unpicklable" in str(caught.value)


def test_sys_exit_arrives_and_does_not_end_the_slot(pool):
    pids = pool.broadcast(Task(os.getpid))
    with pytest.raises(sky.TaskFailed, match=r"leave called sys\.exit\(7\)") as caught:
        leave() >> pool
    assert isinstance(caught.value.__cause__, SystemExit)
    assert caught.value.__cause__.code == 7
    assert pool.broadcast(Task(os.getpid)) == pids


def test_a_module_that_the_node_lacks_is_named_with_what_to_do(pool, tmp_path, monkeypatch):
    package = tmp_path / "site-packages"
    package.mkdir()
    (package / "only_here.py").write_text("def function():\n    return 1\n")
    monkeypatch.syspath_prepend(str(package))
    import only_here  # type: ignore[import-not-found]

    with pytest.raises(ModuleNotFoundError, match="only_here") as caught:
        pool.submit(only_here.function).result()
    assert "only_here.py here: sky.connect(..., includes=[" in caught.value.__notes__[0]


def test_a_file_that_is_only_here_is_named_with_what_to_do(pool, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("vocabulary.txt").touch()
    with pytest.raises(FileNotFoundError) as caught:
        pool.submit(Task(open, ("vocabulary.txt",))).result()
    (note,) = caught.value.__notes__
    assert note.startswith("vocabulary.txt is on this machine") and "pool.sync('vocabulary.txt')" in note
    with pytest.raises(FileNotFoundError) as caught:
        pool.submit(Task(open, ("nowhere.txt",))).result()
    assert not hasattr(caught.value, "__notes__")


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A package of the user's own whose function reads the file beside it that it is asked for."""
    folder = tmp_path / "has_data"
    (folder / "more").mkdir(parents=True)
    (folder / "__init__.py").write_text(
        "from pathlib import Path\nHERE = Path(__file__).parent\nCONFIG = (HERE / 'more/config.json').read_text()\n"
        "def read(name):\n    return (HERE / name).read_text()\n"
    )
    (folder / "more" / "config.json").write_text("{}")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield importlib.import_module("has_data")
    del sys.modules["has_data"]


def test_the_data_files_of_an_own_package_go_with_it(fleet, package):
    with open_pool(fleet.manifest) as pool:
        assert pool.submit(Task(package.read, ("more/config.json",))).result() == "{}"
        (package.HERE / "more/config.json").write_text("[]")
        time.sleep(included._LOOK_S)
        assert pool.submit(Task(package.read, ("more/config.json",))).result() == "[]"


def test_data_files_that_are_too_large_are_named_with_what_to_do(fleet, package):
    large = package.HERE / "more/large.bin"
    with large.open("wb") as file:
        file.truncate(6 * 2**20)
    (package.HERE / "__init__.py").write_text("def read(name):\n    return open(f'{__path__[0]}/{name}').read(2)\n")
    importlib.reload(package)
    with open_pool(fleet.manifest) as pool:
        with pytest.raises(FileNotFoundError) as caught:
            pool.submit(Task(package.read, ("more/large.bin",))).result()
        (note,) = caught.value.__notes__
        assert note == f"{large} is on this machine: pool.sync({str(package.HERE)!r}) takes that folder along."
        pool.sync(package.HERE)
        assert pool.submit(Task(package.read, ("more/large.bin",))).result() == "\0\0"


def test_a_function_that_was_not_called_is_no_task(pool):
    with pytest.raises(TypeError, match=r"<compute double> is a function: call it .* double\(\.\.\.\) >> pool"):
        double >> pool
    with pytest.raises(TypeError, match=r"double\(\.\.\.\) @ pool"):
        double @ pool


def test_what_cannot_be_pickled_is_named_before_anything_is_sent(pool):
    lock = threading.Lock()
    with pytest.raises(sky.TaskNotPicklable, match=r"argument 'x' of double cannot be pickled: its \['a'\]\[1\]: Type"):
        double({"a": [1, lock]}) >> pool
    with pytest.raises(sky.TaskNotPicklable, match=r"argument 'x' of double .*lock"):
        double(lock) >> pool
    with pytest.raises(sky.TaskNotPicklable, match=r"'lock', which .*use_its_lock uses, .*lock"):
        pool.submit(closure_of(lock))
    with pytest.raises(sky.TaskNotPicklable, match=r"argument 'pool'.*a pool is a connection"):
        pool.submit(lambda pool: None, pool)


def test_a_function_uses_what_its_module_has_there(pool):
    assert use_lock() >> pool is None


def test_a_result_that_cannot_be_pickled_is_refused_by_name(pool):
    with pytest.raises(
        sky.TaskNotPicklable, match=r"the result of .* cannot be pickled: its \[0\]\['lock'\]: TypeError"
    ):
        pool.submit(lambda: [{"lock": threading.Lock()}]).result()
    with pytest.raises(sky.TaskNotPicklable, match="the result of make_lock cannot be pickled"):
        make_lock() >> pool


# The pool -----------------------------------------------------------------------------------------------------------


def test_a_pool_describes_its_fleet(pool):
    slots = pool.slots()
    assert [slot.slot for slot in slots] == ["n0/0", "n0/1", "n1/0", "n1/1"]
    assert slots[3].visible == ("CUDA_VISIBLE_DEVICES", "MIG-n1-1")
    assert [node.name for node in pool.nodes()] == ["n0", "n1"]
    assert repr(pool) == "<Pool stack/pool: 2 nodes, 4 slots, simulated>"


def test_a_closed_pool_says_so(fleet):
    with open_pool(fleet.manifest) as pool:
        pass
    pool.close()
    with pytest.raises(sky.FleetError, match="is closed"):
        double(1) >> pool
    with pytest.raises(sky.FleetError, match="is closed"):
        pool.slots()
    assert repr(pool).endswith("closed>")


def test_a_with_block_that_raises_ends_at_once_and_leaves_no_thread(fleet, capfd):
    started = time.monotonic()
    with pytest.raises(ZeroDivisionError), open_pool(fleet.manifest) as pool:
        pool.submit(double, 1)
        raise ZeroDivisionError
    assert time.monotonic() - started < 5
    # That which writes to the terminal is of the process.
    left = {thread.name for thread in threading.enumerate() if thread.name.startswith("skyinfra")} - {"skyinfra-writer"}
    assert left == set()
    assert capfd.readouterr().err == ""


def test_the_public_names_are_the_clients():
    assert sky.Pool is Pool
    assert {"compute", "gather", "Task", "Gather", "Future", "Pool"} <= set(sky.__all__)
