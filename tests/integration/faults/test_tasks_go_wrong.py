"""What tasks, clients and operators do to a fleet of three nodes, and what the others notice of it: nothing."""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from local_fleets import inside
from namespaces.fleet import RESULT_S, Fleet
from support import ROOT
from tasks_on_nodes.faults import count, die, hold, started_again, starts
from terraform_projects.commands import until

import skyinfra as sky

# The fixture that all share is made once: the tests run in one process.
pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("faults-tasks")]

INNOCENTS = 120
KILLERS = 2
# A node starts a task three times that ends its worker process, see `skyinfra.worker.attempts`.
ATTEMPTS = 3
GIL_S = 40
# The tasks of a client that is killed are ended 5 s after its connection closed, see tests/client/test_client_ends.py
# for the clock of the head. For all else, this is the patience.
ABANDONED_S = 40.0


def test_innocent_tasks_do_not_die_of_their_neighbours(fleet: Fleet, tmp_path: Path) -> None:
    journal, deaths = tmp_path / "innocents", tmp_path / "killers"
    with fleet.connect() as pool:
        tasks = [count(number, str(journal), 0.1) for number in range(INNOCENTS)]
        tasks[10:10] = [die(number, str(deaths)) for number in range(KILLERS)]
        futures = [pool.submit(task) for task in tasks]
        errors = [future.exception(timeout=RESULT_S) for future in futures]
        results = [future.result() for future, error in zip(futures, errors, strict=True) if error is None]
    assert sorted(number for number, _ in results) == list(range(INNOCENTS))
    refused = [error for error in errors if error is not None]
    assert [type(error) for error in refused] == [sky.TaskAttemptsExceeded] * KILLERS
    assert "die ended its worker process 3 times" in str(refused[0])
    assert 0 < len(starts(deaths)) <= KILLERS * ATTEMPTS * len(fleet.nodes)


def test_a_task_that_holds_the_gil_is_neither_restarted_nor_lost(fleet: Fleet, tmp_path: Path) -> None:
    journal, beside = tmp_path / "holds", tmp_path / "beside"
    with fleet.connect() as pool:
        held = pool.submit(hold, 7, str(journal), GIL_S)
        until(lambda: starts(journal))
        [(_, busy)] = starts(journal)
        # The other slots, those of the same node too, go on.
        others = [slot for slot in pool.slots() if slot.slot != busy]
        for number in range(10):
            pool.broadcast(count(number, str(beside), 0.05), slots=others)
        assert len(starts(beside)) == 10 * (fleet.size - 1)
        assert not held.done()
        assert held.result(timeout=RESULT_S) == 7
    assert len(starts(journal)) == 1


def test_nothing_starts_twice_when_a_node_is_drained(fleet: Fleet, tmp_path: Path) -> None:
    journal, after = tmp_path / "journal", tmp_path / "after"
    node = fleet.nodes[2]
    seconds = 0.2
    with fleet.connect() as pool, ThreadPoolExecutor(1) as threads:
        tasks = [count(number, str(journal), seconds) for number in range(INNOCENTS)]
        futures = [pool.submit(task) for task in tasks]
        until(lambda: any(slot.startswith(node.name) for _, slot in starts(journal)))
        drained = threads.submit(node.run, "drain")
        results = [future.result(timeout=RESULT_S) for future in futures]
        drained.result()
        node.wait("drained")
        assert sorted(number for number, _ in results) == list(range(INNOCENTS))
        assert not started_again(journal)
        others = list(pool.map(count, range(24), itertools.repeat(str(after)), itertools.repeat(0.0)))
        assert node.name not in {name for _, name in others}
    node.run("undrain")
    assert len(fleet.settled()) == fleet.size


CLIENT = """
import json, sys, time
from tasks_on_nodes.faults import spin
from skyinfra.client import open_pool
from skyinfra.protocol.manifest import Manifest

pool = open_pool(Manifest.read(json.loads(sys.stdin.readline())))
for number in range(int(sys.argv[2])):
    pool.submit(spin(number, sys.argv[1]))
time.sleep(600)
"""


def test_the_tasks_of_a_client_that_dies_end(fleet: Fleet, tmp_path: Path) -> None:
    journal, stopped = tmp_path / "journal", tmp_path / "journal.stopped"
    topics = kept_topics(fleet, tmp_path)
    client = subprocess.Popen(
        [sys.executable, "-c", CLIENT, str(journal), str(2 * fleet.size)],
        env={**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests' / 'helpers'}"},
        stdin=subprocess.PIPE,
        text=True,
    )
    try:
        client.stdin.write(fleet.manifest_json() + "\n")
        client.stdin.flush()
        until(lambda: len(starts(journal)) == fleet.size, seconds=RESULT_S)
        client.send_signal(signal.SIGKILL)
    finally:
        client.kill()
        client.communicate()
    until(lambda: len(starts(stopped)) == fleet.size, seconds=ABANDONED_S)
    assert len(starts(journal)) == fleet.size, "what waited in the client never starts"
    assert len(fleet.settled()) == fleet.size
    # What the fleet had to tell that client is not kept: there will be many clients.
    until(lambda: kept_topics(fleet, tmp_path) <= topics)


def kept_topics(fleet: Fleet, folder: Path) -> set[str]:
    """The clients of ours of which the head keeps events."""
    made = folder / "topics.json"
    made.unlink(missing_ok=True)
    script = f"""
import json, pathlib
topics = [name for name in scheduler._broker._topics if name.startswith("skyinfra-")]
path = pathlib.Path({str(made)!r})
path.with_suffix(".new").write_text(json.dumps(topics))
path.with_suffix(".new").replace(path)
"""
    inside.run(fleet.head.pid, fleet.head.script, script)
    until(made.exists)
    return set(json.loads(made.read_text()))
