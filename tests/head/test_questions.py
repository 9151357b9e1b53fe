"""Clients ask nodes by way of the head: doctor, top, logs and programs on the nodes of a fleet that runs."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from local_fleets.running_node import RunningNode, h100, until
from typer.testing import CliRunner

import skyinfra as sky
from skyinfra import InvalidField, NodeError
from skyinfra.cli.app import app
from skyinfra.head.relay import Relay
from skyinfra.protocol.nodeconfig import NodeConfig
from skyinfra.submission.snapshot import Target
from skyinfra.tasks import Task

# Each has a fleet of its own.
pytestmark = pytest.mark.slow

Fleet = tuple[RunningNode, RunningNode, str]

BIG = (("3g.40gb", 0, 4), ("3g.40gb", 4, 4))


def config(name: str, **fields: Any) -> NodeConfig:
    base: dict[str, Any] = {"head": True, "scheduler": "127.0.0.1:0", **fields}
    return NodeConfig(1, "demo", "mig", name, "local", accelerator=h100(BIG), simulate=True, **base)


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """A head, another node, and the manifest of the two; each test leaves them as they were."""
    folder = tmp_path_factory.mktemp("fleet")
    head = RunningNode(folder / "n1", config("n1"))
    nodes = [head]
    try:
        head.boot()
        scheduler = head.directory.scheduler_file.read_text().strip()
        nodes.append(RunningNode(folder / "n2", config("n2", head=False, scheduler=scheduler)))
        nodes[1].boot()
        manifest = folder / "fleet.json"
        with head.pool(nodes[1]) as pool:
            manifest.write_text(json.dumps(pool.manifest.to_json()))
            until(lambda: len(pool.slots()) == 4, "both nodes are there")
        yield head, nodes[1], str(manifest)
    finally:
        for node in reversed(nodes):
            node.stop()


def command(*arguments: str) -> Any:
    return CliRunner().invoke(app, [*arguments], catch_exceptions=True)


def printed(*arguments: str, code: int = 0) -> Any:
    result = command(*arguments, "--json")
    assert result.exit_code == code, (result.output, result.exception)
    return json.loads(result.stdout)


def test_doctor_of_a_fleet(running: Fleet) -> None:
    _, _, manifest = running
    result = command("doctor", manifest)
    found = json.loads(command("doctor", manifest, "--json").stdout)["nodes"]
    assert list(found) == ["n1", "n2"]
    for lines in found.values():
        by_name = {line["what"]: line for line in lines}
        assert by_name["runner"]["found"] == "ready"
        assert by_name["MIG layout"]["wanted"] == "3g.40gb*2"
    wrong = sum(line["result"] == "wrong" for lines in found.values() for line in lines)
    assert result.exit_code == (1 if wrong else 0)
    assert f"2 nodes, {wrong} wrong" in result.stdout
    assert list(json.loads(command("doctor", manifest, "n2", "--json").stdout)["nodes"]) == ["n2"]
    refused = command("doctor", manifest, "n3")
    assert isinstance(refused.exception, InvalidField)
    assert "Did you mean" in str(refused.exception)


def _wait(path: str) -> None:
    import time

    while not Path(path).exists():
        time.sleep(0.02)


def test_top_shows_slots_and_tasks(running: Fleet, tmp_path: Path) -> None:
    head, node, manifest = running
    with head.pool(node) as pool:
        future = pool.send(Task(_wait, (str(tmp_path / "open"),)), Target(slot="n2/1"))
        until(lambda: pool.running()["n2/1"], "the head knows that it runs")
        found = printed("top", manifest)["nodes"]
        assert [(each["name"], each["problem"], len(each["slots"])) for each in found] == [
            ("n1", None, 2),
            ("n2", None, 2),
        ]
        busy = found[1]["slots"][1]
        assert [task["name"] for task in busy["tasks"]] == ["_wait"]
        assert (busy["slot"], busy["profile"], busy["utilization"]) == ("n2/1", "3g.40gb", None)
        table = command("top", manifest, "n2").stdout
        assert "_wait" in table
        assert "H100 3g.40gb" in table
        (tmp_path / "open").touch()
        future.result(timeout=60)
        node.run("drain")
        assert [len(each["slots"]) for each in printed("top", manifest)["nodes"]] == [2, 0]
        node.run("undrain")


def test_a_node_that_does_not_answer(running: Fleet, request: pytest.FixtureRequest) -> None:
    head, node, _ = running
    with head.pool(node) as pool:
        with pytest.raises(NodeError, match=r"NotSupported: .*does not know this question"):
            pool.ask("n2", "the weather")
        with pytest.raises(NodeError, match=r"no.*connected to the head; these are: n1, n2"):
            pool.ask("n9", "doctor")
        node.run("stop")
        request.addfinalizer(node.boot)
        with pytest.raises(NodeError, match="did not answer within 1 s"):
            pool.ask("n2", "doctor", wait_s=1)
        # The head's own runner goes on.
        assert pool.ask("n1", "doctor")


# The relay alone ----------------------------------------------------------------------------------------------------


def slow(question: str, arguments: dict[str, Any]) -> object:
    if question == "wrong":
        raise ValueError("as asked")
    return [question, arguments, threading.current_thread() is threading.main_thread()]


def test_questions_reach_their_node_once() -> None:
    async def run() -> None:
        relay = Relay("head", slow)
        assert await relay.ask("head", "q", {"a": 1}, 5) == ["q", {"a": 1}, False]
        with pytest.raises(NodeError, match=r"^ValueError: as asked$"):
            await relay.ask("head", "wrong", {}, 5)
        with pytest.raises(NodeError, match="n2 is not connected"):
            await relay.ask("n2", "q", {}, 0)
        waiting = asyncio.create_task(relay.questions("n2", 30))
        await asyncio.sleep(0)
        # The node has connected anew: the first connection gets nothing any more.
        again = asyncio.create_task(relay.questions("n2", 30))
        assert await waiting == []
        asked = [asyncio.create_task(relay.ask("n2", f"q{number}", {}, 30)) for number in range(3)]
        found = [*await again, *await relay.questions("n2", 0)]
        assert [question for _, question, _ in found] == ["q0", "q1", "q2"]
        number = found[1][0]
        relay.answer("another node", number, {"answer": "forged"})
        relay.answer("n2", number, {"answer": 1})
        assert await asked[1] == 1
        asked[0].cancel()
        assert await relay.questions("n2", 0) == []
        # Who asks is told when nobody answers, and an answer that is late is dropped.
        with pytest.raises(NodeError, match=r"^node n2 did not answer within 0\.05 s$"):
            await relay.ask("n2", "q", {}, 0.05)
        assert await relay.questions("n2", 0) == []
        asked[2].cancel()

    asyncio.run(run())


# Logs and programs --------------------------------------------------------------------------------------------------


def _say(text: str, path: str = "") -> str:
    import os
    import subprocess
    import sys
    import time

    print(text)
    print("an error", file=sys.stderr)
    os.write(1, b"from below\n")
    subprocess.run(["/bin/sh", "-c", "echo from a program"], check=True)
    sys.stdout.flush()
    while path and not os.path.exists(path):  # noqa: PTH110
        time.sleep(0.02)
    return text


def test_a_question_waits_for_a_node_that_is_on_its_way_to_a_young_head(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a head has started again, slots may be back before the line of their node."""

    async def main() -> None:
        relay = Relay("n1", lambda question, arguments: question)
        asked = asyncio.create_task(relay.ask("n2", "log", {"task": "x"}, 30))
        await asyncio.sleep(0)
        await relay.questions("n3", 0)
        [(number, question, arguments)] = await relay.questions("n2", 30)
        assert (question, arguments) == ("log", {"task": "x"})
        relay.answer("n2", number, {"answer": "lines"})
        assert await asked == "lines"
        # Nobody waits for longer than asked, nor for who has not come when the head is old.
        with pytest.raises(NodeError, match="is not connected"):
            await relay.ask("n4", "log", {}, 0.01)
        monkeypatch.setattr("skyinfra.head.relay._COMING_S", 0.0)
        with pytest.raises(NodeError, match="these are: n1, n2, n3"):
            await relay.ask("n4", "log", {}, 30)

    asyncio.run(main())


def test_logs_of_tasks_and_runners(running: Fleet, tmp_path: Path) -> None:
    head, node, manifest = running
    with head.pool(node) as pool:
        loud = pool.send(Task(_say, ("grüße",)), Target(node="n2"))
        assert loud.result(timeout=60) == "grüße"
        quiet = pool.submit(sky.interrupted)
        assert quiet.result(timeout=60) is False
    result = command("logs", manifest, "--task", loud.key)
    assert result.exit_code == 0
    assert sorted(result.stdout.splitlines()) == ["an error", "from a program", "from below", "grüße"]
    assert command("logs", manifest, "--task", loud.key[:12], "-n", "1").stdout.count("\n") == 1
    (found,) = printed("logs", manifest, "--task", loud.key)["nodes"]
    assert (found["name"], found["path"]) == ("n2", str(node.path / "tasks" / f"{loud.key}.log"))
    # What printed nothing leaves nothing.
    nothing = command("logs", manifest, "--task", quiet.key)
    assert "no node has output of such a task" in str(nothing.exception)
    # Another log is that of the runner, of each node; what tasks print is not in it.
    runners = command("logs", manifest)
    assert {line.partition(": ")[0] for line in runners.stdout.splitlines()} == {"n1", "n2"}
    assert "n2: " in runners.stdout
    assert "ready, process" in runners.stdout
    assert "from below" not in runners.stdout
    boot = command("logs", manifest, "n1", "--boot")
    assert (boot.exit_code, "no log of one" in boot.output) == (1, True)
    wrong = command("logs", manifest, "--boot", "--runner")
    assert wrong.exit_code == 2
    assert "no node has output" in str(command("logs", manifest, "--task", "../node").exception)


def test_programs_on_nodes(running: Fleet) -> None:
    head, node, manifest = running
    result = command("exec", manifest, "n2", "--", "sh", "-c", "pwd; echo wrong >&2; exit 3")
    assert (result.exit_code, result.stdout.strip()) == (3, str(node.path))
    assert "wrong" in result.stderr
    assert command("exec", manifest, "--", "pwd").stdout.strip() == str(head.path)
    assert command("exec", manifest, "--", "sh", "-c", "kill -9 $$").exit_code == 137
    # More than is kept at once, and characters that a read may cut.
    much = command("exec", manifest, "--", "sh", "-c", "yes ü | head -c 3000000")
    assert much.stdout == "ü\n" * 1_000_000
    assert "cannot be run: No such file" in str(command("exec", manifest, "--", "/no/such").exception)
    assert "no command" in str(command("exec", manifest, "n1").exception)
    refused = command("ssh", manifest)
    assert "on the machine where it was deployed" in str(refused.exception)


def test_a_program_ends_with_its_client(running: Fleet, tmp_path: Path) -> None:
    head, node, _ = running
    with head.pool(node) as pool:
        script = f"trap 'echo told > {tmp_path}/told; exit 0' TERM; echo begun; while :; do sleep 0.05; done"
        identity = pool.ask("n2", "start", command=["sh", "-c", script])
        assert pool.ask("n2", "output", identity=identity, longest_s=10)["parts"] == [["stdout", "begun\n"]]
        pool.ask("n2", "end", identity=identity)
        until(lambda: (tmp_path / "told").exists(), "it was asked to end")
        # The shell may say first what became of the program that it waited for.
        ends = (pool.ask("n2", "output", identity=identity, longest_s=10)["code"] for _ in range(9))
        assert next(code for code in ends if code is not None) == 0
        with pytest.raises(NodeError, match="does not run that command any more"):
            until(lambda: not pool.ask("n2", "output", identity=identity, longest_s=0), "it is forgotten")
