"""How an upgrade takes the answers of nodes: those that cannot be upgraded, fail, or are not heard of."""

from __future__ import annotations

from typing import Any

import pytest

import skyinfra as sky
from skyinfra.deploy import upgrade
from skyinfra.deploy.upgrade import Running, Upgrade, running
from skyinfra.errors import NodeError, NotSupported, UpgradeFailed
from skyinfra.protocol.manifest import Endpoint, Manifest


class Nodes:
    """Answers of nodes, by name: each is a list, of which the last one repeats. ``steps``: what was asked for."""

    def __init__(self, **answers: list[Any]) -> None:
        self.answers = answers
        self.steps: list[tuple[str, str]] = []
        self.request = ""

    def ask_all(self, names: list[str], question: str, *, step: str, **arguments: Any) -> dict[str, Any]:
        self.request = arguments.get("request_id", self.request)
        self.steps += [(name, step) for name in names]
        return {name: self._next(name) for name in names}

    def _next(self, name: str) -> Any:
        left = self.answers[name]
        found = left.pop(0) if len(left) > 1 else left[0]
        if isinstance(found, NodeError):
            return found
        return {"version": "1+a", "state": "ready", "record": {"request": self.request, **found}}


def upgraded(nodes: Nodes) -> Upgrade:
    manifest = Manifest(1, "s", "p", "aws", Endpoint("127.0.0.1", 1), (), (), "x" * 40)
    return Upgrade(None, manifest, nodes, list(nodes.answers), 0.0, print)  # type: ignore[arg-type]


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upgrade, "_POLL_S", 0.0)


def test_machines_that_have_stopped_are_refused_before_anything_is_done() -> None:
    for kind, most, refused in (("gcp", 4, "have stopped"), ("container", 0, "nodes of container"), ("gcp", 0, None)):
        manifest = Manifest(1, "s", "p", kind, Endpoint("127.0.0.1", 1), (), (), "x" * 40, max_nodes=most)
        if refused is None:
            upgrade.check_kind(manifest)
            continue
        with pytest.raises(NotSupported, match=refused):
            upgrade.check_kind(manifest)


def test_a_node_on_which_nothing_can_replace_the_runner_ends_it_at_once() -> None:
    nodes = Nodes(a=[{"state": "prepared"}], b=[NodeError("NotSupported: nothing on this node can replace its runner")])
    with pytest.raises(UpgradeFailed, match="b: NotSupported: nothing on this node") as caught:
        upgraded(nodes)._prepare()
    assert "Nothing was changed" in str(caught.value)


def test_a_step_is_asked_for_until_root_has_noticed_it_and_looked_at_afterwards() -> None:
    early: dict[str, str] = {"request": "of an earlier upgrade", "state": "done"}
    nodes = Nodes(a=[early, early, {"state": "preparing"}, {"state": "prepared"}])
    upgraded(nodes)._prepare()
    assert [step for _, step in nodes.steps] == ["prepare", "prepare", "prepare", "look"]


def test_a_head_that_restarts_is_waited_for_and_who_went_back_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    gone = NodeError("node a is not connected to the head")
    nodes = Nodes(a=[{"state": "switching"}, gone, {"state": "done"}], b=[gone, {"state": "back", "error": "it ended"}])
    assert upgraded(nodes)._switch() == {"b": "it ended"}
    monkeypatch.setattr(upgrade, "_SWITCH_S", 0.2)
    failed = upgraded(Nodes(a=[gone]))._switch()
    assert failed == {"a": "nothing was heard of it within 0.2 s: node a is not connected to the head"}


def test_what_runs_is_told_from_what_does_not_answer() -> None:
    older, silent = NodeError("NotSupported: the runner of this node does not know this question"), NodeError("gone")
    nodes = Nodes(a=[{}], b=[older], c=[silent])
    assert running(nodes, "abc") == {  # type: ignore[arg-type]
        "a": Running("1+a"),
        "b": Running(None),
        "c": Running(None, "gone"),
    }
    assert issubclass(UpgradeFailed, sky.FleetError)
