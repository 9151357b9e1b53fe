"""Notifications of jobs: the head tells webhooks, whose addresses are in its memory alone; a client runs commands."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from checks.leaks import files_with, processes_with
from local_fleets.running_node import BIG, RunningNode, h100, until
from servers.webhooks import WebhookServer, webhook_server
from tasks_on_nodes.jobs import manifest_of, starts, wait_for
from typer.testing import CliRunner

import skyinfra as sky
from skyinfra.cli.app import app
from skyinfra.client import connect, detach_script
from skyinfra.client.notifying import send
from skyinfra.engine.notifications import Notice
from skyinfra.tasks import Task

MakeNode = Callable[..., RunningNode]


@pytest.fixture
def secret() -> str:
    return f"hook-{uuid.uuid4().hex}"


@pytest.fixture
def server() -> Iterator[WebhookServer]:
    with webhook_server() as made:
        yield made


def command(*arguments: str, code: int = 0) -> Any:
    result = CliRunner().invoke(app, [*arguments], catch_exceptions=True)
    assert result.exit_code == code, (result.output, result.exception)
    return result


def fleet_of(head: RunningNode, tmp_path: Path) -> str:
    manifest = tmp_path / "fleet.json"
    manifest.write_text(json.dumps(manifest_of(head).to_json()))
    return str(manifest)


def notifications(job: sky.Job[Any]) -> list[tuple[str, str, str | None]]:
    return [(each.host, each.state, each.problem) for each in job.info().notifications]


def told(job: sky.Job[Any]) -> list[tuple[str, str, str | None]]:
    until(lambda: all(state != "waiting" for _, state, _ in notifications(job)), "it was told")
    return notifications(job)


SENT = [("127.0.0.1", "sent", None)]


def test_the_head_tells_of_the_end_and_no_slow_webhook_stops_it(
    make_node: MakeNode, tmp_path: Path, secret: str, server: WebhookServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    head = make_node("n1", accelerator=h100(BIG))
    head.boot()
    fleet, path, script = fleet_of(head, tmp_path), tmp_path / "run", tmp_path / "project" / "train.py"
    script.parent.mkdir()
    script.write_text("import sys; sys.exit(int(sys.argv[1]))")
    (tmp_path / "url").write_text(server.url(secret))
    monkeypatch.setenv("SLACK_URL", server.url(secret))
    with connect(fleet) as pool:
        # More webhooks that never answer than are told at one time.
        silent = [detach_script(pool, script, ["0"], notify=[server.url(f"hang/{secret}")]) for _ in range(9)]
        until(lambda: server.hanging >= 8, "as many as are told at one time wait")
        assert sum(job.done() for job in silent) >= 8
        assert detach_script(pool, script, ["0"]).result(timeout=30) == 0
        running = pool.detach(Task(wait_for, (str(path),)), "cancelled", notify=["SLACK_URL"])
        until(lambda: starts(path), "it runs")
        assert files_with(secret, head.path) == [] and processes_with(secret) == {}
        running.cancel()
        named = f"SLACK_URL=@{tmp_path / 'url'}"
        command("run", fleet, "--detach", "--name", "fails", "--notify", named, str(script), "3")
        with pytest.raises(sky.ScriptFailed):
            pool.job("fails").result(timeout=30)
        server.open.set()
        assert told(running) == SENT and told(pool.job("fails")) == SENT
        server.answers = [410]
        refused = detach_script(pool, script, ["0"], name="refused", notify=[server.url(secret)])
        assert refused.result(timeout=30) == 0
        assert told(refused) == [("127.0.0.1", "failed", "answered 410")]
        assert "127.0.0.1 not notified: answered 410" in command("jobs", fleet).stdout
        (listed,) = [
            job for job in json.loads(command("jobs", fleet, "--json").stdout)["jobs"] if job["name"] == "fails"
        ]
        assert listed["notifications"] == [{"host": "127.0.0.1", "state": "sent", "problem": None}]
    by_job = {body["job"]["name"]: body for _, body in server.received}
    assert {name: body["job"]["state"] for name, body in by_job.items()} == {
        "cancelled": "cancelled",
        "fails": "failed",
        "refused": "done",
    }
    assert len(server.received) == 3  # none twice
    fails = by_job["fails"]
    assert re.match(r"fails on demo/mig: failed after 0:\d\d:\d\d", fails["text"])
    assert fails["text"].endswith(": skyinfra.ScriptFailed: train.py ended with exit code 3")
    assert (fails["job"]["exit_code"], fails["job"]["pool"]) == (3, "demo/mig")
    assert "job refused: 127.0.0.1 was not notified of its end: answered 410" in head.directory.log_file.read_text()
    assert files_with(secret, head.path) == [] and processes_with(secret) == {}


@pytest.mark.slow
def test_a_head_that_starts_anew_has_forgotten_the_address_and_takes_it_again(
    make_node: MakeNode, tmp_path: Path, secret: str, server: WebhookServer
) -> None:
    head = make_node("n1", accelerator=h100(BIG))
    head.boot()
    fleet, path = fleet_of(head, tmp_path), tmp_path / "run"
    url = server.url(secret)
    with connect(fleet) as pool:
        for name in ("given", "left"):
            pool.detach(Task(wait_for, (f"{path}-{name}",)), name, notify=[url])
        until(lambda: starts(Path(f"{path}-given")) and starts(Path(f"{path}-left")), "both run")
    pid = head.status().pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    head.boot()
    with connect(fleet) as pool:
        given, left = pool.job("given"), pool.job("left")
        ((_, state, problem),) = notifications(given)
        assert state == "failed" and "jobs give STACK/POOL given --notify TARGET" in (problem or "")
        assert "not notified: its head started anew" in command("jobs", fleet).stdout
        command("jobs", "give", fleet, "given", "--notify", url)
        assert notifications(given) == [("127.0.0.1", "waiting", None)]
        for name in ("given", "left"):
            Path(f"{path}-{name}.open").touch()
        given.result(timeout=60)
        left.result(timeout=60)
        assert told(given) == SENT and server.texts()[0].startswith("given on demo/mig: done")
        assert notifications(left)[0][1] == "failed" and len(server.received) == 1
        # After the end it is told at once, and only once.
        left.give(notify=[url])
        assert told(left) == SENT and len(server.received) == 2
        with pytest.raises(sky.InvalidField, match="its end was notified already"):
            left.give(notify=[url])
        # One that is forgotten meanwhile leaves nothing.
        gone = pool.detach(Task(wait_for, (f"{path}-left",)), "gone", notify=[server.url(f"hang/{secret}")])
        until(lambda: server.hanging, "it is told")
        gone.forget()
        server.open.set()
        pool.detach(Task(wait_for, (f"{path}-left",)), "last", notify=[url])
        until(lambda: len(server.received) == 3, "the last one was told")
        assert not (head.path / "jobs" / gone.id).exists()
    assert files_with(secret, head.path) == []
    assert "Traceback" not in head.directory.log_file.read_text()


@pytest.mark.slow
def test_commands_run_on_the_client_which_tells_of_what_it_waits_for(
    make_node: MakeNode, tmp_path: Path, secret: str, server: WebhookServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    head = make_node("n1", accelerator=h100(BIG[:1]))
    head.boot()
    fleet, script, mail = fleet_of(head, tmp_path), tmp_path / "train.py", tmp_path / "mail"
    script.write_text("import sys; sys.exit(int(sys.argv[1]))")
    monkeypatch.setenv("SLACK_URL", server.url(secret))
    mails = f'command:(echo "$SKYINFRA_SUBJECT,$SKYINFRA_JOB_STATE,$SKYINFRA_JOB_EXIT_CODE"; cat) > {mail}'
    command("run", fleet, "--notify", mails, "--notify", "SLACK_URL", str(script), "3", code=3)
    subject, text = mail.read_text().splitlines()
    assert subject == f"train.py on {fleet}: failed,failed,3"
    assert re.fullmatch(rf"train\.py on {re.escape(fleet)}: failed after 0:\d\d:\d\d.*: exit code 3", text)
    assert server.texts() == [text]
    # What cannot be told is said, without the address, and changes no exit code.
    server.answers = [404]
    failing = command("run", fleet, "--notify", "command:exit 4", "--notify", "SLACK_URL", str(script), "0")
    assert "train.py: the command of --notify ended with 4" in failing.stderr
    assert "train.py: 127.0.0.1 was not notified: answered 404" in failing.stderr and secret not in failing.output
    refused = command("run", fleet, "--detach", "--notify", mails, str(script), "0", code=1).exception
    assert isinstance(refused, sky.NotSupported) and "jobs result STACK/POOL JOB --notify command:" in str(refused)
    for wrong, error in (
        (f"http://hooks.example.com/{secret}", sky.InvalidField),
        (f"SLACK_URL={server.url(secret)}", sky.InvalidField),
        (f"hooks.slack.com/services/{secret}", sky.InvalidField),
        ("NO_SUCH_URL", sky.SecretNotFound),
    ):
        for options in ((), ("--detach",)):
            said = command("run", fleet, *options, "--notify", wrong, str(script), "0", code=1)
            assert isinstance(said.exception, error) and secret not in str(said.exception) + said.output
    # A job that is waited for.
    with connect(fleet) as pool:
        detach_script(pool, script, ["3"], name="waits")
    command("jobs", "result", fleet, "waits", "--notify", mails, code=3)
    assert mail.read_text().startswith("waits on demo/mig: failed,failed,3\nwaits on demo/mig: failed after")
    # A script that is interrupted.
    script.write_text("import time; print('started', flush=True); time.sleep(600)")
    arguments = ["run", fleet, "--notify", mails, str(script)]
    program = [sys.executable, "-c", "from skyinfra.cli import main; main()", *arguments]
    with subprocess.Popen(program, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as client:
        assert client.stdout is not None and client.stdout.readline() == "started\n"
        client.send_signal(signal.SIGTERM)
        assert client.wait(timeout=60) == 143
    assert mail.read_text().startswith(f"train.py on {fleet}: cancelled,cancelled,\n")
    assert files_with(secret, head.path) == []


def test_a_command_gets_what_variables_can_hold(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    mail = tmp_path / "mail"
    for problem, shown in (("a\0b", r"a\x00b"), ("é" * 200_000, "é" * 4000)):
        notice = Notice("demo/mig", "nightly", "failed", problem=problem)
        send([f'command:(echo "$SKYINFRA_JOB_PROBLEM"; cat) > {mail}'], notice)
        problem_there, text = mail.read_text(encoding="utf-8").splitlines()
        assert problem_there == shown and text == notice.text
    # One that does not read, and one that is not there.
    send(["command:exit 0", "command:no-such-program"], notice)
    assert capsys.readouterr().err == "warning: nightly: the command of --notify ended with 127\n"
