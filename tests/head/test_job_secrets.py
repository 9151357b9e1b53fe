"""Secrets of jobs: the head has them in its memory; one that starts anew waits for somebody who gives them again."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Callable
from pathlib import Path

import pytest
from checks.leaks import files_with, processes_with
from journals import heads
from journals.samples import IDENTITY
from local_fleets.running_node import BIG, RunningNode, h100, until
from tasks_on_nodes.jobs import manifest_of, starts, wait_for

import skyinfra as sky
from skyinfra.client import ask, connect, detach_script, open_pool
from skyinfra.head import queue
from skyinfra.protocol import failures, questions, services
from skyinfra.protocol.calls import Header, Outcome, SecretUse
from skyinfra.tasks import Task

MakeNode = Callable[..., RunningNode]


@pytest.fixture
def secret(monkeypatch: pytest.MonkeyPatch) -> str:
    value = f"t0p-{uuid.uuid4().hex}"
    monkeypatch.setenv("A_TOKEN", value)
    return value


@sky.compute(secrets=["A_TOKEN"])
def hold(path: str) -> int:
    print("begins with", os.environ["A_TOKEN"], flush=True)
    wait_for(path)
    return len(os.environ["A_TOKEN"])


@sky.compute(secrets=["A_TOKEN"])
def fail() -> None:
    raise ValueError(f"no such token: {os.environ['A_TOKEN']}")


@sky.compute(secrets=["A_TOKEN"])
def give_away() -> dict[str, str]:
    return dict(os.environ)


@sky.compute
def where() -> tuple[str, int]:
    return sky.instance_info().node, len(os.environ["HUB"])


def boot(node: RunningNode) -> None:
    """Boots it from a shell that has no secret, as a cloud does."""
    with pytest.MonkeyPatch.context() as without:
        without.delenv("A_TOKEN", raising=False)
        node.boot()


def kill(head: RunningNode) -> None:
    pid = head.status().pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)


def test_a_job_waits_for_its_secret_after_its_head_was_killed(
    make_node: MakeNode, tmp_path: Path, secret: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    head = make_node("n1", accelerator=h100(BIG[:1]))
    boot(head)
    path = tmp_path / "run"
    with head.pool() as pool:
        job = pool.submit(hold(str(path)), detach="holds")
        failed = pool.submit(fail(), detach="fails")
        given = pool.submit(give_away(), detach="gives")
        until(lambda: starts(path), "it runs, and its client may leave")
    # No journal, record, output, blob, log or process has it.
    assert files_with(secret, head.path) == [] and processes_with(secret) == {}
    kill(head)
    boot(head)
    # A client that has no such secret, and asks.
    monkeypatch.delenv("A_TOKEN")
    with ask(manifest_of(head)) as pool:
        job, failed, given = pool.job("holds"), pool.job("fails"), pool.job("gives")
        until(lambda: job.info().lacks, "it waits")
        assert job.state == "queued" and job.info().lacks == ("A_TOKEN",)
        assert "waits for A_TOKEN" in (job.info().problem or "") and "jobs give STACK/POOL holds" in job.info().problem
        with pytest.raises(sky.SecretNotFound, match="A_TOKEN"):
            job.give()
        with pytest.raises(sky.InvalidField, match="no such secret"):
            job._give({"ANOTHER": "value"})
        assert len(starts(path)) == 1
        Path(f"{path}.open").touch()
        (tmp_path / "token").write_text(secret)
        assert job.give(sky.Secret("A_TOKEN", file=str(tmp_path / "token"))).lacks == ()
        assert job.result(timeout=60) == len(secret)
        assert "begins with ***" in job.logs() and len(starts(path)) == 2
        failed.give(sky.Secret("A_TOKEN", file=str(tmp_path / "token")))
        with pytest.raises(ValueError, match=r"no such token: \*+$"):
            failed.result(timeout=60)
        assert failed.info().problem == "ValueError: no such token: ***"
        given.give(sky.Secret("A_TOKEN", file=str(tmp_path / "token")))
        with pytest.raises(sky.TaskNotPicklable, match="holds one of its secrets"):
            given.result(timeout=60)
    (tmp_path / "token").unlink()
    assert files_with(secret, head.path) == [] and processes_with(secret) == {}
    assert "Traceback" not in head.directory.log_file.read_text()


@pytest.mark.parametrize("ends", ["fails", "is lost"])
def test_a_job_that_goes_on_and_has_to_start_again_waits_for_its_secret(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ends: str
) -> None:
    monkeypatch.setattr(queue, "_BACK_S", 60.0)
    use = SecretUse("A_TOKEN", "A_TOKEN", f"{IDENTITY}.1")
    header = Header("train-1", "train", "", secrets=(use,)).dumps().decode()

    async def give(head: heads.Head) -> None:
        await head.ask(services.job_secrets, job="holds", values={"A_TOKEN": "value"})

    async def first(head: heads.Head, fleet: heads.Slots) -> None:
        await head.submit("holds", identity=IDENTITY, header=header, retries=1)
        await give(head)
        await heads.until(lambda: fleet.started == ["holds"])

    async def second(head: heads.Head, fleet: heads.Slots) -> None:
        head.jobs.claim(f"{(await head.info('holds')).key}.1", "n2/0")
        await heads.until(lambda: fleet.adopted == ["holds"])
        fleet.there.append({"slot": 1.0})
        (attempt,) = fleet.tasks.values()
        failed = Outcome(failure=failures.of(ValueError("x"), below=__file__))
        attempt.set_result(failed if ends == "fails" else None)
        # The slot is free for another one.
        await head.submit("other")
        await heads.until(lambda: fleet.started == ["other"])
        info = await head.info("holds")
        assert (info.state, info.lacks, info.attempts) == ("queued", ("A_TOKEN",), 1)
        await give(head)
        fleet.end("other")
        await heads.until(lambda: fleet.started == ["other", "holds"])
        fleet.end("holds")
        info = await head.info("holds", 10)
        assert (info.state, info.attempts) == ("done", 2)

    heads.on_head(tmp_path, first)
    heads.on_head(tmp_path, second, slots=heads.Slots(0))


@pytest.mark.slow
def test_the_command_line_gives_and_a_waiting_job_may_be_cancelled(
    make_node: MakeNode, tmp_path: Path, secret: str
) -> None:
    head = make_node("n1", accelerator=h100(BIG[:1]))
    boot(head)
    path, script = tmp_path / "run", tmp_path / "script.py"
    script.write_text("import os\nprint(os.environ['A_TOKEN'], len(os.environ['A_TOKEN']))\n")
    manifest = tmp_path / "fleet.json"
    with head.pool() as pool:
        manifest.write_text(json.dumps(pool.manifest.to_json()))
        pool.submit(hold(str(path)), detach="holds")
        until(lambda: starts(path), "it has the slot")
    with connect(str(manifest), secrets=["A_TOKEN"]) as pool:
        detach_script(pool, script, name="script")
        pool.submit(hold(str(path)), detach="cancelled")
    kill(head)
    boot(head)
    program = [sys.executable, "-c", "from skyinfra.cli import main; main()", "jobs"]

    def skyinfra(*arguments: str) -> str:
        return subprocess.run([*program, *arguments], capture_output=True, text=True, check=True, timeout=60).stdout

    listed = skyinfra("list", str(manifest))
    assert listed.count("queued") == 3
    assert skyinfra("cancel", str(manifest), "cancelled") == "cancelled: cancelled\n"
    assert skyinfra("give", str(manifest), "script") in ("script: queued\n", "script: running\n")
    with open_pool(manifest_of(head)) as pool:
        assert pool.job("script").result(timeout=60) == 0
        assert pool.job("script").logs() == f"*** {len(secret)}\n"
        assert pool.job("holds").info().lacks == ("A_TOKEN",)
    assert files_with(secret, head.path) == []


@pytest.mark.slow
def test_nodes_that_join_later_and_sessions(make_node: MakeNode, tmp_path: Path, secret: str) -> None:
    head = make_node("n1", accelerator=h100(BIG[:1]), secrets={"HUB": "A_TOKEN"})
    boot(head)
    path = tmp_path / "run"
    with head.pool() as pool:
        running = pool.submit(Task(wait_for, (str(path),)), detach="running")
        until(lambda: starts(path), "the slot of the head is taken")
        late = pool.submit(where(), detach="late")
        scheduler = head.directory.scheduler_file.read_text().strip()
        other = make_node("n2", accelerator=h100(BIG[:1]), head=False, scheduler=scheduler, secrets={"HUB": "A_TOKEN"})
        boot(other)
        assert late.result(timeout=60) == ("n2", len(secret))
        # A program of `skyinfra exec` is no task, and gets none.
        identity = pool.ask("n1", questions.START, command=["env"])
        told = ""
        while True:
            found = pool.ask("n1", questions.OUTPUT, wait_s=30, identity=identity, longest_s=5)
            told += "".join(text for _, text in found["parts"])
            if found["code"] is not None:
                break
        assert "HUB" not in told and secret not in told
        Path(f"{path}.open").touch()
        running.result(timeout=60)
    assert files_with(secret, head.path, other.path) == []


def test_a_local_node_has_no_secret_of_who_deploys_it(make_node: MakeNode, secret: str) -> None:
    head = make_node("n1", accelerator=h100(BIG[:1]), secrets={"HUB": "A_TOKEN"})
    head.boot()
    assert processes_with(secret) == {}
    with head.pool() as pool:
        found = sky.compute(lambda: dict(os.environ))() >> pool
        assert found["HUB"] == secret and "A_TOKEN" not in found
