"""A layout changes while tasks run: what goes is drained, what stays is left alone, nothing runs twice."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from local_fleets.running_node import RunningNode, h100, until

from skyinfra import SlotLost, instance_info
from skyinfra.client import Future, Pool
from skyinfra.node import processes
from skyinfra.protocol.instance import InstanceInfo
from skyinfra.submission.snapshot import ANYWHERE, Target
from skyinfra.tasks import Task

MakeNode = Callable[..., RunningNode]
MakeGate = Callable[[str], "Gate"]

BIG = (("3g.40gb", 0, 4),)
SMALL = (("2g.20gb", 0, 2), ("2g.20gb", 2, 2), ("2g.20gb", 4, 2))


class Gate:
    """A task that counts its starts and runs until it is let through."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)

    def run(self, pool: Pool, target: Target) -> Future[tuple[str, str | None, int]]:
        """The task, once it runs."""
        future = self.send(pool, target)
        until(lambda: self.starts, f"{self.path} has started")
        return future

    def send(self, pool: Pool, target: Target = ANYWHERE) -> Future[tuple[str, str | None, int]]:
        return pool.send(Task(_wait, (self.path,)), target, windowed=False)

    @property
    def ran_on(self) -> list[tuple[str, int]]:
        """Slot and process of every start."""
        try:
            lines = Path(f"{self.path}.starts").read_text().splitlines()
        except FileNotFoundError:
            return []
        return [(slot, int(pid)) for slot, pid in map(str.split, lines)]

    @property
    def starts(self) -> int:
        return len(self.ran_on)

    def open(self) -> None:
        Path(f"{self.path}.open").touch()


def _wait(path: str) -> tuple[str, str | None, int]:
    info = instance_info()
    with open(f"{path}.starts", "a") as file:  # noqa: PTH123
        file.write(f"{info.slot} {os.getpid()}\n")
    while not os.path.exists(f"{path}.open"):  # noqa: PTH110
        time.sleep(0.02)
    return info.slot, info.profile, os.getpid()


def _much(path: str) -> bytes:
    _wait(path)
    return b"x" * 50_000_000


def place(_: object = None) -> tuple[str, str | None]:
    info = instance_info()
    return info.slot, info.profile


@pytest.fixture
def gate(tmp_path: Path) -> MakeGate:
    return lambda name: Gate(tmp_path / name)


def at(slot: InstanceInfo) -> Target:
    return Target(slot.slot, profile=slot.profile)


def on(pool: Pool, gpu: int) -> list[InstanceInfo]:
    return [slot for slot in pool.slots() if slot.gpu == gpu]


def test_tasks_end_on_what_goes_and_never_notice_on_what_stays(make_node: MakeNode, gate: MakeGate) -> None:
    node = make_node(accelerator=h100(BIG, BIG, BIG))
    pid = node.boot().pid
    busy, elsewhere, late = gate("busy"), gate("elsewhere"), gate("late")
    with node.pool() as pool:
        slots = pool.slots()
        pids = pool.broadcast(Task(os.getpid), slots=slots)
        # The first two GPUs are to change: one is busy, one is idle.
        of_busy, of_elsewhere = busy.run(pool, at(slots[0])), elsewhere.run(pool, at(slots[2]))
        of_late = late.send(pool, at(slots[0]))
        node.configure(accelerator=h100(SMALL, SMALL, BIG))
        with node.booting():
            until(lambda: len(on(pool, 1)) == 3, "the idle GPU has its new slots")
            status = node.until("draining")
            assert status.waits_for == ("slot n1/0: task _wait",)
            shown = node.run("status").stdout
            assert "demo/mig node n1: draining" in shown
            assert "layout 2g.20gb*3, 2g.20gb*3, 3g.40gb (from node.json)" in shown
            assert "waits for slot n1/0: task _wait" in shown
            assert (status.layouts, status.layout_from) == (("2g.20gb*3", "2g.20gb*3", "3g.40gb"), "node.json")
            look = pool.look()
            assert [slot.slot for slot in look.draining] == ["n1/0"]
            assert look.state is not None
            assert look.state.draining == {"n1/0": ("_wait",)}
            assert {profile for _, profile in pool.map(place, range(12), window=8)} == {"2g.20gb"}
            assert not of_busy.done()
            busy.open()
            assert of_busy.result(timeout=60) == ("n1/0", "3g.40gb", pids[0])
        with pytest.raises(
            SlotLost, match=r"slot n1/0 \(3g.40gb\), which _wait waits for, is not in the layout"
        ) as lost:
            of_late.result(timeout=60)
        # It is told at once, while the slots of the GPU that was busy still come.
        assert re.search(r"The slots are 2g\.20gb\*[3-6], 3g\.40gb now", lost.value.hint or "")
        assert not of_elsewhere.done()
        elsewhere.open()
        assert of_elsewhere.result(timeout=60) == ("n1/2", "3g.40gb", pids[2])
        assert (busy.starts, elsewhere.starts, late.starts) == (1, 1, 0)
        assert (node.status().pid, node.status().state, node.status().waits_for) == (pid, "ready", ())
        assert on(pool, 2) == slots[2:]
        # Each slot that is there now, and none that the manifest promises besides.
        assert sorted(Task(place) @ pool) == [(s.slot, s.profile) for s in pool.slots()]
        assert [s.slot for s in pool.slots()] == [f"n1/{index}" for index in range(7)]
    node.quiet_log()


@pytest.mark.slow
def test_tasks_that_have_not_started_start_elsewhere_at_once(make_node: MakeNode, gate: MakeGate) -> None:
    node = make_node(accelerator=h100(BIG, BIG))
    node.boot()
    first, second = gate("first"), gate("second")
    with node.pool() as pool:
        slots = pool.slots()
        of_first, of_second = first.run(pool, at(slots[0])), second.run(pool, at(slots[1]))
        loose = [gate(f"loose{index}") for index in range(4)]
        futures = [each.send(pool) for each in loose]
        with node.client() as client:
            until(lambda: [len(keys) for keys in client.processing().values()] == [3, 3], "each slot has two more")
        node.configure(accelerator=h100(SMALL, BIG))
        with node.booting():
            node.until("draining")
            for each in (second, *loose):
                each.open()
            assert of_second.result(timeout=60)[0] == "n1/1"
            assert [future.result(timeout=60)[0] for future in futures] == ["n1/1"] * 4
            assert not of_first.done()
            first.open()
        assert of_first.result(timeout=60)[0] == "n1/0"
        assert [each.starts for each in (first, second, *loose)] == [1] * 6
    node.quiet_log()


@pytest.mark.slow
def test_the_newest_layout_wins_and_what_is_wanted_again_goes_on(make_node: MakeNode, gate: MakeGate) -> None:
    node = make_node(accelerator=h100(BIG, BIG))
    node.boot()
    busy = gate("busy")
    with node.pool() as pool:
        slots = pool.slots()
        pids = pool.broadcast(Task(os.getpid), slots=slots)
        of_busy = busy.run(pool, at(slots[0]))
        node.configure(accelerator=h100(SMALL, BIG))
        with node.booting(refused="has got another configuration while this one was waited for"):
            node.until("draining")
            waiting = pool.submit(Task(place))
            assert waiting.result(timeout=60) == ("n1/1", "3g.40gb")
            node.configure(accelerator=h100(BIG, SMALL))
            assert node.boot().waits_for == ()
        assert len(on(pool, 1)) == 3
        assert pool.look().draining == ()
        assert not of_busy.done()
        busy.open()
        assert of_busy.result(timeout=60) == ("n1/0", "3g.40gb", pids[0])
        assert pool.broadcast(Task(os.getpid), slots=slots[:1]) == pids[:1], "the worker is in service again"
        assert busy.starts == 1
    assert "slot n1/0: is wanted again" in node.quiet_log()


@pytest.mark.slow
def test_a_task_that_outlives_the_patience_starts_again_elsewhere(make_node: MakeNode, gate: MakeGate) -> None:
    node = make_node(accelerator=h100(BIG, BIG), drain_seconds=0.5)
    node.boot()
    busy = gate("busy")
    with node.pool() as pool:
        of_busy = busy.run(pool, ANYWHERE)
        [(slot, pid)] = busy.ran_on
        node.configure(accelerator=h100(*(SMALL if slot == f"n1/{gpu}" else BIG for gpu in (0, 1))))
        node.boot()
        until(lambda: busy.starts == 2, "it has started again")
        assert busy.ran_on[1][1] != pid
        assert not [process for process in processes.running() if process.pid == pid]
        busy.open()
        assert of_busy.result(timeout=60)[2] == busy.ran_on[1][1]
    log = node.directory.log_file.read_text()
    assert f"slot {slot}: not finished within 0.5 s and ended: task _wait; tasks start again on other slots" in log
    assert "Traceback" not in log
    assert not list((node.path / "attempts").iterdir()), "the node's own doing does not count against the task"


@pytest.mark.slow
def test_a_worker_that_dies_while_it_is_drained_stays_dead(make_node: MakeNode, gate: MakeGate) -> None:
    node = make_node(accelerator=h100(BIG, BIG))
    node.boot()
    busy = gate("busy")
    with node.pool() as pool:
        of_busy = busy.run(pool, ANYWHERE)
        [(slot, pid)] = busy.ran_on
        gpu = int(slot[-1])
        node.configure(accelerator=h100(*(SMALL if each == gpu else BIG for each in (0, 1))))
        with node.booting():
            node.until("draining")
            os.kill(pid, signal.SIGKILL)
        until(lambda: busy.starts == 2, "the task has started again")
        busy.open()
        assert of_busy.result(timeout=60)[2] == busy.ran_on[1][1]
        assert len(on(pool, gpu)) == 3
    assert f"slot {slot}: drained and ended" in node.directory.log_file.read_text()
    assert "Traceback" not in node.directory.log_file.read_text()


@pytest.mark.slow
def test_a_worker_stays_until_its_results_are_fetched(make_node: MakeNode, gate: MakeGate) -> None:
    node = make_node(accelerator=h100(BIG))
    node.boot()
    much = gate("much")
    with node.pool() as pool:
        futures = [pool.submit(_much, much.path)]
        until(lambda: much.starts, "it runs")
        futures += [pool.submit(place) for _ in range(2)]
        node.configure(accelerator=h100(SMALL))
        with node.booting():
            node.until("draining")
            much.open()
            assert len(futures[0].result(timeout=60)) == 50_000_000
        assert {future.result(timeout=60)[1] for future in futures[1:]} == {"2g.20gb"}
    assert much.starts == 1
    node.quiet_log()


@pytest.mark.slow
def test_another_environment_waits_for_tasks_too(make_node: MakeNode, gate: MakeGate) -> None:
    node = make_node(cpu_slots=3, env={"COLOUR": "red"})
    node.boot()
    busy = gate("busy")
    with node.pool() as pool:
        of_busy = busy.run(pool, Target(slot="n1/1"))
        node.configure(cpu_slots=1, env={"COLOUR": "blue"})
        with node.booting():
            # The old slot of that name may be the last one for a moment, and take a task.
            until(lambda: [slot.slot for slot in pool.slots()] == ["n1/0"], "the other idle slots are gone")
            until(lambda: Task(os.getenv, ("COLOUR",)) >> pool == "blue", "the idle slots have changed")
            assert [slot.slot for slot in pool.slots()] == ["n1/0"]
            busy.open()
            assert of_busy.result(timeout=60)[0] == "n1/1"
        assert [slot.slot for slot in node.status().slots] == ["n1/0"]
    assert busy.starts == 1
    node.quiet_log()


@pytest.mark.slow
def test_the_runner_ends_at_once_while_it_drains(make_node: MakeNode, gate: MakeGate) -> None:
    node = make_node(accelerator=h100(BIG))
    pid = node.boot().pid
    assert pid is not None
    busy = gate("busy")
    with node.pool() as pool:
        busy.run(pool, ANYWHERE)
        node.configure(accelerator=h100(SMALL))
        os.kill(pid, signal.SIGHUP)
        node.until("draining")
        os.kill(pid, signal.SIGTERM)
        until(lambda: not processes.of_session(pid), "no process of the node is left", seconds=15)
    assert (node.status().state, node.status().slots) == ("stopped", ())
    assert "Traceback" not in node.directory.log_file.read_text()
    # What was desired when it ended is what the next one makes.
    assert [slot.profile for slot in node.boot().slots] == ["2g.20gb"] * 3


REFUSES = """
import sys
from pathlib import Path

if "skyinfra.runner" in sys.orig_argv:
    import pynvml
    from skyinfra.gpu.simulated.driver import SimulatedDriver

    made = SimulatedDriver.nvmlDeviceCreateGpuInstanceWithPlacement

    def refuse(self, device, profile, placement):
        if Path(FILE).exists() and self.nvmlDeviceGetUUID(device) == self.nvmlDeviceGetUUID(
            self.nvmlDeviceGetHandleByIndex(1)
        ):
            raise pynvml.NVMLError(pynvml.NVML_ERROR_UNKNOWN)
        return made(self, device, profile, placement)

    SimulatedDriver.nvmlDeviceCreateGpuInstanceWithPlacement = refuse
"""


@pytest.mark.parametrize("first", [True, False], ids=["boot", "change"])
def test_a_gpu_that_fails_leaves_the_others_their_slots(
    make_node: MakeNode, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, first: bool
) -> None:
    refused, patched = tmp_path / "refused", tmp_path / "patched"
    patched.mkdir()
    (patched / "sitecustomize.py").write_text(REFUSES.replace("FILE", repr(str(refused))))
    monkeypatch.setenv("PYTHONPATH", f"{patched}:{os.environ.get('PYTHONPATH', '')}")
    node = make_node(accelerator=h100(BIG, BIG) if not first else h100(SMALL, SMALL))
    if first:
        refused.touch()
    with node.foreground("boot") as process:
        if not first:
            node.until("ready")
            refused.touch()
            node.configure(accelerator=h100(SMALL, SMALL))
            process.send_signal(signal.SIGHUP)
        status = node.until("failed")
        assert status.error is not None and "GPU 1" in status.error[1]
        with node.pool() as pool:
            until(lambda: len(on(pool, 0)) == 3, "the other GPU has its slots")
            assert on(pool, 1) == []
            pids = pool.broadcast(Task(os.getpid), slots=on(pool, 0))
            refused.unlink()
            assert len(node.until("ready").slots) == 6
            until(lambda: len(on(pool, 1)) == 3, "the GPU has its slots once it can")
            assert pool.broadcast(Task(os.getpid), slots=on(pool, 0)) == pids, "those of the other GPU went on"
