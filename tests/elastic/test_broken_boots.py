"""Machines that came and became no nodes: how often they are tried, when that ends, and who is told."""

from __future__ import annotations

from pathlib import Path

import pytest
from servers.auto_scaling import instance_of_a_group
from servers.metadata_service import AWS

import skyinfra as sky
from skyinfra.bootstrap import user_data
from skyinfra.bootstrap.files import written
from skyinfra.compiler import compile_pool
from skyinfra.drain.notices import ec2_metadata
from skyinfra.elastic.clouds import TAG, AwsGroup, GroupWatch
from skyinfra.elastic.groups import LocalGroup
from skyinfra.elastic.sizing import Sizing
from skyinfra.node.folder import NodeDirectory

UNITS = "/etc/systemd/system"
HOUR = 3600.0


class Tries:
    """Work for 8 nodes at a place whose machines come and become no nodes."""

    def __init__(self) -> None:
        self.sizing = Sizing(900.0, 240.0)
        self.now, self.there = 1000.0, 0
        self.said: list[tuple[float, int]] = []

    def look(self, seconds: float = 1.0) -> None:
        self.now += seconds
        if self.sizing.observe(self.there, 8 - self.there, (0, 8), "8 tasks wait", self.now, self.now + 1e9):
            self.said.append((self.now, self.sizing.size))

    def until(self, size: int, within_s: float) -> None:
        """Looks every second until the place hears that size."""
        began, heard = self.now, len(self.said)
        while not any(said == size for _, said in self.said[heard:]):
            assert self.now - began <= within_s, self.said
            self.look()

    def machines_fail(self, count: int) -> list[bool]:
        return [self.sizing.broken(f"p-i-{number}: step packages: 404", self.now) for number in range(count)]


def test_a_broken_image_is_tried_three_times_and_by_one_machine_after_the_first() -> None:
    # https://github.com/aws/karpenter-provider-aws/issues/1135: 30 machines after an hour, for 10 replicas.
    tries = Tries()
    tries.until(8, 5)
    tries.look(300)
    # All of them fail in the same minute: that is one try.
    assert not any(tries.machines_fail(8)) and tries.sizing.failed == 1
    tries.look()
    assert tries.said[-1][1] == 0, "a group that still has the number replaces each machine that ends"
    tries.until(1, 61)
    tries.look(300)
    assert not any(tries.machines_fail(1))
    tries.until(1, 121)
    tries.look(300)
    assert tries.machines_fail(1) == [True]
    heard = len(tries.said)
    for _ in range(int(5.9 * HOUR / 60)):
        tries.look(60)
    assert {size for _, size in tries.said[heard:]} <= {0}
    assert "3 tries in a row gave machines that became no nodes, the last one: p-i-0: step" in str(tries.sizing.problem)
    assert str(tries.sizing.problem).endswith("asked again after 6h")
    tries.until(1, 0.2 * HOUR)


def test_machines_that_take_longer_to_fail_than_they_are_waited_for_count_too() -> None:
    tries = Tries()
    tries.until(8, 5)
    tries.look(901)
    assert "did not come within 15m" in str(tries.sizing.problem)
    tries.machines_fail(8)
    assert tries.sizing.failed == 1
    tries.look()
    assert tries.said[-1][1] == 0
    tries.until(1, 300)


def test_not_even_the_least_is_started_again_and_again() -> None:
    sizing, said, now = Sizing(900.0, 240.0), [], 0.0
    for _ in range(int(5 * HOUR)):
        now += 1
        if sizing.observe(0, 0, (2, 8), "", now, now):
            said.append(sizing.size)
            if sizing.size:
                sizing.broken("p-i-1: step packages: 404", now)
    assert said.count(2) == 1 and said.count(1) == 2 and said[-1] == 0


def test_work_that_comes_while_nothing_is_tried_is_told_why() -> None:
    tries = Tries()
    for _ in range(3):
        tries.until(1 if tries.sizing.failed else 8, 1000)
        tries.machines_fail(1)
    # The work of before has gone, and other work comes.
    tries.sizing.observe(0, 0, (0, 8), "", tries.now + 1, 1e9)
    assert tries.sizing.problem is None and tries.sizing.lack(False, 8, tries.now + 1) == ("", "")
    tries.look(10)
    lack, said = tries.sizing.lack(True, 8, tries.now)
    assert lack == "stopped" and "step packages: 404" in said and "`skyinfra keep`" in said and "in 5h 59m" in said


def test_somebody_who_changes_something_has_it_tried_at_once() -> None:
    tries = Tries()
    for _ in range(3):
        tries.until(1 if tries.sizing.failed else 8, 1000)
        tries.machines_fail(1)
    tries.sizing.try_again()
    tries.until(8, 1)


def test_one_bad_machine_stops_nothing() -> None:
    # https://github.com/ray-project/ray/issues/14264
    tries = Tries()
    tries.until(8, 5)
    tries.machines_fail(1)
    tries.look(60)
    tries.there = 7
    tries.look()
    assert tries.sizing.failed == 0 and tries.said[-1][1] == 8


def test_capacity_that_is_refused_is_no_broken_machine() -> None:
    # https://github.com/ray-project/ray/issues/27521: launching for ever, and never tried again.
    tries = Tries()
    tries.sizing.where = "why, says `aws ...`"
    for _ in range(int(8 * HOUR)):
        tries.look()
    assert tries.sizing.failed == 0 and tries.said[-1][0] > tries.now - 0.5 * HOUR and tries.said[-1][1] == 8
    assert "did not come within 15m (why, says `aws ...`)" in str(tries.sizing.problem)


def test_what_is_said_to_who_waits() -> None:
    tries = Tries()
    tries.look()
    tries.look(40)
    assert tries.sizing.lack(True, 8, tries.now) == (
        "starting",
        "8 of 8 nodes have been starting for 0s; one takes 4m as a rule",
    )
    assert "starting for 2m 5s;" in tries.sizing.lack(True, 8, tries.now + 125)[1]
    alone = Sizing(900.0, 240.0, size=1)
    assert alone.lack(True, 8, 0.0)[1] == "1 of 1 node has been starting for 0s; one takes 4m as a rule"
    tries.sizing.refused("the group says no", tries.now)
    # https://github.com/dstackai/dstack/issues/3108: an error, while it is tried again in the background.
    assert tries.sizing.lack(True, 8, tries.now + 20) == (
        "refused",
        "no more nodes have come for 0s: the group says no; the next try is in 40s",
    )
    assert tries.sizing.lack(True, 8, tries.now + 60)[1].endswith(
        "for 40s: the group says no; they are asked for again now"
    )
    tries.there = 8
    tries.look()
    assert tries.sizing.lack(False, 8, tries.now) == ("", "")
    assert tries.sizing.lack(True, 8, tries.now)[1].startswith("all 8 nodes that there may be have been there")


def test_a_local_node_that_does_not_start_is_broken_and_another_configuration_is_seen(tmp_path: Path) -> None:
    group = LocalGroup(NodeDirectory(tmp_path / "cpu-0"), "cpu", lambda: "127.0.0.1:1")
    assert group.made_of() is None and group.broken() == [] and group.problem() is None
    (tmp_path / "group.json").write_text("{}")
    assert group.made_of() == "{}"


def test_the_group_of_aws_is_named_with_where_it_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with instance_of_a_group(monkeypatch, "head") as (service, _):
        service.values[AWS + TAG] = "skyinfra-train-1 0 8"
        group, watch = AwsGroup(NodeDirectory(tmp_path)), GroupWatch("aws", NodeDirectory(tmp_path))
        assert group.made_of() is None and group.where() == ""
        watch.check(ec2_metadata(TAG, "which group it is of"))
        assert group.made_of() == "skyinfra-train-1"
        assert group.where().endswith("describe-scaling-activities --auto-scaling-group-name skyinfra-train-1`")
        # The module makes another group for nodes of another image.
        service.values[AWS + TAG] = "skyinfra-train-2 0 8"
        watch.check(ec2_metadata(TAG, "which group it is of"))
        assert group.made_of() == "skyinfra-train-2"


def test_machines_of_an_elastic_pool_that_cannot_be_set_up_end_and_others_stay() -> None:
    def units(nodes: object) -> tuple[str, str]:
        data = user_data(compile_pool(sky.ComputePool(provider=sky.AWS(), nodes=nodes), "demo"))  # type: ignore[arg-type]
        head, worker = (written(text)[f"{UNITS}/skyinfra-boot.service"] for text in (data.head, data.worker))
        return head, worker

    head, worker = units(sky.Range(0, 8))
    [line] = [line for line in worker.splitlines() if "poweroff" in line]
    # Not while a runner was started since the machine has: a task may run there.
    assert line.startswith("ExecStopPost=/bin/sh -c 'test -e /run/skyinfra/booted || test $$(cut")
    assert "poweroff" not in head and "poweroff" not in "".join(units(2))


@pytest.mark.parametrize(
    ("declared", "seconds"),
    [
        ({"stop_after_idle": "30m"}, 86_400),
        ({"max_lifetime": "12h"}, 43_200),
        ({"budget": sky.Budget(usd=200, action="stop")}, 3600),
    ],
)
def test_a_machine_that_declares_an_end_and_cannot_be_set_up_ends(declared: dict[str, object], seconds: int) -> None:
    """No runner is there, which would end it."""
    data = user_data(compile_pool(sky.ComputePool(provider=sky.AWS(), nodes=2, **declared), "demo"))  # type: ignore[arg-type]
    for text in (data.head, data.worker):
        [line] = [each for each in written(text)[f"{UNITS}/skyinfra-boot.service"].splitlines() if "poweroff" in each]
        assert f" -lt {seconds} " in line
