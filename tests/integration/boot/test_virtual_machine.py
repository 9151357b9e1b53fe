"""What no container enforces: the node in a virtual machine, with a kernel of its own (`make test-vm`)."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from booted_nodes.fleet import Bed, Fleet
from booted_nodes.image import Unavailable
from terraform_projects.commands import until

import skyinfra as sky
from skyinfra.client import Pool
from skyinfra.tasks import Task

METADATA = ("169.254.169.254", 80)
# Emulated, a boot takes two to five minutes.
_BOOT_S = 900.0


@pytest.fixture(scope="module")
def machine(bed: Bed) -> Iterator[Fleet]:
    """One CPU node with two slots."""
    pool = sky.ComputePool(
        name="mig",
        provider=sky.AWS(region="us-east-1"),
        vcpus=2,
        worker=sky.Worker(concurrency=2),
        image=sky.Image(wheelhouse=bed.index),
    )
    try:
        made = bed.fleet(pool, virtual=True)
    except Unavailable as error:
        if os.environ.get("CI"):
            pytest.fail(str(error), pytrace=False)
        pytest.skip(str(error))
    try:
        yield made.boot(ready=False)
    finally:
        made.close()


@pytest.fixture(scope="module")
def pool(machine: Fleet) -> Iterator[Pool]:
    node = machine.head

    def connected() -> Pool | None:
        assert node.running, node.report()
        try:
            return machine.connect()
        except sky.FleetError:
            return None

    try:
        found = until(connected, seconds=_BOOT_S)
    except AssertionError:
        raise AssertionError(node.report()) from None
    with found as pool:
        until(lambda: len(pool.slots()) == 2, seconds=_BOOT_S)
        yield pool


def reach(address: tuple[str, int]) -> str:
    """What a connection comes to."""
    try:
        with socket.create_connection(address, timeout=5):
            return "connected"
    except OSError as error:
        return type(error).__name__


def reach_in_a_program(address: tuple[str, int]) -> str:
    program = f"import socket; socket.create_connection({address!r}, timeout=5)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    return done.stderr.strip().splitlines()[-1].partition(":")[0] if done.returncode else "connected"


def about() -> tuple[str, int]:
    """The kernel, and the user that tasks are."""
    return os.uname().release, os.getuid()


def eat() -> None:
    """Takes memory until there is none."""
    taken = []
    while True:
        taken.append(b"x" * (32 << 20))


def wait_for(name: str) -> int:
    """Until the file *name* is in the node's folder."""
    while not Path(os.environ["SKYINFRA_NODE_DIR"], name).exists():
        time.sleep(0.5)
    return os.getpid()


def leave(name: str) -> None:
    Path(os.environ["SKYINFRA_NODE_DIR"], name).touch()


def start_threads(most: int, name: str = "") -> int:
    """How many threads can be started; with *name*, they stay until there is a file of that name."""
    ends, count = threading.Event(), 0
    with contextlib.suppress(RuntimeError):
        for _ in range(most):
            threading.Thread(target=ends.wait, daemon=True).start()
            count += 1
    if name:
        leave(f"{name}-started")
        wait_for(name)
    ends.set()
    return count


def group() -> tuple[str, int]:
    """The name of the group of processes that a task is in, and the most threads of all slots."""
    path = Path("/sys/fs/cgroup", Path("/proc/self/cgroup").read_text().strip().removeprefix("0::/"))
    return path.name, int((path.parent / "pids.max").read_text())


def noticed() -> str:
    while not sky.interrupted():
        time.sleep(0.5)
    return "noticed"


def opened(path: str) -> str:
    try:
        os.close(os.open(path, os.O_RDONLY | os.O_NONBLOCK))
    except OSError as error:
        return type(error).__name__
    return "opened"


def allowed() -> dict[str, str]:
    """What the kernel says that this process may do."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}


def written(path: str) -> str:
    try:
        Path(path).write_text("x")
    except OSError as error:
        return type(error).__name__
    return "written"


def processes() -> set[str]:
    """Users of the processes that a task sees."""
    return {str(each.stat().st_uid) for each in Path("/proc").glob("[0-9]*")}


def test_a_machine_boots_with_a_kernel_of_its_own(machine: Fleet, pool: Pool) -> None:
    for kernel, user in Task(about) @ pool:
        assert kernel != os.uname().release
        assert user != 0
    # cloud-init took it for a machine of AWS's: all that it asked was asked with a token.
    assert machine.head.metadata.refused == 0


def test_tasks_get_no_credentials_of_the_machine(machine: Fleet, pool: Pool) -> None:
    head = (machine.head.address, 8786)
    assert pool.submit(reach, head).result(timeout=60) == "connected"
    assert pool.submit(reach, METADATA).result(timeout=60) in ("PermissionError", "TimeoutError")
    found = pool.submit(reach_in_a_program, METADATA).result(timeout=60)
    assert found in ("PermissionError", "TimeoutError")


def test_what_the_units_forbid_is_forbidden(pool: Pool) -> None:
    status = pool.submit(allowed).result(timeout=60)
    assert (status["NoNewPrivs"], int(status["CapEff"], 16), int(status["CapBnd"], 16)) == ("1", 0, 0)
    assert status["Seccomp"] == "2"
    for path in ("/usr/x", "/proc/sys/kernel/hostname", "/sys/fs/cgroup/x", "/etc/x"):
        assert pool.submit(written, path).result(timeout=60) != "written", path
    for path in ("/dev/vda", "/dev/kmsg", "/dev/mem", "/dev/port"):
        assert pool.submit(opened, path).result(timeout=60) != "opened", path
    assert "0" not in pool.submit(processes).result(timeout=60)


def test_a_task_that_takes_all_memory_ends_alone(pool: Pool) -> None:
    before = set(Task(os.getpid) @ pool)
    neighbour = pool.submit(wait_for, "eaten")
    with pytest.raises(sky.TaskAttemptsExceeded):
        pool.submit(eat).result(timeout=600)
    pool.submit(leave, "eaten").result(timeout=300)
    same = neighbour.result(timeout=120)
    until(lambda: len(pool.slots()) == 2, seconds=120)
    assert before & set(Task(os.getpid) @ pool) == {same}


def test_a_slot_that_starts_threads_without_end_leaves_the_others_theirs(pool: Pool) -> None:
    names, most = zip(*sorted(Task(group) @ pool), strict=True)
    assert names == ("slot-0", "slot-1")
    bomb = pool.submit(start_threads, 10**6, "enough")
    pool.submit(wait_for, "enough-started").result(timeout=300)
    assert pool.submit(start_threads, 150).result(timeout=120) == 150
    pool.submit(leave, "enough").result(timeout=120)
    assert 100 < bomb.result(timeout=120) <= most[0] / 3


def test_the_machine_itself_still_asks(machine: Fleet, pool: Pool) -> None:
    """The watchers are not tasks: a notice reaches the node."""
    told = pool.submit(noticed)
    machine.head.metadata.notice("terminate", "2030-01-01T00:00:00Z")
    assert told.result(timeout=300) == "noticed"
