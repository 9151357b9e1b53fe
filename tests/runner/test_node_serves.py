"""Real nodes: the program, its scheduler, its workers, TLS."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import resource
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from distributed.comm import connect
from local_fleets import inside
from local_fleets.running_node import OTHER_SECRET, SECRET, RunningNode, by_value, h100, on_slot, send, until

from skyinfra.engine.credentials import Credentials
from skyinfra.gpu.simulated.driver import SimulatedDriver
from skyinfra.node import processes
from skyinfra.protocol.instance import InstanceInfo, instance_info
from skyinfra.tasks import Task

TWO = h100((("3g.40gb", 0, 4), ("3g.40gb", 4, 4)))
MakeNode = Callable[..., RunningNode]


def look() -> tuple[str | None, str, InstanceInfo, str]:
    """What a task sees, and what a program that it starts sees."""
    command = "echo $CUDA_VISIBLE_DEVICES/$SKYINFRA_NODE_DIR/$GREETING"
    seen = subprocess.run(["sh", "-c", command], capture_output=True, text=True, check=True).stdout.strip()
    return os.environ.get("CUDA_VISIBLE_DEVICES"), seen, instance_info(), os.environ["OMP_NUM_THREADS"]


def wait_beside_children(path: str) -> None:
    """Starts two processes, one in a session of its own, and waits, at its first start."""
    if not Path(path).exists():
        pids = [subprocess.Popen(["sleep", "600"], start_new_session=apart).pid for apart in (False, True)]
        Path(path).write_text(" ".join(map(str, pids)))
        time.sleep(600)


def started_children(path: Path) -> list[int]:
    until(lambda: path.exists() and len(path.read_text().split()) == 2, "the task runs")
    children = [int(pid) for pid in path.read_text().split()]
    assert all(map(runs, children))
    return children


def runs(pid: int) -> bool:
    return any(process.pid == pid for process in processes.running())


def test_each_partition_is_a_slot_that_sees_itself(make_node: MakeNode) -> None:
    node = make_node(accelerator=TWO, env={"GREETING": "hello"})
    status = node.boot()
    assert (status.state, status.simulated, status.error) == ("ready", True, None)
    with node.client() as client:
        workers = node.workers(client)
        assert sorted(workers) == ["n1/0", "n1/1"]
        seen = {slot: on_slot(client, slot, look) for slot in workers}
    for info in status.slots:
        visible, in_program, of_task, threads = seen[info.slot]
        registered = json.loads(json.dumps(workers[info.slot]["skyinfra"]))
        assert info == of_task == InstanceInfo.read(registered)
        assert info.visible == ("CUDA_VISIBLE_DEVICES", info.uuid)
        assert (info.kind, info.profile, info.memory_gb, info.gpu) == ("partition", "3g.40gb", 40.0, 0)
        assert visible == info.uuid
        assert in_program == f"{info.uuid}/{node.path}/hello"
        assert int(threads) >= 1
    assert status.slots[0].uuid != status.slots[1].uuid
    labels = {"slot", "slot:n1/0", "node:n1", "profile:3g.40gb", "accel:H100"}
    assert workers["n1/0"]["resources"] == {**dict.fromkeys(labels, 1.0), "gpu_memory_mb": 40_000.0}
    assert workers["n1/0"]["nthreads"] == 1


@pytest.mark.slow
def test_where_memory_runs_out_tasks_end_before_the_runner(make_node: MakeNode) -> None:
    node = make_node(accelerator=TWO)
    runner = node.boot().pid
    score = ["cat", "/proc/self/oom_score_adj"]
    with node.client() as client:
        of_tasks = {int(on_slot(client, slot, subprocess.check_output, score)) for slot in node.workers(client)}
    assert of_tasks == {500}
    assert int(Path(f"/proc/{runner}/oom_score_adj").read_text()) == int(Path(score[1]).read_text())


def test_boot_again_changes_nothing_and_a_change_touches_only_itself(make_node: MakeNode) -> None:
    layout = h100((("3g.40gb", 0, 4),), (("3g.40gb", 0, 4), ("1g.10gb", 4, 1)))
    node = make_node(accelerator=layout)
    first = node.boot()
    with node.client() as client:
        before = node.pids(client)
        again = node.boot()
        assert (again.pid, again.slots, again.generation) == (first.pid, first.slots, first.generation + 1)
        assert node.pids(client) == before
        node.configure(accelerator=h100((("2g.20gb", 0, 2), ("2g.20gb", 2, 2)), (("3g.40gb", 0, 4), ("1g.10gb", 4, 1))))
        assert node.run("partition", "--check", check=False).returncode == 1
        changed = node.boot()
        assert node.run("partition", "--check").stdout == ""
        assert (changed.pid, changed.scheduler) == (first.pid, first.scheduler)
        after = node.pids(client)
    second_gpu = {s.slot: s.uuid for s in first.slots if s.gpu == 1}
    assert {s.slot: s.uuid for s in changed.slots if s.gpu == 1} == second_gpu, "a running slot keeps its name"
    assert {slot: before[slot] for slot in second_gpu} == {slot: after[slot] for slot in second_gpu}
    assert sorted(s.profile or "" for s in changed.slots if s.gpu == 0) == ["2g.20gb", "2g.20gb"]
    assert sorted(after) == ["n1/0", "n1/1", "n1/2", "n1/3"]


def test_a_killed_worker_returns_as_the_same_slot_without_its_children(make_node: MakeNode, tmp_path: Path) -> None:
    path = tmp_path / "children"
    node = make_node(accelerator=TWO)
    node.boot()
    with node.client() as client:
        before = node.pids(client)
        running = send(client, by_value(wait_beside_children, str(path)), {"slot:n1/1": 1})
        children = started_children(path)
        os.kill(before["n1/1"], signal.SIGKILL)
        until(lambda: not any(map(runs, children)), "what the task had started is gone")
        running.result(timeout=60)
        visible, _, info, _ = on_slot(client, "n1/1", look)
        after = node.pids(client)
    assert (info.slot, visible) == ("n1/1", info.uuid)
    assert after["n1/0"] == before["n1/0"]
    assert after["n1/1"] != before["n1/1"]
    assert node.until("ready").slots[1] == info


def test_a_process_that_is_replaced_in_order_is_no_error_in_the_log(make_node: MakeNode) -> None:
    node = make_node(accelerator=TWO)
    node.boot()
    with node.pool() as pool:
        task = Task(os.getpid, ()).options(fresh=True)
        assert len({pool.submit(task).result(timeout=60) for _ in range(3)}) == 3
    node.stop()
    log = node.directory.log_file.read_text()
    assert "Traceback" not in log and "ERROR" not in log


def test_only_the_fleets_own_clients_are_let_in(make_node: MakeNode) -> None:
    node = make_node(cpu_slots=1)
    address = node.boot().scheduler
    # Connections, and not Dask's whole client, of which much stays behind where it does not get one.
    with pytest.raises(OSError, match=r"Timed out|refused|closed|in transit"):
        asyncio.run(connect(f"tcp://{address}", timeout=2))
    stranger = Credentials.derive(OTHER_SECRET, role="client", name="test").security()
    with pytest.raises(OSError, match=r"certificate|TLS|SSL|Timed out"):
        asyncio.run(connect(f"tls://{address}", timeout=2, **stranger.get_connection_args("client")))
    assert address is not None
    host, port = address.split(":")
    with socket.create_connection((host, int(port)), timeout=10) as plain:
        plain.sendall(b"GET / HTTP/1.0\r\n\r\n")
        with contextlib.suppress(ConnectionResetError):
            assert not plain.recv(100).startswith(b"HTTP")


@pytest.mark.slow
def test_the_secret_is_nowhere_but_in_its_file(make_node: MakeNode) -> None:
    node = make_node(cpu_slots=1)
    status = node.boot()
    assert status.pid is not None
    for process in processes.of_session(status.pid):
        for name in ("cmdline", "environ"):
            assert SECRET.encode() not in Path(f"/proc/{process.pid}/{name}").read_bytes()
    for file in node.path.iterdir():
        if file.is_file() and file.name != "secret":
            assert SECRET not in file.read_text(), file.name


def test_stop_leaves_nothing_even_while_a_task_runs(make_node: MakeNode, tmp_path: Path) -> None:
    node = make_node(cpu_slots=2)
    status = node.boot()
    assert status.pid is not None
    with node.client() as client:
        running = send(client, by_value(wait_beside_children, str(tmp_path / "children")), {"slot": 1})
        children = started_children(tmp_path / "children")
        os.kill(status.pid, signal.SIGTERM)
        until(lambda: not processes.of_session(status.pid or 0), "no process of the node is left", seconds=15)
        running.release()
    assert not any(map(runs, children))
    assert node.directory.holder() is None
    assert (node.status().state, node.status().pid) == ("stopped", None)
    assert node.run("stop").stdout == "no runner serves this node\n"


@pytest.mark.slow
def test_the_port_is_kept_and_refused_where_it_is_taken(make_node: MakeNode) -> None:
    node = make_node(cpu_slots=1)
    address = node.boot().scheduler
    assert address is not None
    port = int(address.rpartition(":")[2])
    # No connection of another program gets it meanwhile.
    assert port < int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    node.run("stop")
    assert node.boot().scheduler == address
    node.run("stop")
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        other.bind(("127.0.0.1", port))
        other.listen()
        refused = node.run("boot", "--detach", check=False)
    assert refused.returncode == 1
    assert f"another process listens on port {port}" in refused.stderr
    assert f"remove {node.directory.scheduler_file}" in refused.stderr
    assert "Traceback" not in refused.stderr
    assert (node.status().state, (node.status().error or ("",))[0]) == ("failed", "PortTaken")
    assert node.directory.holder() is None


@pytest.mark.slow
def test_a_node_whose_layout_is_refused_does_not_come_up(make_node: MakeNode) -> None:
    node = make_node(accelerator=h100((("3g.40gb", 2, 4),)))
    refused = node.run("boot", "--detach", check=False)
    assert refused.returncode == 1
    assert "PartitionFailed" in refused.stderr
    assert "it does not allow 3g.40gb at 2:4" in refused.stderr
    assert node.directory.holder() is None
    assert node.run("status", check=False).returncode == 0


@pytest.mark.slow
def test_a_refused_change_leaves_the_rest_running(make_node: MakeNode) -> None:
    good = (("3g.40gb", 0, 4),)
    node = make_node(accelerator=h100(good, good))
    node.boot()
    with node.client() as client:
        before = node.pids(client)
        node.configure(accelerator=h100(good, (("3g.40gb", 2, 4),)))
        refused = node.run("boot", "--detach", check=False)
        assert refused.returncode == 1
        assert "it does not allow 3g.40gb at 2:4" in refused.stderr
        assert on_slot(client, "n1/0", os.getpid) == before["n1/0"]
        assert node.status().state == "failed"
        node.configure(accelerator=h100(good, good))
        assert node.boot().state == "ready"
        assert node.pids(client)["n1/0"] == before["n1/0"]


@pytest.mark.slow
def test_what_was_refused_is_done_once_it_can_be(make_node: MakeNode) -> None:
    good, other = (("3g.40gb", 0, 4),), (("1g.10gb", 0, 1),)
    node = make_node(accelerator=h100(good, good))
    node.boot()
    driver = SimulatedDriver(h100(good, good), path=node.directory.simulated_file, seed="")
    # A program of somebody else runs on the partition that is to go.
    driver.hold(1, pid=os.getpid(), start=0)
    with node.client() as client:
        before = node.pids(client)
        node.configure(accelerator=h100(good, other))
        refused = node.run("boot", "--detach", check=False)
        assert refused.returncode == 1
        assert "PartitionBusy" in refused.stderr
        assert str(os.getpid()) in refused.stderr
        assert node.status().state == "failed"
        generation = node.status().generation
        driver.hold(1, held=False, pid=os.getpid(), start=0)
        # Nobody asks again.
        status = node.until("ready")
        assert [slot.profile for slot in status.slots] == ["3g.40gb", "1g.10gb"]
        assert (status.error, status.generation) == (None, generation + 1)
        assert on_slot(client, "n1/0", os.getpid) == before["n1/0"]
    log = node.directory.log_file.read_text()
    assert log.count("PartitionBusy: ") == 1, "the same refusal is told once"
    assert "what was refused is done now" in log


@pytest.mark.slow
def test_serve_needs_partitions_that_stand(make_node: MakeNode) -> None:
    node = make_node(accelerator=TWO)
    refused = node.run("serve", check=False)
    assert refused.returncode == 1
    assert "do not stand as declared" in refused.stderr
    events = [json.loads(line) for line in node.run("partition").stdout.splitlines()]
    assert [e["event"] for e in events] == ["partition"] * 3 + ["standing"] * 2
    with node.foreground("serve") as process:
        assert node.until("ready").pid == process.pid
        second = node.run("serve", check=False)
        assert second.returncode == 1
        assert f"another runner (process {process.pid}) serves this node" in second.stderr
        process.terminate()
        assert process.wait(timeout=30) == 0


@pytest.mark.slow
def test_a_worker_node_waits_for_its_head(make_node: MakeNode) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    worker = make_node("n2", head=False, scheduler=address, cpu_slots=1)
    # Long enough for it to ask the head once, also on a machine that does much else.
    late = worker.run("boot", "--detach", "--wait", "15", check=False)
    assert late.returncode == 1
    assert f"the head {address}" in late.stderr
    assert (worker.directory.holder(), worker.status().state) == (None, "stopped")
    head = make_node("n1", scheduler=address, cpu_slots=1)
    with worker.foreground("boot") as process:
        until(lambda: "does not answer" in str(worker.until("serving").error), "the obstacle is in the status")
        head.boot()
        status = worker.until("ready")
        assert (status.scheduler, status.error) == (address, None)
        with head.client() as client:
            assert sorted(head.workers(client)) == ["n1/0", "n2/0"]
            assert on_slot(client, "n2/0", instance_info).head is False
        head.run("stop")
        worker.until("serving")
        head.boot()
        worker.until("ready")
        process.terminate()
        assert process.wait(timeout=30) == 0


@pytest.mark.slow
def test_nodes_of_a_head_at_ipv6_reach_each_other(make_node: MakeNode, ipv6: None) -> None:
    head = make_node("n1", scheduler="[::]:0", cpu_slots=1)
    address = head.boot().scheduler
    assert address is not None and address.startswith("[")
    other = make_node("n2", head=False, scheduler=address, cpu_slots=1)
    other.boot()
    with head.client() as client:
        found = until(lambda: len(each := head.workers(client)) == 2 and each, "both slots are there")
        assert sorted(found) == ["n1/0", "n2/0"]
        assert all(each.startswith("tls://[") for each in client.scheduler_info(n_workers=-1)["workers"])
        assert [on_slot(client, slot, instance_info).slot for slot in found] == list(found)


@pytest.mark.slow
def test_a_worker_of_another_fleet_is_refused(make_node: MakeNode) -> None:
    address = make_node("n1", cpu_slots=1).boot().scheduler
    worker = make_node("n2", secret=OTHER_SECRET, head=False, scheduler=address, cpu_slots=1)
    with worker.foreground("boot"):
        until(lambda: "CredentialsRefused" in str(worker.until("serving").error), "the reason is in the status")
    assert OTHER_SECRET not in worker.directory.status_file.read_text()


@pytest.mark.slow
def test_a_scheduler_that_ends_comes_back(make_node: MakeNode, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "script.py"
    for name, value in inside.environment(script).items():
        monkeypatch.setenv(name, value)
    node = make_node(cpu_slots=1)
    first = node.boot()
    inside.run(first.pid, script, inside.ENDS)
    until(lambda: node.status().generation > first.generation, "the scheduler was started again")
    node.until("ready")
    assert node.status().scheduler == first.scheduler
    with node.client() as client:
        assert on_slot(client, "n1/0", instance_info).slot == "n1/0"


@pytest.mark.slow
def test_packages_and_commands_are_done_once(make_node: MakeNode) -> None:
    node = make_node(cpu_slots=1, run=("echo ran >> ran.txt",))
    node.boot()
    node.boot()
    assert (node.path / "ran.txt").read_text() == "ran\n"
    node.configure(run=("echo ran >> ran.txt", "echo again >> ran.txt"))
    node.boot()
    assert (node.path / "ran.txt").read_text() == "ran\nran\nagain\n"
    node.configure(run=("echo what is wrong; exit 7",))
    failed = node.run("boot", "--detach", check=False)
    assert failed.returncode == 1
    assert "ended with exit code 7: echo what is wrong; exit 7" in failed.stderr
    assert "what is wrong\n" in failed.stderr


def test_an_unwritable_directory_is_named(make_node: MakeNode) -> None:
    node = make_node(cpu_slots=1)
    node.directory.lock_file.mkdir()
    refused = node.run("boot", check=False)
    node.directory.lock_file.rmdir()
    assert refused.returncode == 1
    assert refused.stderr.startswith(
        f"StateDirectoryError: {node.directory.lock_file}: cannot be written: Is a directory"
    )


@pytest.mark.slow
def test_a_node_whose_directory_is_removed_ends(make_node: MakeNode) -> None:
    node = make_node(cpu_slots=2)
    status = node.boot()
    files = {name: (node.path / name).read_text() for name in ("node.json", "secret")}
    shutil.rmtree(node.path)
    # What is made in its place belongs to another runner.
    node.path.mkdir()
    for name, text in files.items():
        (node.path / name).write_text(text)
    until(lambda: not processes.of_session(status.pid or 0), "no process of the node is left")
    assert {file.name for file in node.path.iterdir()} == set(files)
    assert node.boot().pid != status.pid


@pytest.mark.slow
def test_a_status_that_could_not_be_written_is_written_later(make_node: MakeNode) -> None:
    node = make_node(cpu_slots=1)
    pid = node.boot().pid
    assert pid is not None
    file = node.directory.status_file
    file.unlink()
    file.mkdir()
    node.configure(cpu_slots=2)
    with node.client() as client:
        os.kill(pid, signal.SIGHUP)
        until(lambda: len(node.workers(client)) == 2, "the second slot is there")
        until(lambda: "status.json: cannot be written" in node.directory.log_tail(), "the log says so")
    file.rmdir()
    assert len(node.until("ready").slots) == 2


@pytest.mark.slow
def test_a_full_disk_ends_the_first_start_at_once(make_node: MakeNode) -> None:
    node = make_node(cpu_slots=4)
    command = [sys.executable, "-m", "skyinfra.runner", "boot", "--config", str(node.file)]
    size = 800  # the status without slots is smaller, with them larger

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))

    done = subprocess.run(command, stderr=subprocess.PIPE, text=True, timeout=60, check=False, preexec_fn=limit)
    assert done.returncode == 1
    assert f"StateDirectoryError: {node.directory.status_file}: cannot be written: File too large" in done.stderr
    assert node.status().slots == ()
