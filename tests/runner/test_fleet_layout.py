"""The layout of the head is the layout of the fleet: the other nodes learn it from the head, and keep it."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable

import pytest
from local_fleets.running_node import RunningNode, h100, until

from skyinfra import instance_info, mig
from skyinfra.desired import file as desired_file
from skyinfra.mig import Placement
from skyinfra.tasks import Task

# Each has a fleet of its own; tests/integration/test_quickstart.py has a layout that changes in `make test`.
pytestmark = pytest.mark.slow

MakeNode = Callable[..., RunningNode]

BIG = (("3g.40gb", 0, 4),)
SMALL = (("2g.20gb", 0, 2), ("2g.20gb", 2, 2), ("2g.20gb", 4, 2))
TINY = (("1g.10gb", 0, 1),)


def want(node: RunningNode, *layouts: tuple[tuple[str, int, int], ...]) -> None:
    """Declares the layouts, one for each GPU, as the tag of a head's machine does."""
    text = "/".join(text_of(layout) or "off" for layout in layouts)
    node.directory.declared_file.write_text(text)


def profiles(node: RunningNode) -> list[str | None]:
    return [slot.profile for slot in node.status().slots]


def has(node: RunningNode, *wanted: str) -> None:
    """Waits until *node* has these profiles and is ready."""
    until(
        lambda: node.status().state == "ready" and profiles(node) == list(wanted),
        f"{node.config.node} has {', '.join(wanted)}",
    )


def test_the_head_hands_its_layout_to_every_node(make_node: MakeNode) -> None:
    head = make_node("n1", accelerator=h100(BIG))
    address = head.boot().scheduler
    worker = make_node("n2", head=False, scheduler=address, accelerator=h100(BIG))
    late = make_node("n3", head=False, scheduler=address, accelerator=h100(BIG))
    pid = worker.boot().pid
    with head.pool(worker) as pool:
        assert sorted(Task(who) @ pool) == [("n1/0", "3g.40gb"), ("n2/0", "3g.40gb")]
        want(head, SMALL)
        has(head, *["2g.20gb"] * 3)
        has(worker, *["2g.20gb"] * 3)
        assert (worker.status().pid, worker.status().layout_from) == (pid, "head")
        assert (head.status().layouts, head.status().layout_from) == (("2g.20gb*3",), "metadata")
        # No slot of the old layout, which the client's manifest promises, is waited for, and no new one is forgotten.
        assert sorted(Task(who) @ pool) == [(f"n{n}/{i}", "2g.20gb") for n in (1, 2) for i in range(3)]
        # A node that joins late, with an old configuration, starts no worker for that.
        assert late.boot().slots[0].profile == "2g.20gb"
        assert late.quiet_log().count(": ready, process") == 3
        want(head, BIG)
        for node in (head, worker, late):
            has(node, "3g.40gb")
    for node in (head, worker, late):
        node.quiet_log()


def who() -> tuple[str, str | None]:
    info = instance_info()
    return info.slot, info.profile


def test_a_node_remembers_what_it_was_told(make_node: MakeNode) -> None:
    head = make_node("n1", accelerator=h100(BIG))
    address = head.boot().scheduler
    worker = make_node("n2", head=False, scheduler=address, accelerator=h100(BIG))
    worker.boot()
    want(head, SMALL)
    has(worker, *["2g.20gb"] * 3)
    has(head, *["2g.20gb"] * 3)
    worker.run("stop")
    head.run("stop")
    # It boots with its old configuration while the head is down.
    with worker.foreground("boot"):
        status = worker.until("serving")
        assert (status.layouts, status.layout_from) == (("2g.20gb*3",), "head")
        # A new configuration counts until the head says otherwise, which it does once it is up.
        worker.configure(accelerator=h100(TINY))
        os.kill(status.pid or 0, signal.SIGHUP)
        until(lambda: worker.status().layouts == ("1g.10gb",), "the new configuration counts")
        assert worker.status().layout_from == "node.json"
        head.boot()
        has(worker, *["2g.20gb"] * 3)
        assert worker.status().layout_from == "head"


def test_a_layout_that_cannot_be_changes_nothing(make_node: MakeNode) -> None:
    head = make_node("n1", accelerator=h100(BIG))
    address = head.boot().scheduler
    two_gpus = make_node("n2", head=False, scheduler=address, accelerator=h100(BIG, BIG))
    two_gpus.boot()
    with head.pool() as pool:
        pid = Task(os.getpid) >> pool.select(node="n1")
        for text, message in [
            ("{", "not the name of a profile"),
            ("", "not the name of a profile"),
            ("3g.40gb:0", "the count is a whole number from 1"),
            (f"{text_of(BIG)}/{text_of(BIG)}", "per_gpu holds 2 layouts for 1 GPU"),
            ("3g.40gb@1", "the profile does not start there"),
            ("3g.20gb@0", "h100_80gb has no profile of that name"),
            (text_of((*BIG, *SMALL)), "another partition is there"),
        ]:
            head.directory.declared_file.write_text(text)
            until(lambda message=message: message in str(head.status().error), message)
            assert (head.status().state, profiles(head)) == ("ready", ["3g.40gb"])
        # What it had before such a file came counts, also for a runner that starts with it.
        want(head, SMALL)
        has(head, *["2g.20gb"] * 3)
        assert head.status().error is None
        refused = until(lambda: two_gpus.status().error, "the node with two GPUs refuses what the head wants")
        assert refused == (
            "InvalidNodeConfig",
            "the head's layout.layouts: 1 layout, and this node has 2 accelerators\n"
            "One layout for each accelerator is needed.",
        )
        assert (two_gpus.status().state, profiles(two_gpus)) == ("ready", ["3g.40gb", "3g.40gb"])
        assert Task(os.getpid) >> pool.select(node="n1") != pid
    head.directory.declared_file.write_text("{")
    head.run("stop")
    assert [slot.profile for slot in head.boot().slots] == ["2g.20gb"] * 3
    assert head.status().layout_from == "metadata"
    until(lambda: "not the name of a profile" in str(head.status().error), "the head says what it cannot read")
    # What a task does to the file of the runner, which has its user, lasts as long as the runner does not look.
    head.directory.desired_file.write_text("{")
    until(lambda: head.directory.desired_file.read_text() != "{", "it is written anew")
    assert desired_file.read(head.directory).declared is not None
    assert [slot.profile for slot in head.status().slots] == ["2g.20gb"] * 3


def text_of(layout: tuple[tuple[str, int, int], ...]) -> str:
    return mig.placed_text(Placement(*place) for place in layout)


def test_a_head_that_comes_back_hands_its_layout_on(make_node: MakeNode) -> None:
    head = make_node("n1", accelerator=h100(BIG))
    address = head.boot().scheduler
    worker = make_node("n2", head=False, scheduler=address, accelerator=h100(BIG))
    worker.boot()
    head.run("stop")
    want(head, TINY)
    head.boot()
    has(worker, "1g.10gb")
    with head.pool(worker) as pool:
        until(lambda: len(pool.slots()) == 2, "both slots are registered")
        assert sorted(Task(who) @ pool) == [("n1/0", "1g.10gb"), ("n2/0", "1g.10gb")]


def test_a_node_that_may_not_partition_ends_what_goes_and_leaves_the_rest_to_root(make_node: MakeNode) -> None:
    node = make_node(accelerator=h100(BIG, BIG))
    node.run("partition")
    with node.foreground("serve"):
        pid = node.until("ready").pid
        kept = node.status().slots[1]
        node.configure(accelerator=h100(SMALL, BIG))
        os.kill(pid or 0, signal.SIGHUP)
        until(lambda: node.status().slots == (kept,), "what goes has ended, what stays has not")
        node.run("partition")
        os.kill(pid or 0, signal.SIGHUP)
        until(lambda: node.status().state == "ready" and len(node.status().slots) == 4, "it serves the new layout")
        assert kept in node.status().slots
