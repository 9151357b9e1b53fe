"""Gangs: ranks that start together, end together, and say which of them failed first."""

from __future__ import annotations

import concurrent.futures
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
from tasks_on_nodes.gangs import (
    break_off,
    environment,
    hold,
    kill_own_process,
    lean_on_rank_0,
    none,
    place,
    report,
    wait_for,
)

import skyinfra as sky
from skyinfra.client import open_pool, run_script
from skyinfra.submission.watching import Watcher
from skyinfra.tasks import Task
from skyinfra.tasks.task import Options

ROOT = Path(sky.__file__).parents[1]


def ended(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


@pytest.fixture
def background():
    """Runs a function in a thread; ``background(f, x).result()`` waits for it."""
    with concurrent.futures.ThreadPoolExecutor(8) as executor:
        yield executor.submit


# Ranks --------------------------------------------------------------------------------------------------------------


def test_every_slot_is_a_rank_that_sees_its_own_partition(pool):
    assert none(pool, place) == [(rank, f"n{n}/{i}", f"MIG-n{n}-{i}") for rank, (n, i) in enumerate(FOUR)]


FOUR = [(0, 0), (0, 1), (1, 0), (1, 1)]


def test_ranks_have_what_torchrun_gives_them(pool):
    with pytest.warns(sky.GangWarning, match=r"GPU 0 of n0 \(ranks 0, 1\); GPU 0 of n1 \(ranks 2, 3\)"):
        found = pool.launch(environment, max_restarts=2)
    ports = {each["MASTER_PORT"] for each in found}
    assert len(ports) == 1
    assert 1024 < int(ports.pop()) < 65536
    for rank, each in enumerate(found):
        wanted = {
            "MASTER_ADDR": "127.0.0.1",
            "RANK": rank,
            "WORLD_SIZE": 4,
            "LOCAL_RANK": rank % 2,
            "LOCAL_WORLD_SIZE": 2,
            "GROUP_RANK": rank // 2,
            "GROUP_WORLD_SIZE": 2,
            "ROLE_RANK": rank,
            "ROLE_WORLD_SIZE": 4,
            "TORCHELASTIC_RESTART_COUNT": 0,
            "TORCHELASTIC_MAX_RESTARTS": 2,
            "TORCH_NCCL_ASYNC_ERROR_HANDLING": 1,
            "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC": 600,
            "GLOO_SOCKET_IFNAME": "lo",
            "SKYINFRA_RESTART": 0,
        }
        assert {name: each[name] for name in wanted} == {name: str(value) for name, value in wanted.items()}
        assert "TORCHELASTIC_USE_AGENT_STORE" not in each


def test_a_rank_knows_its_gang(pool):
    first, second = none(pool, sky.gang, nodes=2, per_node=1)
    assert (first.rank, first.world_size, first.local_rank, first.local_world_size) == (0, 2, 0, 1)
    assert (second.rank, second.node_rank, second.nodes) == (1, 1, ("n0", "n1"))
    assert first.slots == second.slots
    assert (first.master_address, first.master_port) == (second.master_address, second.master_port)
    with pytest.raises(sky.NotInTask, match="launch"):
        sky.gang()


def test_arguments_results_and_decorated_functions(pool):
    @sky.compute
    def add(a: int, *, b: int) -> int:
        return a + b + sky.gang().rank

    assert none(pool, add, 10, nodes=1, b=5) == [15, 16]


def test_rank_0_may_listen_at_the_port_of_the_gang(pool):
    def meet() -> str:
        gang = sky.gang()
        if gang.rank == 0:
            with socket.create_server((gang.master_address, gang.master_port)) as server:
                for _ in range(gang.world_size - 1):
                    server.accept()[0].sendall(b"hello")
            return "hello"
        while True:
            try:
                with socket.create_connection((gang.master_address, gang.master_port)) as connection:
                    return connection.recv(5).decode()
            except ConnectionRefusedError:
                time.sleep(0.01)

    assert none(pool, meet) == ["hello"] * 4


@pytest.mark.slow
def test_ranks_on_whole_gpus_see_those_of_their_node(fleets):
    with open_pool(fleets(whole=True).manifest) as pool:
        found = pool.launch(environment)
        visible = ["GPU-n0-0,GPU-n0-1"] * 2 + ["GPU-n1-0,GPU-n1-1"] * 2
        assert [each["CUDA_VISIBLE_DEVICES"] for each in found] == visible
        assert [each["LOCAL_RANK"] for each in found] == ["0", "1", "0", "1"]
        found = pool.launch(environment, framework="jax", nodes=1)
        assert [each["JAX_LOCAL_DEVICE_IDS"] for each in found] == ["0", "1"]
        check_tasks_on_several_slots(pool)


def check_tasks_on_several_slots(pool):
    """Here, because a fleet takes seconds."""

    @sky.compute(slots=2)
    def see(number: int) -> tuple[int, str]:
        time.sleep(0.05)
        return number, os.environ["CUDA_VISIBLE_DEVICES"]

    assert see(7) >> pool in [(7, "GPU-n0-0,GPU-n0-1"), (7, "GPU-n1-0,GPU-n1-1")]
    results = list(pool.map(see, range(6)))
    assert [number for number, _ in results] == list(range(6))
    assert {visible for _, visible in results} == {"GPU-n0-0,GPU-n0-1", "GPU-n1-0,GPU-n1-1"}
    future = pool.submit(see(1).options(slots=1))
    assert "," not in future.result(timeout=60)[1]
    with pytest.raises(sky.InvalidField, match=r"slots: no node has that many slots \(given: 3\)"):
        see(1).options(slots=3) >> pool
    with pytest.raises(sky.NotSupported, match="several slots"):
        see(1) @ pool
    with pytest.raises(sky.TaskTimeout, match=r"more than 0\.5 s"):
        pool.submit(Task(time.sleep, (600,)).options(slots=2, timeout=0.5)).result(timeout=60)
    with tempfile.TemporaryDirectory() as folder, pytest.raises(sky.TaskTimeout, match=r"sleeps\.py .* 0\.5 s"):
        Path(folder, "sleeps.py").write_text("import time; time.sleep(600)")
        settings = Options(timeout=0.5)
        run_script(pool, Path(folder, "sleeps.py"), slots=2, settings=settings, on_line=lambda *_: None)
    with pytest.raises(ZeroDivisionError):
        pool.submit(Task(lambda: 1 / 0).options(slots=2, retries=1)).result(timeout=60)
    with pytest.raises(sky.TaskAttemptsExceeded, match="lost a process 3 times: exit code 3") as caught:
        pool.submit(Task(os._exit, (3,)).options(slots=2)).result(timeout=60)
    assert re.search(r"`skyinfra logs \S+/\S+ --task \S+` has what it printed", str(caught.value.hint))


def test_what_ranks_print_is_shown_where_nobody_takes_their_lines(fleet):
    seen = []
    with open_pool(fleet.manifest, output=lambda slot, line: seen.append((slot, line))) as pool:
        none(pool, print, "hello", per_node=1)
    assert sorted(seen) == [("n0/0", "hello"), ("n1/0", "hello")]


REPORT = """
import sys, time
from pathlib import Path
import skyinfra as sky
sky.progress(sky.gang().rank + 1, 100, "loss 0.3")
while not Path(sys.argv[1]).exists(): time.sleep(0.01)
"""


@pytest.mark.parametrize("kind", ["function", pytest.param("script", marks=pytest.mark.slow)])
def test_how_far_each_rank_is_arrives_and_can_be_asked(fleet, tmp_path, background, wait_until, monkeypatch, kind):
    """Ranks are processes of their own."""
    gate, told = tmp_path / "gate", {}
    monkeypatch.setattr(Watcher, "_step", lambda self, key, name, *what: told.update({name: what}))
    (tmp_path / "report.py").write_text(REPORT)
    with open_pool(fleet.manifest) as pool:
        wait_until(lambda: not pool.work().progress)
        work = report if kind == "function" else tmp_path / "report.py"
        gang = background(none, pool, work, str(gate), per_node=1)
        wait_until(lambda: len(pool.work().progress) == 2)
        shown = {slot: (each.done, each.total, each.note) for slot, each in pool.work().progress.items()}
        assert shown == {"n0/0": (1, 100, "loss 0.3"), "n1/0": (2, 100, "loss 0.3")}
        wait_until(lambda: len(told) == 2)
        assert sorted(told.values()) == [(1, 100, "loss 0.3"), (2, 100, "loss 0.3")]
        assert {name.split()[0] for name in told} == {"n0/0", "n1/0"}
        gate.touch()
        gang.result(timeout=120)
        wait_until(lambda: not pool.work().progress)


# Slots --------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_no_rank_runs_before_all_have_their_slots(pool, tmp_path, background, wait_until):
    busy = background(pool.broadcast, Task(wait_for, (str(tmp_path / "free"),)), slots=pool.slots()[3:])
    wait_until(lambda: any(pool.running().get("n1/1", [])))
    (tmp_path / "g.end").touch()
    gang = background(none, pool, hold, str(tmp_path), "g")
    time.sleep(0.5)
    assert not list(tmp_path.glob("g.[0-9]"))
    (tmp_path / "free").touch()
    gang.result(timeout=60)
    busy.result(timeout=60)
    assert len(list(tmp_path.glob("g.[0-9]"))) == 4


@pytest.mark.slow
def test_a_gang_that_does_not_start_in_time_says_what_it_waits_for(pool, tmp_path, background, wait_until):
    busy = background(pool.broadcast, Task(wait_for, (str(tmp_path / "free"),)), slots=pool.slots()[1:2])
    wait_until(lambda: any(pool.running().get("n0/1", [])))

    def problem() -> str:
        with pytest.raises(TimeoutError) as caught:
            none(pool, place, timeout=0.6)
        return str(caught.value)

    # The slots of the gang before may still be in use for a moment.
    wait_until(lambda: problem() == "place has not started within 0.6 s: other tasks run on n0/1")
    (tmp_path / "free").touch()
    busy.result(timeout=60)
    assert len(none(pool, place, timeout=60)) == 4


@pytest.mark.slow
def test_gangs_take_turns_in_the_order_in_which_they_came(fleet, pool, tmp_path, background, wait_until):
    running = background(none, pool, hold, str(tmp_path), "a")
    wait_until(lambda: len(list(tmp_path.glob("a.[0-9]"))) == 4)
    with open_pool(fleet.manifest) as other:
        second = background(none, other, hold, str(tmp_path), "b")
        time.sleep(0.4)
        third = background(none, pool, hold, str(tmp_path), "c", nodes=1)
        time.sleep(0.4)
        assert not list(tmp_path.glob("[bc].[0-9]"))
        (tmp_path / "a.end").touch()
        running.result(timeout=60)
        wait_until(lambda: len(list(tmp_path.glob("b.[0-9]"))) == 4)
        assert not list(tmp_path.glob("c.[0-9]"))
        (tmp_path / "b.end").touch()
        second.result(timeout=60)
        (tmp_path / "c.end").touch()
        third.result(timeout=60)


@pytest.mark.slow
def test_two_small_gangs_run_beside_each_other(pool, tmp_path, background, wait_until):
    both = [background(none, pool, hold, str(tmp_path), name, nodes=1) for name in "ab"]
    wait_until(lambda: len(list(tmp_path.glob("[ab].[0-9]"))) == 4)
    for name in "ab":
        (tmp_path / f"{name}.end").touch()
    for each in both:
        each.result(timeout=60)


@pytest.mark.slow
def test_many_gangs_at_once_all_come_to_an_end(pool, background):
    gangs = [background(none, pool, place, nodes=1 + number % 2, per_node=1 + number % 2) for number in range(8)]
    for number, gang in enumerate(gangs):
        assert len(gang.result(timeout=120)) == (1 + number % 2) ** 2


def test_a_gang_uses_what_is_selected(pool):
    assert [slot for _, slot, _ in none(pool.select(node="n1"), place)] == ["n1/0", "n1/1"]


# Failures -----------------------------------------------------------------------------------------------------------


def all_ended(folder: Path) -> bool:
    pids = [int((folder / str(rank)).read_text()) for rank in range(4)]
    return all(map(ended, pids))


@pytest.mark.parametrize("attempt", [0, *(pytest.param(number, marks=pytest.mark.slow) for number in range(1, 6))])
def test_the_first_failure_ends_all_ranks_and_is_the_one_that_is_raised(pool, tmp_path, wait_until, attempt):
    with pytest.raises(ZeroDivisionError, match="the cause") as caught:
        none(pool, lean_on_rank_0, str(tmp_path), break_off)
    assert "break_off" in [frame.name for frame in caught.traceback]
    assert caught.value.__notes__ == ["Raised by rank 1 of lean_on_rank_0, on slot n0/1 of node n0."]
    wait_until(lambda: all_ended(tmp_path), timeout=5)
    assert len(none(pool, place, timeout=30)) == 4


def test_a_rank_that_is_killed_is_the_one_that_is_named(pool, tmp_path, wait_until):
    with pytest.raises(
        sky.GangFailed, match=r"rank 1 of .*, on slot n0/1 of node n0, was killed by signal 9 \(SIGKILL\)"
    ) as caught:
        none(pool, lean_on_rank_0, str(tmp_path), kill_own_process)
    assert (caught.value.rank, caught.value.code) == (1, -9)
    assert re.search(
        r"Its last output:\n  before it ends\n`skyinfra logs stack/pool --task lean_on_rank_0\.1-\w+` has all of it\.\n"
        r"Usual cause: the machine ran out of memory",
        str(caught.value.hint),
    )
    wait_until(lambda: all_ended(tmp_path), timeout=5)


@pytest.mark.slow
def test_a_rank_that_loses_its_worker_is_the_one_that_is_named(pool, tmp_path, wait_until):
    def kill_worker() -> None:
        os.kill(os.getppid(), signal.SIGKILL)

    with pytest.raises(sky.GangFailed, match=r"rank 1 of .*, on slot n0/1 of node n0, lost its slot") as caught:
        none(pool, lean_on_rank_0, str(tmp_path), kill_worker)
    assert (caught.value.rank, caught.value.code) == (1, None)
    wait_until(lambda: all_ended(tmp_path), timeout=10)
    wait_until(lambda: len(pool.slots()) == 4)


@pytest.mark.parametrize("code", [7, 0])
def test_an_exit_code_is_a_failure(pool, code):
    with pytest.raises(sky.GangFailed, match=f"rank 2 .*ended with exit code {code}"):
        none(pool, lambda: os._exit(code) if sky.gang().rank == 2 else time.sleep(600))


@pytest.mark.parametrize(("ends", "code"), [("return", 0), ("raise", 1), ("terminate", -signal.SIGTERM)])
def test_a_fork_does_not_speak_for_its_rank(pool, ends, code):
    def fork() -> tuple[str, int]:
        ours, theirs = os.pipe()
        if (pid := os.fork()) == 0:
            os.write(theirs, b"x")
            if ends == "terminate":
                time.sleep(600)
            if ends == "raise":
                raise OSError("in the child")
            return "child", 0
        os.read(ours, 1)
        if ends == "terminate":
            os.kill(pid, signal.SIGTERM)
        return "parent", os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

    assert none(pool, fork, nodes=1, per_node=1) == [("parent", code)]


def test_a_result_that_cannot_be_shipped_is_said(pool):
    with pytest.raises(sky.TaskNotPicklable, match="result"):
        none(pool, lambda: (each for each in [1]), nodes=1, max_restarts=3)


def test_a_gang_starts_again_and_goes_on_from_its_checkpoint(pool, tmp_path):
    def train(folder: str) -> tuple[int, int, str]:
        gang = sky.gang()
        checkpoints = sky.SpotCheckpointer(f"{folder}/{gang.rank}")
        _, step = checkpoints.load_latest() or (None, 0)
        began = step
        while step < 6:
            step += 1
            checkpoints.save(None, step)
            if gang.rank == 1 and step == 2 * (gang.restart + 1) and gang.restart < 2:
                os.kill(os.getpid(), signal.SIGKILL)
        return began, gang.restart, os.environ["SKYINFRA_RESTART"]

    results = none(pool, train, str(tmp_path), nodes=1, max_restarts=2)
    assert results[1] == (4, 2, "2")
    assert results[0][1:] == (2, "2")


@pytest.mark.slow
def test_a_gang_starts_again_no_more_often_than_it_may(pool, tmp_path):
    def fail(path: str) -> None:
        with Path(path).open("a") as file:
            file.write(".")
        raise OSError("again")

    with pytest.raises(OSError, match="again"):
        none(pool, fail, str(tmp_path / "starts"), nodes=1, per_node=1, max_restarts=2)
    assert (tmp_path / "starts").read_text() == "..."


@pytest.mark.slow
def test_a_gang_goes_on_after_the_loss_of_a_worker(pool, tmp_path, wait_until):
    def once(path: str) -> int:
        if sky.gang().rank == 3 and not Path(path).exists():
            Path(path).touch()
            os.kill(os.getppid(), signal.SIGKILL)
            time.sleep(600)
        return sky.gang().restart

    assert none(pool, once, str(tmp_path / "done"), max_restarts=1) == [1] * 4


@pytest.mark.slow
def test_a_client_that_dies_takes_its_ranks_with_it(fleet, pool, tmp_path, wait_until):
    program = (
        "import json, pathlib, sys, time, os\nimport skyinfra as sky\n"
        "def hold(folder):\n"
        "    pathlib.Path(folder, str(sky.gang().rank)).write_text(str(os.getpid()))\n"
        "    time.sleep(600)\n"
        "with sky.connect('manifest.json') as pool: pool.launch(hold, sys.argv[1], framework='none')\n"
    )
    (tmp_path / "manifest.json").write_text(json.dumps(fleet.manifest.to_json()))
    (tmp_path / "program.py").write_text(program)
    client = subprocess.Popen(
        [sys.executable, "program.py", str(tmp_path)], cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)}
    )
    try:
        wait_until(lambda: all((tmp_path / str(rank)).exists() for rank in range(4)))
    finally:
        client.kill()
        client.wait()
    wait_until(lambda: all_ended(tmp_path), timeout=20)
    assert len(none(pool, place, timeout=60)) == 4


@pytest.mark.slow
def test_an_interrupt_ends_all_ranks_and_frees_their_slots(pool, tmp_path, wait_until):
    def speak(folder: str) -> None:
        Path(folder, str(sky.gang().rank)).write_text(str(os.getpid()))
        while True:
            print("here")
            time.sleep(0.1)

    def interrupt(rank: int, stream: str, text: str) -> None:
        if all((tmp_path / str(rank)).exists() for rank in range(4)):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        none(pool, speak, str(tmp_path), on_line=interrupt)
    wait_until(lambda: all_ended(tmp_path), timeout=10)
    assert len(none(pool, place, timeout=60)) == 4


@pytest.mark.slow
def test_a_gang_starts_anew_where_the_head_did(fleets, tmp_path, background, wait_until):
    fleet = fleets()
    with open_pool(fleet.manifest) as pool:
        gang = background(none, pool, hold, str(tmp_path), "g")
        wait_until(lambda: len(list(tmp_path.glob("g.[0-9]"))) == 4)
        for file in tmp_path.glob("g.[0-9]"):
            file.unlink()
        fleet.kill()
        fleets(port=fleet.manifest.head.port)
        wait_until(lambda: len(list(tmp_path.glob("g.[0-9]"))) == 4)
        (tmp_path / "g.end").touch()
        gang.result(timeout=60)


@pytest.mark.slow
def test_a_gang_that_starts_anew_waits_for_slots_that_are_late(fleets, tmp_path, background, wait_until):
    fleet = fleets()
    with open_pool(fleet.manifest) as pool:
        gang = background(none, pool, hold, str(tmp_path), "g")
        wait_until(lambda: len(list(tmp_path.glob("g.[0-9]"))) == 4)
        for file in tmp_path.glob("g.[0-9]"):
            file.unlink()
        fleet.kill()
        fleets(port=fleet.manifest.head.port, nodes=("n0",))
        wait_until(lambda: len(pool.slots()) == 2)
        time.sleep(2)
        assert not list(tmp_path.glob("g.[0-9]")), "two of its four ranks run"
    with pytest.raises(concurrent.futures.CancelledError):
        gang.result(timeout=60)
