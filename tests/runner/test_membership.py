"""A node's place in its fleet, where what the head says cannot be read, and where the head ends with the node."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest
from local_fleets.running_node import RunningNode

from skyinfra.errors import InvalidNodeConfig
from skyinfra.head import start
from skyinfra.node.node import Node
from skyinfra.protocol import services
from skyinfra.protocol.manifest import Endpoint
from skyinfra.runner.head_connection import HeadConnection
from skyinfra.runner.membership import Membership


async def joined(node: RunningNode) -> tuple[list[Endpoint | None], str, bool]:
    """What `join` gives twice in a row, what is refused, and whether another layout is wanted."""
    changed = asyncio.Event()
    membership = Membership(node.directory, changed, lambda *_: {})
    loaded = Node.load(node.file)
    try:
        found = [await membership.join(loaded) for _ in range(2)]
        membership.check()
        return found, str(membership.refused), changed.is_set()
    finally:
        await membership.close()


def test_a_node_joins_a_head_whose_layout_it_cannot_read(
    make_node: Callable[..., RunningNode], monkeypatch: pytest.MonkeyPatch
) -> None:
    address = make_node("n1", cpu_slots=1).boot().scheduler
    worker = make_node("n2", head=False, scheduler=address, cpu_slots=1)

    async def refuse(*_: object, **__: object) -> None:
        raise InvalidNodeConfig("another version than can be read here")

    monkeypatch.setattr(services, "layout", refuse)
    found, refused, changed = asyncio.run(asyncio.wait_for(joined(worker), 20))
    assert [f"{each.address}:{each.port}" for each in found if each is not None] == [address] * 2
    assert refused == "another version than can be read here"
    assert not changed


async def closes_while_its_head_ends(node: RunningNode, monkeypatch: pytest.MonkeyPatch) -> None:
    asking, head_ends = asyncio.Event(), asyncio.Event()

    async def broken(*_: object, **__: object) -> None:
        asking.set()
        await head_ends.wait()
        raise OSError("the head hung up")

    monkeypatch.setattr(services, "take_questions", broken)
    membership = Membership(node.directory, asyncio.Event(), lambda *_: {})
    await membership.join(Node.load(node.file))
    await asking.wait()
    head_ends.set()
    # The connection has broken, and the loop has not seen it yet.
    await asyncio.sleep(0)
    await membership.close()


def test_a_node_ends_in_the_same_moment_as_its_head(
    make_node: Callable[..., RunningNode], monkeypatch: pytest.MonkeyPatch
) -> None:
    address = make_node("n1", cpu_slots=1).boot().scheduler
    worker = make_node("n2", head=False, scheduler=address, cpu_slots=1)
    asyncio.run(asyncio.wait_for(closes_while_its_head_ends(worker, monkeypatch), 20))


async def is_cancelled_from_within(node: RunningNode, monkeypatch: pytest.MonkeyPatch) -> int:
    """How often the connection asks for its head, where a cancellation that nobody wants comes while it does."""
    asked, again = 0, asyncio.Event()

    async def cancelled(*_: object, **__: object) -> None:
        nonlocal asked
        asked += 1
        if asked > 2:
            again.set()
        raise asyncio.CancelledError

    monkeypatch.setattr(start, "check_reachable", cancelled)
    connection = HeadConnection(Node.load(node.file), lambda _: None, lambda *_: {})
    await asyncio.wait_for(again.wait(), 20)
    connection.check()
    await asyncio.wait_for(connection.close(), 20)
    return asked


def test_a_head_that_is_cut_off_ends_no_runner(
    make_node: Callable[..., RunningNode], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A booted node's ended so, and was started again by systemd."""
    node = make_node("n2", head=False, scheduler="127.0.0.1:9", cpu_slots=1)
    assert asyncio.run(is_cancelled_from_within(node, monkeypatch)) >= 3
