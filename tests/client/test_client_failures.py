"""What a fleet may do to a task, and what the client says about it."""

from __future__ import annotations

import concurrent.futures
import contextlib
import ctypes
import dataclasses
import json
import operator
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
from support import python_path
from tornado.iostream import IOStream

import skyinfra as sky
from skyinfra.client import lookup, open_pool, open_questions
from skyinfra.protocol.manifest import Endpoint
from skyinfra.submission import connection
from skyinfra.tasks import Task


@sky.compute
def die_until(path: str, deaths: int) -> int:
    """Ends its worker process *deaths* times; then gives the number of its starts."""
    with open(path, "a") as file:  # noqa: PTH123
        file.write(".")
        starts = file.tell()
    if starts <= deaths:
        os.kill(os.getpid(), signal.SIGKILL)
    return starts


@sky.compute
def spin(path: str) -> None:
    """Runs until it is stopped; leaves a file when it starts and another one when it may clean up."""
    try:
        Path(path).touch()
        while True:
            time.sleep(0.02)
    except KeyboardInterrupt:
        Path(path + ".stopped").touch()
        raise


@sky.compute
def hang(path: str) -> None:
    """Blocks in native code, where no signal wakes it."""
    Path(path).write_text(str(os.getpid()))
    library, mutex = ctypes.CDLL(None), ctypes.create_string_buffer(64)
    for _ in range(2):
        library.pthread_mutex_lock(mutex)


def identity(x: int) -> int:
    return x


# Worker processes ---------------------------------------------------------------------------------------------------


def test_a_task_whose_worker_dies_starts_again(pool, tmp_path):
    assert die_until(str(tmp_path / "starts"), 1) >> pool == 2


def test_a_pinned_task_waits_for_its_slot_to_come_back(pool, tmp_path):
    first = pool.slots()[:1]
    assert pool.broadcast(die_until(str(tmp_path / "starts"), 1), slots=first) == [2]


def test_a_task_that_always_ends_its_worker_is_given_up_and_others_finish(pool, tmp_path, fleet):
    killer = pool.submit(die_until(str(tmp_path / "starts"), 1000))
    assert list(pool.map(identity, range(100), ordered=False)) != []
    assert sorted(pool.map(identity, range(20), ordered=False)) == list(range(20))
    with pytest.raises(sky.TaskAttemptsExceeded, match="die_until ended its worker process 3 times"):
        killer.result(timeout=60)
    assert (tmp_path / "starts").stat().st_size <= 2 * 3  # three on each of two nodes
    assert sorted(pool.map(identity, range(20))) == list(range(20))


def test_the_count_of_attempts_is_forgotten_when_a_task_ends(pool, tmp_path, fleet):
    def counted(path: str) -> list[str]:
        return [name for name in os.listdir(path) if "counted" in name]  # noqa: PTH208

    # Those of other tests stand beside it, and may end meanwhile.
    attempts = fleet.root / "n0" / "attempts"
    (inside,) = pool.broadcast(Task(counted, (str(attempts),)), slots=pool.slots()[:1])
    assert len(inside) == 1 and not (attempts / inside[0]).exists()
    before = set(attempts.glob("*"))
    assert pool.broadcast(die_until(str(tmp_path / "starts"), 1), slots=pool.slots()[:1]) == [2]
    assert set(attempts.glob("*")) <= before


@pytest.mark.slow
def test_a_node_directory_that_cannot_be_written_is_named(pool, fleet, wait_until):
    name = pool.slots()[0].slot
    attempts = fleet.root / "n0" / "attempts"
    Task(os.getpid) @ pool
    for file in attempts.glob("*"):
        file.unlink()
    attempts.rmdir()
    attempts.write_text("not a folder")
    try:
        with open_pool(fleet.manifest, patience=3) as bound:
            with pytest.raises(sky.SlotLost, match=r"n0 is sick: 1 slot: .*attempts"):
                bound.submit(Task(os.getpid).options(slot=name)).result(timeout=60)
            # Bound to no slot, it goes to another one.
            assert bound.submit(os.getpid).result(timeout=60) > 0
    finally:
        attempts.unlink()
    wait_until(lambda: len(pool.slots()) == 4)


# Stopping -----------------------------------------------------------------------------------------------------------


def test_cancel_stops_a_running_task_and_its_slot_is_free_again(pool, tmp_path, wait_until):
    pids = Task(os.getpid) @ pool
    started = tmp_path / "spin"
    future = pool.submit(spin, str(started))
    wait_until(started.exists)
    assert future.cancel()
    wait_until((tmp_path / "spin.stopped").exists)
    with pytest.raises(concurrent.futures.CancelledError):
        future.result()
    assert future.cancelled()
    assert Task(os.getpid) @ pool == pids  # the process lives and the slot is free


@pytest.mark.slow
def test_cancel_kills_what_cannot_be_interrupted(pool, tmp_path, wait_until):
    started = tmp_path / "hang"
    future = pool.submit(hang, str(started))
    wait_until(lambda: started.exists() and started.read_text())
    pid = int(started.read_text())
    future.cancel()
    wait_until(lambda: not _alive(pid))
    assert len(Task(os.getpid) @ pool) == 4


def test_a_task_that_was_cancelled_before_it_started_never_starts(pool, tmp_path, wait_until):
    running = [pool.submit(spin, str(tmp_path / f"spin{i}")) for i in range(4)]
    wait_until(lambda: all((tmp_path / f"spin{i}").exists() for i in range(4)))
    queued = pool.submit(spin, str(tmp_path / "queued"))
    queued.cancel()
    for future in running:
        future.cancel()
    Task(os.getpid) @ pool
    assert not (tmp_path / "queued").exists()


def test_closing_the_pool_stops_what_it_started(fleet, tmp_path, wait_until):
    with open_pool(fleet.manifest) as pool:
        pool.submit(spin, str(tmp_path / "spin"))
        wait_until((tmp_path / "spin").exists)
    wait_until((tmp_path / "spin.stopped").exists)


def test_the_first_failure_of_a_broadcast_cancels_the_others(pool, tmp_path, wait_until):
    with pytest.raises(ValueError, match="n1/0"):
        Task(_one_fails, (str(tmp_path),)) @ pool
    wait_until(lambda: len(list(tmp_path.glob("*.stopped"))) == 3)


def _one_fails(folder: str) -> None:
    slot = sky.instance_info().slot
    if slot == "n1/0":
        while len(os.listdir(folder)) < 3:  # noqa: PTH208
            time.sleep(0.02)
        raise ValueError(slot)
    spin(f"{folder}/{slot.replace('/', '-')}")


CTRL_C = """
import json, sys
import skyinfra as sky
from skyinfra.client import lookup, open_pool, open_questions
from skyinfra.submission import connection
from skyinfra.protocol.manifest import Manifest

def spin(path):
    import pathlib, time
    try:
        pathlib.Path(path).touch()
        while True:
            time.sleep(0.02)
    finally:
        pathlib.Path(path + ".stopped").touch()

with open_pool(Manifest.read(json.loads(sys.stdin.readline()))) as pool:
    sky.compute(spin)(sys.argv[1]) >> pool
"""


def test_ctrl_c_ends_the_client_and_the_task(fleet, tmp_path, wait_until):
    started = tmp_path / "spin"
    process = subprocess.Popen(
        [sys.executable, "-c", CTRL_C, str(started)],
        env={**os.environ, "PYTHONPATH": python_path()},
        stdin=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    process.stdin.write(json.dumps(fleet.manifest.to_json()) + "\n")
    process.stdin.flush()
    wait_until(started.exists)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == -signal.SIGINT
    assert errors.rstrip().endswith("KeyboardInterrupt\nspin was cancelled.")
    assert "distributed" not in errors
    wait_until((tmp_path / "spin.stopped").exists)


# Slots and heads ----------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_slot_that_stays_away_is_lost(fleets):
    fleet = fleets(promised=3)
    with (
        open_pool(fleet.manifest, patience=1) as pool,
        pytest.raises(sky.SlotLost, match=r"slot n[01]/2, which getpid waits for, is gone"),
    ):
        Task(os.getpid) @ pool


def test_leaving_a_head_that_does_not_answer_leaves_nothing_open(fleet, monkeypatch):
    def lost(self, name):
        async def call(**request):
            raise OSError("the connection is gone")

        return call

    pool = open_pool(fleet.manifest)
    client = pool._fleet.connection.client
    assert Task(os.getpid) >> pool
    monkeypatch.setattr(type(client.scheduler), "__getattr__", lost)
    pool.close()
    assert (client.status, client.rpc.open) == ("closed", 0)


@pytest.mark.slow
def test_a_fleet_without_slots_is_not_waited_for(fleets):
    fleet = fleets(nodes=())
    with open_pool(fleet.manifest, patience=1) as pool, pytest.raises(sky.SlotLost, match="every slot of stack/pool"):
        Task(os.getpid) >> pool


def test_a_head_that_is_gone_is_noticed_while_waiting(fleets, tmp_path, wait_until, capfd):
    fleet = fleets(slots=1)
    with open_pool(fleet.manifest, timeout=2, patience=2) as pool:
        future = pool.submit(spin, str(tmp_path / "spin"))
        wait_until((tmp_path / "spin").exists)
        fleet.kill()
        with pytest.raises(sky.FleetUnreachable, match=str(fleet.manifest.head.port)):
            future.result(timeout=60)
        with pytest.raises(sky.FleetUnreachable):
            pool.slots()
    assert capfd.readouterr().err == ""


def test_a_task_outlives_a_head_that_restarts(fleets, tmp_path, wait_until):
    fleet = fleets(slots=1)
    path = tmp_path / "starts"
    with open_pool(fleet.manifest) as pool:
        future = pool.submit(spin_once, str(path))
        wait_until(lambda: path.exists() and path.read_text())
        fleet.kill()
        fleets(slots=1, port=fleet.manifest.head.port)
        assert future.result(timeout=60) == 2
        assert len(pool.slots()) == 2


def test_a_connection_that_breaks_is_made_again_and_the_task_runs_on(pool, tmp_path, wait_until):
    future = pool.submit(run_until_gate, str(tmp_path / "starts"), str(tmp_path / "gate"))
    wait_until((tmp_path / "starts").exists)
    client = pool._fleet.connection.client
    broken = client.scheduler_comm
    pool._fleet.loop._loop.call_soon_threadsafe(broken.abort)
    wait_until(lambda: client.status == "running" and client.scheduler_comm is not broken)
    (tmp_path / "gate").touch()
    assert future.result(timeout=60) == "done"
    assert pool.submit(identity, 3).result(timeout=60) == 3


def test_an_outcome_whose_event_is_lost_is_fetched(pool, tmp_path):
    """The connection broke when the task ended: the event found nobody who listened."""
    pool._fleet.loop._loop.call_soon_threadsafe(pool._fleet.connection.client.unsubscribe_topic, pool._fleet.topic)
    path = tmp_path / "starts"
    assert pool.submit(count_starts, str(path)).result(timeout=60) == 1
    with pytest.raises(ZeroDivisionError):
        pool.submit(operator.truediv, 1, 0).result(timeout=60)


def count_starts(path: str) -> int:
    with open(path, "a") as file:  # noqa: PTH123
        file.write(".")
        return file.tell()


def run_until_gate(started: str, gate: str) -> str:
    Path(started).touch()
    while not Path(gate).exists():
        time.sleep(0.02)
    return "done"


def spin_once(path: str) -> int:
    """Runs for ever when it is started for the first time."""
    with open(path, "a") as file:  # noqa: PTH123
        file.write(".")
        starts = file.tell()
    while starts == 1:
        time.sleep(0.02)
    return starts


# Connecting ---------------------------------------------------------------------------------------------------------


def test_another_secret_is_refused_and_not_shown(fleet):
    wrong = "f" * 64
    with pytest.raises(sky.CredentialsRefused, match="has another fleet secret") as caught:
        open_pool(dataclasses.replace(fleet.manifest, secret=wrong))
    assert wrong not in str(caught.value)
    assert fleet.manifest.secret not in str(caught.value)


def test_a_secret_that_is_none_is_an_invalid_manifest(fleet):
    with pytest.raises(sky.InvalidManifest, match=r"manifest\.secret: a fleet secret has at least 32") as caught:
        open_pool(dataclasses.replace(fleet.manifest, secret="hunter2"))
    assert "hunter2" not in str(caught.value)


@pytest.fixture
def closed() -> Iterator[Endpoint]:
    """A port that refuses connections."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield Endpoint(*taken.getsockname())


def test_a_head_that_is_not_there_is_named(fleet, closed):
    manifest = dataclasses.replace(fleet.manifest, head=closed)
    refused = rf"does not answer at tls://127\.0\.0\.1:{closed.port}: Connection refused"
    with pytest.raises(sky.FleetUnreachable, match=rf"{refused}\n.*skyinfra deploy"):
        open_pool(manifest, timeout=0.5)
    with pytest.raises(sky.FleetUnreachable, match=rf"{refused}\n.*systemd starts again.*skyinfra ssh stack/pool"):
        open_pool(dataclasses.replace(manifest, provider="aws"), timeout=0.5)
    nowhere = dataclasses.replace(manifest, provider="aws", head=Endpoint("no.such.host.invalid", 1))
    with pytest.raises(sky.FleetUnreachable, match="allow_cidrs"):
        open_pool(nowhere, timeout=0.5)


@pytest.mark.parametrize("connect", [sky.connect, partial(open_questions, timeout=3600)], ids=["connect", "questions"])
def test_a_head_whose_port_is_closed_is_not_waited_for(fleet, closed, monkeypatch, connect):
    monkeypatch.setattr(lookup, "_TIMEOUT_S", 3600.0)
    with pytest.raises(sky.FleetUnreachable, match=r"the head of stack/pool does not answer.*Connection refused"):
        connect(dataclasses.replace(fleet.manifest, head=closed))


@pytest.mark.slow
def test_a_head_that_starts_again_is_waited_for_where_a_timeout_is_given(fleets):
    fleet = fleets(nodes=())
    fleet.kill()
    with concurrent.futures.ThreadPoolExecutor() as threads:
        connecting = threads.submit(sky.connect, fleet.manifest, timeout=60)
        # Longer than a closed port is waited for otherwise.
        time.sleep(3 * connection._REFUSED_S)
        fleets(nodes=(), port=fleet.manifest.head.port)
        connecting.result(timeout=60).close()


@pytest.mark.slow
def test_a_head_without_a_port_is_not_deployed_yet(fleet):
    with pytest.raises(sky.FleetUnreachable, match="has no port yet"):
        open_pool(dataclasses.replace(fleet.manifest, head=Endpoint("127.0.0.1", 0)))


def test_what_does_not_speak_tls_is_not_a_fleet(fleet):
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer() -> None:
            connection, _ = server.accept()
            with connection, contextlib.suppress(ConnectionError):
                connection.recv(1)
                connection.sendall(b"HTTP/1.0 400 Bad Request\r\n\r\n")
                while connection.recv(65536):
                    pass

        thread = threading.Thread(target=answer)
        thread.start()
        manifest = dataclasses.replace(fleet.manifest, head=Endpoint("127.0.0.1", server.getsockname()[1]))
        with pytest.raises(sky.FleetUnreachable, match="does not speak TLS"):
            open_pool(manifest)
        thread.join()


def test_what_hangs_up_before_the_handshake_is_not_a_fleet(fleet, monkeypatch):
    handshake = IOStream.start_tls

    def too_late(stream, *args, **kwargs):
        stream.close()
        return handshake(stream, *args, **kwargs)

    monkeypatch.setattr(IOStream, "start_tls", too_late)
    with pytest.raises(sky.FleetUnreachable, match="does not speak TLS"):
        open_pool(fleet.manifest)


@pytest.mark.parametrize(("what", "claim"), [("Python", "3.9.1.final.0"), ("distributed", "2024.1.0")])
def test_other_versions_are_refused_with_both_named(fleets, what, claim):
    import distributed

    fleet = fleets(nodes=(), claims={what.lower(): claim})
    ours = distributed.__version__ if what == "distributed" else f"3.{sys.version_info.minor}"
    theirs = claim if what == "distributed" else "3.9"
    with pytest.raises(sky.VersionMismatch, match=f"run {what} {theirs}, this client {ours}"):
        open_pool(fleet.manifest)


def test_a_fleet_of_another_version_of_skyinfra_is_refused_with_what_to_do(fleets):
    fleet = fleets(nodes=(), claims={"skyinfra": 1})
    refused = r"stack/pool: its head speaks version 1 of the protocol, this client version 2\n.*upgrade stack/pool"
    with pytest.raises(sky.VersionMismatch, match=refused):
        open_pool(fleet.manifest)


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
