"""Clients ask nodes by way of the head: doctor, top, logs and programs on the nodes of a fleet that runs."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from running_node import RunningNode, h100, until
from typer.testing import CliRunner

from skyinfra import InvalidField, NodeError
from skyinfra.cli.app import app
from skyinfra.protocol.questions import Answer
from skyinfra.runner.desk import Desk

MakeNode = Callable[..., RunningNode]

BIG = (("3g.40gb", 0, 4), ("3g.40gb", 4, 4))


@pytest.fixture
def fleet(make_node: MakeNode, tmp_path: Path) -> Iterator[tuple[RunningNode, RunningNode, str]]:
    """A head, another node, and the manifest of the two."""
    head = make_node("n1", accelerator=h100(BIG))
    head.boot()
    scheduler = head.directory.scheduler_file.read_text().strip()
    node = make_node("n2", head=False, scheduler=scheduler, accelerator=h100(BIG))
    node.boot()
    manifest = tmp_path / "fleet.json"
    with head.pool(node) as pool:
        manifest.write_text(json.dumps(pool.manifest.to_json()))
        until(lambda: len(pool.slots()) == 4, "both nodes are there")
    yield head, node, str(manifest)


def command(*arguments: str) -> Result:
    return CliRunner().invoke(app, [*arguments], catch_exceptions=True)


def printed(*arguments: str, code: int = 0) -> Any:
    result = command(*arguments, "--json")
    assert result.exit_code == code, (result.output, result.exception)
    return json.loads(result.stdout)


def test_doctor_of_a_fleet(fleet: tuple[RunningNode, RunningNode, str]) -> None:
    _, _, manifest = fleet
    result = command("doctor", manifest)
    found = json.loads(command("doctor", manifest, "--json").stdout)["nodes"]
    assert list(found) == ["n1", "n2"]
    for lines in found.values():
        by_name = {line["what"]: line for line in lines}
        assert by_name["runner"]["found"] == "ready"
        assert by_name["MIG layout"]["wanted"] == "3g.40gb+3g.40gb"
    wrong = sum(line["result"] == "wrong" for lines in found.values() for line in lines)
    assert result.exit_code == (1 if wrong else 0)
    assert f"2 nodes, {wrong} wrong" in result.stdout
    assert list(json.loads(command("doctor", manifest, "n2", "--json").stdout)["nodes"]) == ["n2"]
    refused = command("doctor", manifest, "n3")
    assert isinstance(refused.exception, InvalidField)
    assert "Did you mean" in str(refused.exception)


def test_a_node_that_does_not_answer(fleet: tuple[RunningNode, RunningNode, str]) -> None:
    head, node, manifest = fleet
    with head.pool(node) as pool:
        with pytest.raises(NodeError, match="NotSupported: .*does not know this question"):
            pool.ask("n2", "the weather")
        with pytest.raises(NodeError, match=r"no.*connected to the head; these are: n1, n2"):
            pool.ask("n9", "doctor")
        node.run("stop")
        with pytest.raises(NodeError, match="did not answer within 1 s"):
            pool.ask("n2", "doctor", wait_s=1)
        # The head's own runner goes on.
        assert pool.ask("n1", "doctor")


# The desk alone -----------------------------------------------------------------------------------------------------


def slow(question: str, arguments: dict[str, Any]) -> Answer:
    if question == "wrong":
        raise ValueError("as asked")
    return {"answer": [question, arguments, threading.current_thread() is threading.main_thread()]}


def test_questions_reach_their_node_once() -> None:
    async def run() -> None:
        desk = Desk("head", slow)
        assert await desk.ask("head", "q", {"a": 1}, 5) == {"answer": ["q", {"a": 1}, False]}
        assert await desk.ask("head", "wrong", {}, 5) == {"error": ["ValueError", "as asked"]}
        assert (await desk.ask("n2", "q", {}, 5))["error"][0] == "LookupError"
        waiting = asyncio.create_task(desk.questions("n2", 30))
        await asyncio.sleep(0)
        # The node has connected anew: the first connection gets nothing any more.
        again = asyncio.create_task(desk.questions("n2", 30))
        assert await waiting == []
        asked = [asyncio.create_task(desk.ask("n2", f"q{number}", {}, 30)) for number in range(3)]
        found = [*await again, *await desk.questions("n2", 0)]
        assert [question for _, question, _ in found] == ["q0", "q1", "q2"]
        number = found[1][0]
        desk.answer("another node", number, {"answer": "forged"})
        desk.answer("n2", number, {"answer": 1})
        assert await asked[1] == {"answer": 1}
        asked[0].cancel()
        assert await desk.questions("n2", 0) == []
        # Who asks is told when nobody answers, and an answer that is late is dropped.
        late = await desk.ask("n2", "q", {}, 0.05)
        assert late["error"] == ["TimeoutError", "node n2 did not answer within 0.05 s"]
        assert await desk.questions("n2", 0) == []
        asked[2].cancel()

    asyncio.run(run())
