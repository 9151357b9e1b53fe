"""Worker processes that die under a task: the error says why and with which last lines, and no line is lost."""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
import sys
import time
import traceback
import uuid
from pathlib import Path
from typing import Any

import distributed
import pytest
from support import first_fast

import skyinfra as sky
from skyinfra.client import open_pool
from skyinfra.engine import executor


@sky.compute
def die(how: int | str, said: str = "") -> None:
    if said:
        print(said, flush=True)
    if how == "segv":
        ctypes.string_at(0)
    elif isinstance(how, str):
        os.kill(os.getpid(), getattr(signal, how))
    else:
        os._exit(how)


@sky.compute
def die_twice(path: str) -> int:
    with Path(path).open("ab") as file:
        file.write(b".")
    start = Path(path).stat().st_size
    print("start", start)
    sys.stdout.flush()
    if start < 3:
        time.sleep(0.5 if start == 1 else 0)
        print("last of", start, end="", flush=True)
        os._exit(start)
    return start


@sky.compute(secrets=["A_TOKEN"])
def die_with_a_secret(path: str) -> str:
    if not Path(path).exists():
        Path(path).touch()
        value = os.environ["A_TOKEN"]
        print(f"just before: {value}; and {value[:-1]}", flush=True)
        os._exit(1)
    return "done"


def error_of(pool, task) -> sky.TaskAttemptsExceeded:
    with pytest.raises(sky.TaskAttemptsExceeded) as caught:
        task >> pool.select(node="n0")
    return caught.value


@pytest.mark.parametrize(
    ("how", "cause"),
    first_fast(
        [
            (3, "exit code 3"),
            ("SIGKILL", "killed by signal 9 (SIGKILL)"),
            (0, "exit code 0"),
            ("segv", "killed by signal 11 (SIGSEGV)"),
        ],
        2,
    ),
)
def test_the_error_of_a_task_that_ends_its_worker_names_the_cause(pool, how, cause):
    error = error_of(pool, die(how))
    assert error.message == f"die ended its worker process 3 times: {cause}"
    # A SIGKILL tells nothing of its reason.
    assert ("out of memory" in (error.hint or "")) == (how == "SIGKILL")


def test_the_traceback_of_an_error_of_the_node_has_no_frames_of_the_node(pool):
    files = [frame.f_code.co_filename for frame, _ in traceback.walk_tb(error_of(pool, die(3)).__traceback__)]
    assert files[0] == __file__ and not [file for file in files if f"{os.sep}worker{os.sep}" in file], files


def test_the_error_has_the_last_lines_and_where_all_of_them_are(pool):
    error = error_of(pool, die(1, "one\n\nabout to crash: bad tensor"))
    assert (
        error.hint is not None and "\n  about to crash: bad tensor\n`skyinfra logs stack/pool --task die-" in error.hint
    )


def test_lines_that_were_printed_just_before_the_end_arrive_once(fleet, tmp_path, wait_until):
    lines: list[str] = []
    with open_pool(fleet.manifest, output=lambda _, line: lines.append(line)) as pool:
        assert die_twice(str(tmp_path / "starts")) >> pool.select(node="n0") == 3
        expected = ["start 1", "last of 1", "start 2", "last of 2", "start 3"]
        wait_until(lambda: len(lines) >= len(expected))
        time.sleep(0.3)
    assert lines == expected


@sky.compute
def die_as_it_sends(path: str, then: float, times: int) -> str:
    from skyinfra.worker import streaming

    with Path(path).open("ab") as file:
        file.write(b".")
    start = Path(path).stat().st_size
    print("start", start)
    if start <= times:
        print("sent", end="", flush=True)
        # What the watcher of the output does ten times a second.
        with streaming._changed:
            streaming._tail.advance()
        time.sleep(then)
        os._exit(1)
    return "done"


# Seconds that the process lives on: what it sends does not leave it, perhaps, for sure.
@pytest.mark.parametrize("then", [0, 0.002, 0.5])
@pytest.mark.parametrize("times", [1, 2])
def test_lines_that_were_sent_as_the_process_ended_arrive_once(fleet, tmp_path, wait_until, then, times):
    lines: list[str] = []
    with open_pool(fleet.manifest, output=lambda _, line: lines.append(line)) as pool:
        assert die_as_it_sends(str(tmp_path / "starts"), then, times) >> pool.select(node="n0") == "done"
        expected = [line for start in range(1, times + 1) for line in (f"start {start}", "sent")]
        expected.append(f"start {times + 1}")
        wait_until(lambda: len(lines) >= len(expected), timeout=15)
        time.sleep(0.3)
    assert lines == expected


def test_the_last_lines_of_a_task_with_secrets_arrive_masked(fleet, tmp_path, monkeypatch, wait_until):
    value = f"t0p-{uuid.uuid4().hex}"
    monkeypatch.setenv("A_TOKEN", value)
    lines: list[str] = []
    with open_pool(fleet.manifest, output=lambda _, line: lines.append(line)) as pool:
        assert die_with_a_secret(str(tmp_path / "first")) >> pool.select(node="n0") == "done"
        wait_until(lambda: lines)
    assert lines == [f"just before: ***; and {value[:-1]}"]
    assert not list(Path("/dev/shm").glob("skyinfra-output-die_with_a_secret*"))


def test_what_a_node_notes_of_deaths_goes_with_the_task(pool, fleet, tmp_path):
    node = pool.select(node="n0")
    futures = [node.submit(die_twice(str(tmp_path / "starts"))), node.submit(die(1))]
    assert futures[0].result() == 3 and isinstance(futures[1].exception(), sky.TaskAttemptsExceeded)
    noted = {each.name for name in ("n0", "n1") for each in (fleet.root / name / "deaths").glob("*")}
    assert not noted & {future.key for future in futures}


def end_late(starts: str, go_on: str) -> int:
    with Path(starts).open("ab") as file:
        file.write(b".")
    start = Path(starts).stat().st_size
    while not Path(go_on).exists():
        time.sleep(0.01)
    if start > 1:
        return start
    # As where a busy machine lets messages wait: from the next one on, none leaves this process for a minute.
    worker = distributed.get_worker()
    worker.batched_stream.interval = 60.0
    worker.log_event("tests", "one")
    while worker.batched_stream.next_deadline is None or worker.batched_stream.buffer:
        time.sleep(0.01)
    return start


def end_process() -> None:
    os._exit(3)


def test_a_task_that_has_ended_does_not_start_again_where_the_next_one_ends_its_process(fleets, tmp_path, wait_until):
    """Both were given to one slot, as where the other ones come back from a death."""
    made = fleets(nodes=("n0",), slots=1)
    starts, go_on = tmp_path / "starts", tmp_path / "go-on"

    async def processing() -> int:
        return sum(map(len, (await first._fleet.connection.client.processing()).values()))

    # A client sends one task to one slot.
    with open_pool(made.manifest) as first, open_pool(made.manifest) as second:
        wait_until(lambda: first.slots())
        ends = first.submit(end_late, str(starts), str(go_on))
        wait_until(starts.exists)
        dies = second.submit(end_process)
        wait_until(lambda: first._fleet.in_loop(processing()) == 2)
        go_on.touch()
        assert ends.result(timeout=60) == 1
        assert isinstance(dies.exception(timeout=60), sky.TaskAttemptsExceeded)
    assert starts.read_bytes() == b"."


def test_the_end_of_a_process_is_not_heard_before_what_it_said(fleets, tmp_path, wait_until):
    """The Nanny tells the head of it on a connection of its own, which may be the faster one."""
    made = fleets(nodes=("n0",), slots=1)
    starts, go_on = tmp_path / "starts", tmp_path / "go-on"

    async def processing() -> dict[str, object]:
        return await first._fleet.connection.client.processing()

    async def unregister() -> None:
        (worker,) = await processing()
        told = first._fleet.connection.client.scheduler.unregister(address=worker, stimulus_id="nanny-close-1")
        answer = asyncio.ensure_future(told)
        await asyncio.sleep(0.5)
        go_on.touch()
        await answer

    with open_pool(made.manifest) as first, open_pool(made.manifest) as second:
        wait_until(lambda: first.slots())
        ends = first.submit(end_late, str(starts), str(go_on))
        wait_until(starts.exists)
        dies = second.submit(end_process)
        wait_until(lambda: sum(map(len, first._fleet.in_loop(processing()).values())) == 2)
        first._fleet.in_loop(unregister())
        assert ends.result(timeout=60) == 1
        assert isinstance(dies.exception(timeout=60), sky.TaskAttemptsExceeded)
    assert starts.read_bytes() == b"."


def count_start(starts: str, size: int = 0) -> bytes:
    with Path(starts).open("ab") as file:
        file.write(b".")
    return bytes(size)


def test_a_task_whose_result_arrived_does_not_start_again_as_its_process_ends_later(
    fleets, tmp_path, wait_until, monkeypatch
):
    """Its process ends before the client has told the head that the result may be forgotten."""
    monkeypatch.setattr(executor, "_RELEASE_S", 3600.0)
    made = fleets(nodes=("n0",), slots=1)
    with open_pool(made.manifest) as first, open_pool(made.manifest) as second:
        wait_until(lambda: first.slots())
        assert first.submit(count_start, str(tmp_path / "starts")).result(timeout=60) == b""
        # Three processes die, and what waits for one starts before this does.
        assert isinstance(second.submit(end_process).exception(timeout=60), sky.TaskAttemptsExceeded)
        assert second.submit(count_start, str(tmp_path / "others")).result(timeout=60) == b""
    assert (tmp_path / "starts").read_bytes() == b"."


@sky.compute
def die_counted(path: str) -> None:
    with Path(path).open("ab", 0) as file:
        file.write(f"{sky.instance_info().slot}\n".encode())
    print("about to crash")
    sys.stdout.flush()
    os._exit(7)


def test_a_task_ends_three_processes_on_whichever_nodes_and_no_more(
    fleets: Any, wait_until: Any, tmp_path: Path
) -> None:
    """Each death takes the models that others have loaded there."""
    fleet = fleets(nodes=("n0", "n1", "n2"), slots=1)
    with open_pool(fleet.manifest) as pool:
        for number in range(3):
            wait_until(lambda: len(pool.slots()) == 3)
            starts = tmp_path / f"starts-{number}"
            with pytest.raises(sky.TaskAttemptsExceeded) as caught:
                die_counted(str(starts)) >> pool
            error = caught.value
            assert error.message == "die_counted ended its worker process 3 times: exit code 7"
            assert error.hint is not None and "--task die_counted-" in error.hint
            assert len(starts.read_text().split()) == 3
            assert len(set(starts.read_text().split())) > 1, "on several nodes"
