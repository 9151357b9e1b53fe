"""One node of three fails tasks for a reason of its own: no task fails for it, and it takes none until it is well."""

from __future__ import annotations

import contextlib
import itertools
import os
import resource
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from devices.small_disks import Disk, disk
from fake_nvml.fake_machine import FakeMachine
from namespaces.fleet import RESULT_S, Fleet, links
from tasks_on_nodes.faults import count, count_on_device, started_again, starts, where
from terraform_projects.commands import until

import skyinfra
from skyinfra.blobs.payload import INLINE
from skyinfra.client import Pool, open_pool
from skyinfra.errors import SlotFailed

# The fixture that all share is made once: the tests run in one process.
pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("faults-sick")]

TASKS = 600
LARGE = 24
SICK = "n1"
LOST = "nvmlDeviceGetMemoryInfo:15"


class Sick:
    """A fleet whose second node is to be sick."""

    def __init__(self, fleet: Fleet) -> None:
        self.fleet = fleet
        self.slots = {slot for slot in fleet.settled() if slot.startswith(f"{SICK}/")}


class Bed(Sick):
    """A fleet, the disk of its second node, and the installation of skyinfra there."""

    def __init__(self, fleet: Fleet, small: Disk, installed: Path) -> None:
        super().__init__(fleet)
        self.disk = small
        self.installed = installed

    def processes(self, pool: Pool) -> list[int]:
        """The worker processes of the sick node."""
        return [pid for slot, pid in pool.broadcast(where()) if slot in self.slots]


class Driven(Sick):
    """A fleet whose second node has a driver, which answers with the errors that the file *says* names."""

    def __init__(self, fleet: Fleet, says: Path) -> None:
        super().__init__(fleet)
        self.says = says


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bed]:
    folder = tmp_path_factory.mktemp("sick")
    installed = folder / "installed"
    shutil.copytree(Path(skyinfra.__file__).parent, installed / "skyinfra")
    with ExitStack() as stack:
        bridge = stack.enter_context(links())
        small = stack.enter_context(disk(folder / SICK, size="256m"))
        fleet = Fleet(folder, bridge, nodes=3, installed=installed)
        stack.callback(fleet.close)
        yield Bed(fleet, small, installed)


@pytest.fixture(scope="module")
def driven(tmp_path_factory: pytest.TempPathFactory, fake_driver: Path) -> Iterator[Driven]:
    folder = tmp_path_factory.mktemp("driven")
    says = folder / "says"
    says.touch()
    with ExitStack() as stack:
        bridge = stack.enter_context(links())
        machine = FakeMachine(fake_driver, folder, "h100_80gb", {"FAIL": f"@{says}"})
        fleet = Fleet(folder, bridge, nodes=3, driver=machine)
        stack.callback(fleet.close)
        yield Driven(fleet, says)


@contextlib.contextmanager
def full(bed: Bed, _: Pool) -> Iterator[None]:
    bed.disk.fill()
    try:
        yield
    finally:
        bed.disk.mend()


@contextlib.contextmanager
def no_inodes(bed: Bed, _: Pool) -> Iterator[None]:
    bed.disk.use_inodes()
    try:
        yield
    finally:
        bed.disk.mend()


@contextlib.contextmanager
def read_only(bed: Bed, _: Pool) -> Iterator[None]:
    # `ip netns exec` gives a node a mount namespace of its own.
    bed.disk.inside = bed.fleet.nodes[1].pid
    bed.disk.read_only()
    try:
        yield
    finally:
        bed.disk.mend()


@contextlib.contextmanager
def full_blobs(bed: Bed, _: Pool) -> Iterator[None]:
    blobs = bed.disk.path / "blobs"
    blobs.mkdir(exist_ok=True)
    enter = ["nsenter", "-m", "-t", str(bed.fleet.nodes[1].pid), "--"]
    subprocess.run([*enter, "mount", "-t", "tmpfs", "-o", "size=16k", "skyinfra-test", str(blobs)], check=True)
    try:
        yield
    finally:
        subprocess.run([*enter, "umount", "-l", str(blobs)], check=True)


@contextlib.contextmanager
def no_descriptors(bed: Bed, pool: Pool) -> Iterator[None]:
    for pid in bed.processes(pool):
        held = len(os.listdir(f"/proc/{pid}/fd"))  # noqa: PTH208
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (held, resource.prlimit(pid, resource.RLIMIT_NOFILE)[1]))
    yield


@contextlib.contextmanager
def no_memory(bed: Bed, pool: Pool) -> Iterator[None]:
    for pid in bed.processes(pool):
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[0])
        limit = pages * resource.getpagesize() + 4 * 2**20
        resource.prlimit(pid, resource.RLIMIT_AS, (limit, limit))
    yield


@contextlib.contextmanager
def broken_python(bed: Bed, pool: Pool) -> Iterator[None]:
    code = bed.installed / "skyinfra" / "worker" / "execute.py"
    whole = code.read_text()
    pids = bed.processes(pool)
    code.write_text("raise ImportError('a broken Python')\n")
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    try:
        yield
    finally:
        code.write_text(whole)


Fault = Callable[[Bed, Pool], contextlib.AbstractContextManager[None]]
# Of these a new process is free.
PASS = (no_descriptors, no_memory)


@pytest.mark.parametrize("fault", [full, no_inodes, read_only, full_blobs, no_descriptors, no_memory, broken_python])
def test_no_task_fails_for_a_sick_node(made: Bed, tmp_path: Path, fault: Fault) -> None:
    nodes = no_task_fails(made, tmp_path, lambda pool: fault(made, pool), passes=fault in PASS)
    if fault in (full, no_inodes, read_only):
        assert nodes == {"n0", "n2"}
        assert not started_again(tmp_path / "journal")


def test_no_task_fails_for_a_driver_that_answers_with_errors(driven: Driven, tmp_path: Path) -> None:
    """Its tasks meet errors of CUDA, none of which is theirs."""

    @contextlib.contextmanager
    def fault(_: Pool) -> Iterator[None]:
        driven.says.write_text(LOST)
        try:
            yield
        finally:
            driven.says.write_text("")

    nodes = no_task_fails(driven, tmp_path, fault, task=count_on_device)
    assert nodes == {"n0", "n2"}
    assert started_again(tmp_path / "journal"), "the driver failed no task"


def no_task_fails(
    bed: Sick,
    tmp_path: Path,
    fault: Callable[[Pool], contextlib.AbstractContextManager[None]],
    *,
    task: Any = count,
    passes: bool = False,
) -> set[str]:
    """Returns the nodes that did the tasks of a map while there was the *fault*.

    passes: whether another process is free of it, so that the node is not sick for long.
    """
    journal = tmp_path / "journal"
    bed.fleet.settled()
    with bed.fleet.connect() as pool:
        with fault(pool):
            arguments = (itertools.repeat(str(journal)), itertools.repeat(0.01))
            results = list(pool.map(task, range(TASKS), *arguments))
            assert [number for number, _ in results] == list(range(TASKS))
            singly = [pool.submit(task(number, f"{journal}.singly", 0.05).options(timeout=60)) for number in range(40)]
            assert [future.result(timeout=RESULT_S)[0] for future in singly] == list(range(40))
            # They wait on the other nodes, so that the sick one is given some as well.
            gate = tmp_path / "gate"
            sent = [pool.submit(size, os.urandom(2 * INLINE), str(gate)) for _ in range(LARGE)]
            if not passes:
                assert set(until(lambda: pool.look().state.sick, seconds=RESULT_S)) <= bed.slots
            gate.touch()
            ended = [future.result(timeout=RESULT_S) for future in sent]
            assert [length for length, _ in ended] == [2 * INLINE] * LARGE
            if not passes:
                assert SICK not in {slot.partition("/")[0] for _, slot in ended}
        until(lambda: len(pool.slots()) == bed.fleet.size, seconds=RESULT_S)
        assert not pool.look().state.sick
    bed.fleet.settled()
    return {node for _, node in results}


@contextlib.contextmanager
def loaded_ranks(bed: Bed, pool: Pool) -> Iterator[None]:
    """The processes of ranks do not start; the workers, which have loaded it before, do not notice."""
    assert len(pool.launch(where, framework="none")) == bed.fleet.size
    with broken_ranks(bed, pool):
        yield


@contextlib.contextmanager
def broken_ranks(bed: Bed, _: Pool) -> Iterator[None]:
    """What workers load for a rank is broken."""
    code = bed.installed / "skyinfra" / "worker" / "rank.py"
    whole = code.read_text()
    code.write_text("raise ImportError('a broken Python')\n")
    try:
        yield
    finally:
        code.write_text(whole)


@pytest.mark.parametrize("fault", [full, read_only, no_descriptors, loaded_ranks, broken_ranks])
def test_a_gang_goes_elsewhere_from_a_sick_node(made: Bed, tmp_path: Path, fault: Fault) -> None:
    bed, journal = made, tmp_path / "journal"
    bed.fleet.settled()
    with bed.fleet.connect() as pool:
        # The sick one is the second to be asked; the function has no retries.
        with fault(bed, pool):
            assert on_nodes(pool, journal, nodes=2, per_node=4) == ["n0"] * 4 + ["n2"] * 4
        until(lambda: len(pool.slots()) == bed.fleet.size, seconds=RESULT_S)
    assert {node.rpartition("/")[0] for _, node in starts(journal)} <= {"n0", "n2"}
    bed.fleet.settled()


def test_a_gang_that_has_nowhere_else_says_what_its_slot_lacks(made: Bed, tmp_path: Path) -> None:
    bed = made
    bed.fleet.settled()
    with open_pool(bed.fleet.manifest, patience=6) as pool:
        with full(bed, pool), pytest.raises(SlotFailed) as failed:
            on_nodes(pool, tmp_path / "journal", nodes=3, per_node=4)
        assert f"slot {SICK}/" in str(failed.value) and "No space left on device" in str(failed.value)
        assert "nowhere else: the fleet has 2 nodes" in str(failed.value)
        until(lambda: len(pool.slots()) == bed.fleet.size, seconds=RESULT_S)
        assert on_nodes(pool, tmp_path / "again", nodes=3, per_node=4) == [
            n for n in ("n0", SICK, "n2") for _ in "1234"
        ]
    bed.fleet.settled()


def on_nodes(pool: Pool, journal: Path, *, nodes: int, per_node: int) -> list[str]:
    """The nodes of the ranks of a gang."""
    ended = pool.launch(count, 0, str(journal), 0.0, nodes=nodes, per_node=per_node, framework="none", timeout=RESULT_S)
    return [node for _, node in ended]


def size(data: bytes, gate: str) -> tuple[int, str]:
    deadline = time.monotonic() + RESULT_S
    while not os.path.exists(gate) and time.monotonic() < deadline:  # noqa: PTH110
        time.sleep(0.02)
    return len(data), skyinfra.instance_info().slot
