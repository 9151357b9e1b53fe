"""A slot that fails for a reason of its node is told apart from a task that fails: no task pays for it, and the slot
takes no others before the node is well.

The situations are public ones: a spool folder that cannot be made uses up all requeues within two seconds
(ROCm/spur#520), a read-only disk draws thousands of pods to its node (kubernetes/node-problem-detector#274,
kubernetes/kubernetes#99126), one renderer with a full disk fails a whole job (aws-deadline/deadline-cloud#635), a
machine's only node is closed for faults of the data, without a word (warpem/warp#499), and a task that fills disks goes
on to the next one (pachyderm/pachyderm#1680).
"""

from __future__ import annotations

import asyncio
import atexit
import errno
import itertools
import os
import resource
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from devices.small_disks import Disk, disk
from local_fleets.client_fixtures import Fleet, eventually

import skyinfra as sky
from skyinfra.blobs import transfer
from skyinfra.blobs.payload import INLINE
from skyinfra.client import Pool, open_pool
from skyinfra.engine import main_thread
from skyinfra.engine.executor import Moves
from skyinfra.node import faults, probe
from skyinfra.tasks import Task
from skyinfra.worker import process as worker_process

NODES = ("n0", "n1", "n2")
TASKS = 60


def where(number: int, seconds: float = 0.0, data: bytes = b"") -> tuple[int, str]:
    time.sleep(seconds)
    return number, sky.instance_info().node


@pytest.fixture(scope="module")
def sick(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Fleet, Disk]]:
    """Three nodes of two slots each, of which n1 has a disk of its own."""
    root = tmp_path_factory.mktemp("sick")
    with disk(root / "n1") as of_n1:
        fleet = Fleet(root, nodes=NODES)
        try:
            yield fleet, of_n1
        finally:
            fleet.close()


@pytest.fixture
def bed(sick: tuple[Fleet, Disk]) -> Iterator[tuple[Pool, Disk]]:
    fleet, of_n1 = sick
    with open_pool(fleet.manifest) as pool:
        eventually(lambda: len(pool.slots()) == 6)
        try:
            yield pool, of_n1
        finally:
            of_n1.mend()
        eventually(lambda: len(pool.slots()) == 6)


def sick_slots(pool: Pool) -> dict[str, str]:
    """The sick slots, as the head tells them."""
    state = pool.look().state
    return dict(state.sick) if state is not None else {}


def on_n1(pool: Pool) -> Any:
    return [slot for slot in pool.slots() if slot.node == "n1"]


FAULTS = {
    Disk.fill: "No space left on device",
    Disk.use_inodes: "No space left on device",
    Disk.read_only: "Read-only file system",
}


@pytest.mark.parametrize("seconds", [0.0, pytest.param(0.01, marks=pytest.mark.slow)])
@pytest.mark.parametrize("fault", FAULTS)
def test_a_node_with_a_bad_disk_fails_no_task_and_takes_none(bed: Any, fault: Any, seconds: float) -> None:
    pool, of_n1 = bed
    fault(of_n1)
    results = list(pool.map(where, range(TASKS), itertools.repeat(seconds)))
    assert [number for number, _ in results] == list(range(TASKS))
    assert {node for _, node in results} <= {"n0", "n2"}

    def both_are_sick() -> bool:
        # Those that got no task of the map get one.
        nodes = {future.result()[1] for future in [pool.submit(where, 0, 0.2) for _ in range(6)]}
        return nodes <= {"n0", "n2"} and set(sick_slots(pool)) == {"n1/0", "n1/1"}

    eventually(both_are_sick)
    assert all(FAULTS[fault] in why for why in sick_slots(pool).values())
    of_n1.mend()
    eventually(lambda: len(pool.slots()) == 6)
    assert sick_slots(pool) == {}
    assert {node for _, node in pool.broadcast(Task(where, (0,)))} == set(NODES)


@pytest.mark.slow
def test_large_calls_that_find_no_place_on_a_node_go_elsewhere(bed: Any, sick: tuple[Fleet, Disk]) -> None:
    pool, _ = bed
    blobs = sick[0].root / "n1" / "blobs"
    with disk(blobs, size="8k") as small:
        small.fill()
        parts = [os.urandom(2 * INLINE) for _ in range(12)]
        futures = [pool.submit(where, number, 0.05, part) for number, part in enumerate(parts)]
        results = [future.result(timeout=60) for future in futures]
        assert {node for _, node in results} <= {"n0", "n2"}


def fill(path: str) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)


@pytest.mark.slow
def test_what_the_function_raises_is_of_the_task_and_closes_no_healthy_slot(bed: Any, tmp_path: Path) -> None:
    pool, _ = bed
    for slot in [slot.slot for slot in pool.slots()] * 3:
        error = pool.submit(Task(fill, ("x",)).options(slot=slot)).exception(timeout=60)
        assert type(error) is OSError and error.errno == errno.ENOSPC
    assert len(pool.slots()) == 6 and sick_slots(pool) == {}


def start_and_fill(path: str, starts: str) -> None:
    with Path(starts).open("a") as file:
        file.write("x")
    with Path(os.environ["SKYINFRA_NODE_DIR"], path).open("ab", buffering=0) as filler:
        while True:
            filler.write(bytes(4096))


def test_a_task_that_fills_the_disk_of_a_node_goes_on_to_no_other(bed: Any, tmp_path: Path) -> None:
    pool, _ = bed
    starts = tmp_path / "starts"
    task = Task(start_and_fill, ("filler", str(starts))).options(slot="n1/0")
    error = pool.submit(task).exception(timeout=60)
    assert isinstance(error, OSError) and error.errno == errno.ENOSPC
    assert starts.read_text() == "x"
    # The slot noticed before its next task.
    eventually(lambda: "No space left" in sick_slots(pool).get("n1/0", ""))
    assert len(list(pool.map(where, range(TASKS), itertools.repeat(0.01)))) == TASKS
    assert "n1/0" in sick_slots(pool), "it takes none of them"


def spoil(fault: str, folder: str) -> str:
    Path(folder, fault).mkdir(exist_ok=True)
    number = 0
    try:
        while True:
            Path(folder, fault, str(number)).touch()
            number += 1
    except OSError:
        return "done"


def test_a_task_that_has_ended_keeps_its_result_where_its_node_fails_after_it(bed: Any, sick: Any) -> None:
    pool, of_n1 = bed
    slot = on_n1(pool)[:1]
    # It leaves no inode: the count of its starts, its output and its folder are removed all the same.
    assert pool.broadcast(Task(spoil, ("fillers", str(of_n1.path))), slots=slot) == ["done"]


def leak() -> int:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    kept = globals().setdefault("kept", [])
    try:
        for _ in range(soft):
            kept.append(os.open(os.devnull, os.O_RDONLY))
    except OSError:
        pass
    return os.getpid()


def process() -> int:
    return os.getpid()


@pytest.mark.slow
def test_a_process_without_descriptors_is_replaced_and_no_task_fails(bed: Any) -> None:
    pool, _ = bed
    slot = on_n1(pool)[:1]
    pids = pool.broadcast(Task(process), slots=slot)
    [spoiled] = pool.broadcast(Task(leak), slots=slot)
    assert pids == [spoiled]
    assert pool.broadcast(Task(process), slots=slot) != pids


def test_a_process_without_memory_is_replaced_and_no_task_fails(bed: Any) -> None:
    pool, _ = bed
    slot = on_n1(pool)[:1]
    [pid] = pool.broadcast(Task(process), slots=slot)
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[0])
    # From here: what a task sets in its own process is put back. Less than the stack of a thread is left.
    limit = pages * resource.getpagesize() + 4 * 2**20
    resource.prlimit(pid, resource.RLIMIT_AS, (limit, limit))
    # A timeout is watched by a thread.
    assert pool.broadcast(Task(process).options(timeout=60), slots=slot) != [pid]


def hang_at_exit() -> int:
    worker_process._ENDED_S = 0.5
    atexit.register(time.sleep, 3600)
    main_thread.replace_after_task()
    return os.getpid()


def test_a_process_that_hangs_at_its_exit_keeps_no_slot_away(bed: Any) -> None:
    pool, _ = bed
    slot = on_n1(pool)[:1]
    before = pool.broadcast(Task(hang_at_exit), slots=slot)
    assert pool.broadcast(Task(process), slots=slot) != before


def size(data: bytes) -> tuple[int, int]:
    return len(data), os.getpid()


@pytest.mark.parametrize("free", [pytest.param(2, marks=pytest.mark.slow), 16])
def test_a_large_argument_goes_elsewhere_from_a_process_that_cannot_fetch_or_map_it(bed: Any, free: int) -> None:
    pool, _ = bed
    slot = on_n1(pool)[:1]
    [pid] = pool.broadcast(Task(process), slots=slot)
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + free * 2**20
    resource.prlimit(pid, resource.RLIMIT_AS, (limit, limit))
    # The disk of the node has room for it; its memory has none, from 4 MiB on for its parts either.
    [(length, other)] = pool.broadcast(Task(size, (bytes(24 * 2**20),)), slots=slot)
    assert length == 24 * 2**20 and other != pid


@pytest.mark.slow
def test_a_task_for_one_slot_that_has_no_room_for_it_is_not_sent_there_for_ever(bed: Any) -> None:
    pool, _ = bed
    slot = on_n1(pool)[:1]
    before = pool.broadcast(Task(process), slots=slot)
    # Minutes, for 64 times (2026-11-25).
    with pytest.raises(sky.SlotFailed, match=r"no room for 48\.0 MiB more") as caught:
        pool.broadcast(Task(size, (bytes(48 * 2**20),)), slots=slot)
    assert "It was sent to 4 slots, and each failed: n1/0, n1/0, n1/0, n1/0." in "".join(caught.value.__notes__)
    assert pool.broadcast(Task(process), slots=slot) == before, "another process has no more room"


def made(began: str) -> tuple[bytes, int]:
    if not Path(began).exists():
        Path(began).touch()

        async def send(*_: object) -> None:
            raise MemoryError

        # As one that has none for the chunks: how much that takes depends on what was freed before.
        transfer.send = transfer.send_unnamed = send
    return bytes(16 * 2**20), os.getpid()


def test_a_large_result_that_a_process_cannot_send_is_of_its_slot(bed: Any, tmp_path: Path) -> None:
    pool, _ = bed
    slot = on_n1(pool)[:1]
    [pid] = pool.broadcast(Task(process), slots=slot)
    [(data, other)] = pool.broadcast(Task(made, (str(tmp_path / "began"),)), slots=slot)
    assert data == bytes(16 * 2**20) and other != pid


def room() -> int:
    return sys.maxsize if sky.instance_info().node == "n1" else 1


class Room:
    def __reduce__(self) -> Any:
        return room, ()


class Hungry:
    """Takes all memory on n1 where it is unpickled, as arrays do, in no code of its own."""

    def __reduce__(self) -> Any:
        return bytearray, (Room(),)


class Raises:
    """Raises *error* where it is unpickled, in code of its own."""

    def __init__(self, error: Exception, starts: str) -> None:
        self.state = error, starts

    def __getstate__(self) -> Any:
        return self.state

    def __setstate__(self, state: Any) -> None:
        error, starts = state
        with Path(starts).open("a") as file:
            file.write("x")
        raise error


@pytest.mark.slow
def test_a_call_that_a_node_cannot_load_goes_elsewhere_and_so_does_a_rank(bed: Any) -> None:
    pool, _ = bed
    futures = [pool.submit(where, number, 0.2, Hungry()) for number in range(8)]
    assert {future.result(timeout=60)[1] for future in futures} <= {"n0", "n2"}
    eventually(lambda: len(pool.slots()) == 6)
    ranks = pool.launch(where, 0, 0.0, Hungry(), nodes=2, per_node=2, framework="none", timeout=60)
    assert [node for _, node in ranks] == ["n0", "n0", "n2", "n2"]


@pytest.mark.parametrize("error", [MemoryError("mine"), OSError(errno.ENOMEM, "mine"), PermissionError(13, "mine")])
def test_what_unpickling_raises_in_code_of_the_user_is_of_the_task(bed: Any, tmp_path: Path, error: Exception) -> None:
    pool, _ = bed
    starts = tmp_path / "starts"
    raised = pool.submit(where, 0, 0.0, Raises(error, str(starts))).exception(timeout=60)
    assert type(raised) is type(error) and "mine" in str(raised)
    assert starts.read_text() == "x"


def test_moves_end_where_the_task_may_be_the_reason() -> None:
    alone = Moves()
    assert [alone.may_go_on("n0/0", 1) for _ in range(4)] == [True, True, True, False]
    one_of_three = Moves()
    assert all(one_of_three.may_go_on(f"n1/{index}", 3) for index in range(56))
    each = Moves()
    assert [each.may_go_on(f"n{index}/0", 100) for index in range(5)] == [True, True, True, True, False]
    assert "5 slots" in each.text and "n4/0" in each.text


def test_a_fleet_whose_only_node_is_sick_says_why(tmp_path: Path) -> None:
    with disk(tmp_path / "n0") as of_n0:
        fleet = Fleet(tmp_path, nodes=("n0",), slots=4)
        try:
            with open_pool(fleet.manifest) as pool:
                assert len(pool.broadcast(Task(process))) == 4
                of_n0.fill()
                with pytest.raises(sky.SlotFailed, match=r"cannot run process: .*No space left on device") as caught:
                    pool.submit(process).result(timeout=60)
                assert "each failed: n0/" in "".join(caught.value.__notes__)
                of_n0.mend()
                assert pool.submit(process).result(timeout=60) > 0
        finally:
            fleet.close()


@pytest.mark.parametrize("of_all", [errno.ENFILE, errno.ENOSPC, errno.EIO])
def test_what_every_process_of_a_machine_meets_is_of_the_machine(of_all: int) -> None:
    """Another process has other descriptors, and a machine without any (`ENFILE`) has none for that one either."""
    assert probe.of_machine(OSError(of_all, os.strerror(of_all))) and probe.lacks(OSError(of_all, ""))
    later = RuntimeError("cannot open")
    later.__cause__ = OSError(of_all, "")
    assert probe.of_machine(later)


@pytest.mark.parametrize("of_one", [errno.EMFILE, errno.ENOMEM])
def test_what_one_process_meets_is_not_of_the_machine(of_one: int) -> None:
    assert not probe.of_machine(OSError(of_one, "")) and probe.lacks(OSError(of_one, ""))


class _Failing:
    """A slot's worker as far as `SlotWorker.fail` needs it. pauses: how long it stayed out before each check."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, checks: int) -> None:
        self.pauses: list[float] = []
        self.said: list[tuple[str | None, int]] = []
        left = itertools.chain(["a full disk"] * checks, itertools.repeat(None))
        monkeypatch.setattr(faults, "words_of_check", lambda: next(left))
        monkeypatch.setattr(main_thread, "EXECUTOR", ThreadPoolExecutor(1))
        worker = object.__new__(worker_process.SlotWorker)
        worker._fails = worker._said = worker._checking = None

        async def stay_out(seconds: float) -> None:
            self.pauses.append(seconds)

        for name, stub in {
            "_set_service": lambda: None,
            "_stay_out": stay_out,
            "log_event": lambda _, why: self.said.append((why, len(self.pauses))),
        }.items():
            monkeypatch.setattr(worker, name, stub, raising=False)
        self.worker = worker

    def fail(self, in_a_row: int) -> None:
        async def failed() -> None:
            self.worker.fail("a full disk", True, in_a_row)
            checking = self.worker._checking
            assert checking is not None
            await checking

        asyncio.run(failed())


def test_a_slot_that_fails_a_second_task_is_closed_for_longer_and_says_so_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    slot = _Failing(monkeypatch, checks=3)
    slot.fail(2)
    assert slot.pauses == [5.0, 15.0, 15.0, 15.0]
    # Before the first pause, and when it is well.
    assert slot.said == [("a full disk", 0), (None, 4)]


def test_a_slot_that_fails_one_task_is_checked_at_once_and_says_what_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    slot = _Failing(monkeypatch, checks=5)
    slot.fail(1)
    assert slot.pauses == [0.0, 0.5, 1.0, 2.0, 5.0, 5.0]
    assert slot.said == [("a full disk", 1), (None, 6)]
    passing = _Failing(monkeypatch, checks=0)
    passing.fail(1)
    assert passing.pauses == [0.0] and not passing.said
