"""Fleets that have lost their nodes, with a real Terraform: clouds of the mock bed, and two places of this machine.

Complaints about such recoveries elsewhere stand beside the tests.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
from booted_nodes.podman import NODE, WHEELS, Engine
from cloud_modules.failing_clouds import AMAZON, EAST, GOOGLE_MACHINE, ZONE_A, ZONE_B, Deploys, exhausted
from terraform_projects.commands import environment, processes, skyinfra, until

import skyinfra as sky
from skyinfra.failover import watching
from skyinfra.failover.deploying import Failover
from skyinfra.failover.watching import Look, Seen, look, lost
from skyinfra.terraform.stores import Store, local_store
from skyinfra.terraform.synthesized import SynthesizedStack

QUARTER = 900.0


@pytest.fixture
def store(deploys: Deploys) -> Store:
    return local_store(deploys.project, "s")


def looked(stack: SynthesizedStack, store: Store, *, ago: float = 2 * QUARTER, **seen: Any) -> Look:
    """A look at the fleet, of which nothing has answered for *ago* seconds."""
    Seen(since=time.time() - ago, **seen).write(store, "t")
    return look(stack, "t", store)


def taken_back(deploys: Deploys) -> None:
    """All machines are gone, which Terraform has not seen."""
    for kind in deploys.machines():
        for name in deploys.bed.world.existing(kind):
            (deploys.bed.world.folder / name).unlink()


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing answers at the addresses of the bed, which takes as long as is waited for."""
    monkeypatch.setattr(watching, "_CONNECT_S", 0.5)


def test_a_fleet_whose_machines_were_taken_back_goes_to_the_next_place(deploys: Deploys, store: Store) -> None:
    """github.com/skypilot-org/skypilot/issues/10021: back in the region where it was preempted."""
    assert deploys.failover().deploy() is not None
    taken_back(deploys)
    failover = deploys.failover()
    now = look(failover.stack, "t", store)
    assert now.silent and now.seen.since is not None and lost(failover.stack, now, QUARTER)[0] is None
    assert Seen.read(store, "t") == now.seen, "the next look may be that of another machine"
    loss, why = lost(failover.stack, looked(failover.stack, store), QUARTER)
    assert (loss, why) == ("away", "1 of 1 machine gone, its head silent for 30 minutes")
    assert failover.leave("t", why)
    assert failover.deploy() is not None
    assert deploys.machines() == {GOOGLE_MACHINE: 1} and deploys.modules() == {"t__gcp-us-central1-us-central1-b-p"}
    found = deploys.choice()
    assert found["place"] == ZONE_B and [each["cause"] for each in found["refused"]] == ["NodesLost"]
    assert deploys.asked == [f"t: go on with {ZONE_B}, a2-highgpu-8g, at $29.39/h in place of $29.39/h?"]
    # Where it is lost again, the first place is passed over still.
    taken_back(deploys)
    again = deploys.failover()
    assert again.leave("t", why) and deploys.choice()["place"] == EAST
    assert again.deploy() is not None and deploys.machines() == {GOOGLE_MACHINE: 1}


@pytest.mark.slow
def test_a_head_that_cannot_be_reached_from_here_moves_nothing(deploys: Deploys, store: Store) -> None:
    """github.com/skypilot-org/skypilot/issues/10157: a healthy job cancelled for a fault of the network."""
    assert deploys.failover().deploy() is not None
    stack = deploys.synthesize()
    loss, why = lost(stack, looked(stack, store), QUARTER)
    assert loss is None and why.startswith("its machines run: look at its nodes") and why.endswith("way from here")
    # Nor do nodes without a slot whose machines run: they boot, or are sick, which a deploy knows.
    no_slot = Look("t", Seen(since=time.time() - 2 * QUARTER), "no slot is there")
    assert lost(stack, no_slot, QUARTER) == (None, "its machines run: look at its nodes, `skyinfra doctor`")


@pytest.mark.slow
@pytest.mark.parametrize("seen", [{"ends": "stops at 12:00 UTC: idle for 30 min"}, {}])
def test_nodes_that_have_ended_themselves_stay_gone(deploys: Deploys, store: Store, seen: dict[str, Any]) -> None:
    """github.com/skypilot-org/skypilot/issues/6133: jobs that were done began again after the fleet stopped itself."""
    deploys.places, deploys.pool = sky.AWS, {"stop_after_idle": "30m"}
    assert deploys.failover().deploy() is not None
    taken_back(deploys)
    stack = deploys.synthesize()
    assert lost(stack, looked(stack, store, **seen), QUARTER)[0] is None
    if not seen:  # jobs waited, and its head said nothing of an end: it was taken back
        assert lost(stack, looked(stack, store, waits=True), QUARTER)[0] == "away"


@pytest.mark.slow
def test_a_fleet_that_has_lost_some_machines_is_brought_back_where_it_is(deploys: Deploys, store: Store) -> None:
    """github.com/skypilot-org/skypilot/issues/3907: all nodes made anew for one that was preempted."""
    deploys.nodes = 2
    deploys.places = lambda: [sky.GCP(project="p", zones=["us-central1-a", "us-central1-b"], group=False), sky.AWS()]
    assert deploys.failover().deploy() is not None
    (deploys.bed.world.folder / next(iter(deploys.bed.world.existing(GOOGLE_MACHINE)))).unlink()
    stack = deploys.synthesize()
    loss, why = lost(stack, looked(stack, store), QUARTER)
    assert (loss, why) == ("again", "1 of 2 machines gone, its head silent for 30 minutes")


@pytest.mark.slow
def test_a_group_whose_head_alone_is_gone_stays_where_it_is(deploys: Deploys, store: Store) -> None:
    deploys.nodes, deploys.pool = 2, {"spot": True}
    deploys.places = lambda: [sky.GCP(project="p", zones=["us-central1-a"]), sky.AWS()]
    assert deploys.failover().deploy() is not None
    taken_back(deploys)
    stack = deploys.synthesize()
    loss, why = lost(stack, looked(stack, store), QUARTER)
    assert (loss, why) == ("again", "1 of 2 machines gone, its head silent for 30 minutes")


@pytest.mark.slow
def test_without_another_place_it_is_made_anew_where_it_was(deploys: Deploys, store: Store) -> None:
    deploys.places = lambda: sky.GCP(project="p", zones=["us-central1-a"])
    assert deploys.failover().deploy() is not None
    taken_back(deploys)
    failover = deploys.failover()
    assert failover.leave("t", "no nodes") and failover.deploy() is not None
    assert deploys.machines() == {GOOGLE_MACHINE: 1} and deploys.asked == ["t: no nodes. Make it anew?"]


@pytest.mark.slow
def test_every_place_having_lost_it_the_last_one_is_tried_again(deploys: Deploys, store: Store) -> None:
    """github.com/runs-on/runs-on/issues/337: what goes on elsewhere is taken back there, too."""
    deploys.places = lambda: sky.GCP(project="p", zones=["us-central1-a", "us-central1-b"])
    assert deploys.failover().deploy() is not None
    for _ in range(2):
        taken_back(deploys)
        failover = deploys.failover()
        assert failover.leave("t", "no nodes") and failover.deploy() is not None
    assert deploys.asked[-1].startswith("t: no nodes, and no other place is free. Make it anew at gcp us-central1")
    assert deploys.machines() == {GOOGLE_MACHINE: 1} and deploys.choice()["place"] == ZONE_B


@pytest.mark.slow
@pytest.mark.parametrize("at", ["_remove", "synthesize"])
def test_a_process_that_is_killed_while_a_fleet_moves(deploys: Deploys, store: Store, at: str) -> None:
    class Killed(BaseException):
        pass

    def killed(*_: object) -> Any:
        raise Killed

    assert deploys.failover().deploy() is not None
    taken_back(deploys)
    failover = deploys.failover()
    setattr(failover, at, killed)
    with pytest.raises(Killed):
        failover.leave("t", "no nodes")
    assert deploys.choice()["place"] == ZONE_B
    # What `skyinfra watch` does then: a deploy, and nothing else.
    assert deploys.failover().deploy() is not None
    assert deploys.machines() == {GOOGLE_MACHINE: 1} and deploys.modules() == {"t__gcp-us-central1-us-central1-b-p"}


@pytest.mark.slow
def test_who_says_no_keeps_the_place(deploys: Deploys, store: Store) -> None:
    assert deploys.failover().deploy() is not None
    taken_back(deploys)
    deploys.answer = False
    begun: list[bool] = []
    file = deploys.project / "skyinfra.places.json"
    assert not deploys.failover().leave("t", "no nodes", lambda: begun.append(file.exists()))
    assert not file.exists() and begun == []
    deploys.answer = True
    # What is done is written down before it is: who is killed in between goes on.
    assert deploys.failover().leave("t", "no nodes", lambda: begun.append(file.exists()))
    assert file.exists() and begun == [False]


@pytest.mark.slow
def test_a_file_of_places_that_was_not_committed_moves_nothing_back(deploys: Deploys, store: Store) -> None:
    deploys.bed.world.fail(exhausted("us-central1-a"))
    assert deploys.failover().deploy() is not None and deploys.choice()["place"] == ZONE_B
    deploys.failover().refuse_elsewhere()
    (deploys.project / "skyinfra.places.json").unlink()
    with pytest.raises(sky.FleetError, match=f"has it at {ZONE_A}, and its nodes are at {ZONE_B}"):
        deploys.failover().refuse_elsewhere()


@pytest.mark.slow
def test_a_cloud_that_refuses_while_a_fleet_moves_is_passed_over(deploys: Deploys, store: Store) -> None:
    """github.com/skypilot-org/skypilot/pull/1610: preempted while it was set up, and given up."""
    assert deploys.failover().deploy() is not None
    taken_back(deploys)
    deploys.bed.world.fail(*map(exhausted, ("us-central1-b", "us-east1-b")))
    failover: Failover = deploys.failover()
    assert failover.leave("t", "no nodes") and failover.deploy() is not None
    assert deploys.choice()["place"] == AMAZON
    assert [each["cause"] for each in deploys.choice()["refused"]] == ["NodesLost", *["CapacityUnavailable"] * 2]


@pytest.mark.parametrize(("problem", "said"), [("no capacity", "no slot is there: no capacity"), (None, "")])
def test_an_elastic_pool_is_lost_where_its_head_says_why_no_node_comes(
    deploys: Deploys, problem: str | None, said: str
) -> None:
    size = SimpleNamespace(wanted=2, problem=problem, why="2 tasks wait for a slot")
    now: Any = SimpleNamespace(slots=(), draining=(), state=SimpleNamespace(failed={}, size=size))
    assert watching._empty(now) == said
    deploys.places, deploys.pool = sky.AWS, {"nodes": sky.Range(0, 4)}
    found = Look("t", Seen(since=time.time() - 2 * QUARTER), said)
    assert lost(deploys.synthesize(), found, QUARTER) == ("away", "no slot for 30 minutes")


def test_what_was_begun_goes_on_and_is_not_tried_again_at_once(deploys: Deploys, store: Store) -> None:
    stack = deploys.synthesize()
    for since, loss in ((0.0, "again"), (time.time(), None)):
        Seen(since=since, loss="again").write(store, "t")
        assert lost(stack, look(stack, "t", store), QUARTER)[0] == loss


def test_what_cannot_be_read_of_an_earlier_look_is_nothing(store: Store, deploys: Deploys) -> None:
    folder = deploys.project / ".skyinfra" / ".jobs" / "s" / "t"
    folder.mkdir(parents=True)
    for text in ("", "{", "[]", "{}", '{"version": 9}', '{"version": 1, "other": 2}'):
        (folder / "watch.json").write_text(text)
        assert Seen.read(store, "t") == Seen()
    (folder / "watch.json").write_text(
        json.dumps({"version": 1, "since": 5.0, "ends": "", "waits": True, "loss": None})
    )
    assert Seen.read(store, "t") == Seen(5.0, waits=True)


# Two places of this machine ------------------------------------------------------------------------------------------

PROGRAM = """
import skyinfra as sky
from cdktf import App
app = App()
sky.FleetStack(app, "here", pools=[sky.ComputePool(
    name="cpu", provider=[sky.Container(engine="podman", image="{image}", network="host"), sky.Local()],
    worker=sky.Worker(concurrency=2), image=sky.Image(wheelhouse="{wheels}"))])
app.synth()
"""
# Saves each of its steps at an address, as in a bucket, and begins at the one after the last.
TRAIN = """
import sys, time, urllib.request

address, steps = sys.argv[1], int(sys.argv[2])
begun = int(urllib.request.urlopen(address).read() or -1) + 1
print("begins at", begun, flush=True)
for step in range(begun, steps):
    urllib.request.urlopen(urllib.request.Request(address, data=str(step).encode(), method="PUT"))
    time.sleep(0.25)
print("trained", steps, flush=True)
"""


class Saved(BaseHTTPRequestHandler):
    """The steps that were saved."""

    steps: ClassVar[list[int]] = []

    def do_GET(self) -> None:
        self._answer(str(self.steps[-1]).encode() if self.steps else b"")

    def do_PUT(self) -> None:
        self.steps.append(int(self.rfile.read(int(self.headers["Content-Length"]))))
        self._answer(b"")

    def _answer(self, body: bytes) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@pytest.mark.slow
@pytest.mark.xdist_group("containers")
def test_a_job_goes_on_elsewhere_with_the_steps_that_it_has_saved(
    engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """github.com/dstackai/dstack/issues/2917: a lost machine is asked for ever; pull/1285: who waits goes on."""
    for name, value in engine.environment.items():
        monkeypatch.setenv(name, value)
    (tmp_path / "cdktf.json").write_text(json.dumps({"app": "python main.py"}))
    (tmp_path / "main.py").write_text(PROGRAM.format(image=NODE, wheels=WHEELS))
    (tmp_path / "train.py").write_text(TRAIN)
    server = ThreadingHTTPServer(("127.0.0.1", 0), Saved)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    address, steps = f"http://127.0.0.1:{server.server_port}/", 80
    skyinfra(tmp_path, "deploy", "--auto-approve")
    began: list[subprocess.Popen[str]] = []

    def start(*arguments: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "skyinfra.cli", *arguments]
        pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        began.append(subprocess.Popen(command, cwd=tmp_path, env=environment(), text=True, **pipes))
        return began[-1]

    try:
        skyinfra(tmp_path, "run", "here/cpu", "--detach", "--name", "train", "train.py", address, str(steps))
        watcher = start("watch", "here", "--lost-after", "5s", "--every", "1s", "--auto-approve")
        waiting = start("jobs", "result", "here/cpu", "train", "--patience", "5m")
        kept = tmp_path / ".skyinfra" / ".jobs" / "here" / "cpu"
        until(lambda: len(Saved.steps) > 10 and [*kept.glob("*/submission.json")])
        engine.run("rm", "--force", "--time", "0", *engine.run("ps", "-q").split())
        assert waiting.wait(240) == 0, waiting.stdout.read() if waiting.stdout else ""
        watcher.send_signal(signal.SIGINT)
        said = watcher.communicate(timeout=60)[0]
        assert "1 of 1 machine gone" in said and "is back at local; jobs that go on: train" in said, said
        assert "waiting for it, or for one in its place" in (waiting.stdout.read() if waiting.stdout else "")
        logs = skyinfra(tmp_path, "jobs", "logs", "here/cpu", "train").stdout
        first = int(logs.split()[2])
        assert first > 10 and logs.endswith(f"trained {steps}\n")
        assert Saved.steps == list(range(steps)), "each step once"
        listed = json.loads(skyinfra(tmp_path, "jobs", "here/cpu", "--json").stdout)["jobs"]
        assert [(each["name"], each["state"], each["repeated"]) for each in listed] == [
            ("train", "done", "the fleet that it ran on is gone")
        ]
        assert engine.left() == []
    finally:
        for each in began:
            each.kill()
            each.communicate()
        skyinfra(tmp_path, "destroy", "--auto-approve")
        server.shutdown()
        server.server_close()
    assert processes(tmp_path) == []
