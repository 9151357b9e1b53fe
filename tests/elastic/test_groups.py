"""Where nodes come from: the group of AWS by the watch of the head, and folders beside the head of a local fleet."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from servers.auto_scaling import Groups, instance_of_a_group
from servers.metadata_service import AWS, MetadataService

from skyinfra.drain.notices import ec2_metadata
from skyinfra.elastic import clouds
from skyinfra.elastic.clouds import TAG, AwsGroup, GroupWatch
from skyinfra.elastic.containers import ContainerGroup
from skyinfra.elastic.groups import LocalGroup, group_of
from skyinfra.errors import InvalidNodeConfig, NodeFailed, StateDirectoryError
from skyinfra.node.folder import NodeDirectory
from skyinfra.protocol.nodeconfig import NodeConfig
from skyinfra.runner.watch import Watch

GROUP = "skyinfra-train-20261126"


class Head:
    """A head on AWS: what its runner asks for, and what its watch does."""

    def __init__(self, folder: Path, service: MetadataService, groups: Groups) -> None:
        self.folder, self.service, self.groups = folder, service, groups
        directory = NodeDirectory(folder)
        self.runner, self._watch = AwsGroup(directory), GroupWatch("aws", directory)
        self.tag(f"{GROUP} 0 8")

    def tag(self, text: str) -> None:
        self.service.values[AWS + TAG] = text

    def watch(self) -> None:
        self._watch.check(ec2_metadata(TAG, "which group it is of"))

    @property
    def sizes(self) -> list[int]:
        return [int(each["DesiredCapacity"]) for each in self.groups.asked]


@pytest.fixture
def head(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Head]:
    with instance_of_a_group(monkeypatch, "head") as (service, groups):
        yield Head(tmp_path, service, groups)


def test_the_watch_asks_its_own_group_once_for_each_request(head: Head) -> None:
    head.watch()
    assert head.runner.bounds() == (0, 8) and head.groups.asked == []
    head.runner.ask(3)
    head.watch()
    head.watch()
    [asked] = head.groups.asked
    assert asked == {
        "Action": "SetDesiredCapacity",
        "AutoScalingGroupName": GROUP,
        "DesiredCapacity": "3",
        "Version": "2011-01-01",
    }
    assert head.runner.problem() is None


def test_no_number_leads_beyond_what_is_declared(head: Head) -> None:
    for size, asked in ((900, 8), (10**40, 8)):
        head.runner.ask(size)
        head.watch()
        assert head.sizes[-1] == asked
    head.tag(f"{GROUP} 2 4")
    head.runner.ask(0)
    head.watch()
    # The head holds the least: a group whose machines become no nodes is to replace none of them.
    assert head.sizes[-1] == 0 and head.runner.bounds() == (2, 4)
    head.runner.ask(9)
    head.watch()
    assert head.sizes[-1] == 4


def test_a_role_without_the_permission_is_said(head: Head) -> None:
    head.groups.allows = False
    head.runner.ask(0)
    head.watch()
    problem = str(head.runner.problem())
    assert "does not take the size 0" in problem and "needs autoscaling:SetDesiredCapacity" in problem
    assert "s3cr3t" not in problem
    assert head.runner.problem() is None, "it is told once"
    head.groups.allows = True
    head.runner.ask(1)
    head.watch()
    assert head.sizes == [1] and head.runner.problem() is None


def test_an_old_refusal_is_no_answer_to_a_new_request(head: Head) -> None:
    head.groups.allows = False
    head.runner.ask(2)
    head.watch()
    assert head.runner.problem() is not None
    head.groups.allows = True
    head.runner.ask(3)
    # The watch looks a second later.
    assert head.runner.problem() is None
    head.watch()
    assert head.runner.problem() is None
    # The same refusal of another request is another one.
    head.groups.allows = False
    for size in (4, 2):
        head.runner.ask(size)
        head.watch()
        assert "does not take the size" in str(head.runner.problem())
    # A runner that starts hears what became of the last request.
    again = AwsGroup(NodeDirectory(head.folder))
    assert again.problem() is not None and again.problem() is None


def test_a_watch_that_starts_again_does_not_start_the_nodes_of_this_morning(
    head: Head, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    head.runner.ask(8)
    head.watch()
    assert head.sizes == [8]
    # All of them have ended since then.
    later = time.time() + 3600
    monkeypatch.setattr(clouds.time, "time", lambda: later)
    again = Head(tmp_path, head.service, head.groups)
    again.watch()
    again.watch()
    assert head.sizes == [8]
    again.runner.ask(1)
    again.watch()
    assert head.sizes == [8, 1]


def test_a_request_that_waits_for_the_first_watch_is_done(head: Head) -> None:
    head.runner.ask(2)
    head.watch()
    assert head.sizes == [2]


def test_what_is_no_request_is_none(head: Head, tmp_path: Path) -> None:
    request = tmp_path / "group.request"
    for text in ("", "many 5", "-3 5", "3; rm -rf / 5", "\0"):
        request.write_text(text)
        head.watch()
    request.unlink()
    (tmp_path / "elsewhere").write_text("7 1")
    request.symlink_to(tmp_path / "elsewhere")
    head.watch()
    request.unlink()
    os.mkfifo(request)
    head.watch()
    assert head.groups.asked == []


def test_an_instance_without_the_tag_has_no_group(head: Head) -> None:
    del head.service.values[AWS + TAG]
    head.runner.ask(3)
    head.watch()
    assert head.groups.asked == [] and head.runner.bounds() is None
    head.tag("one word")
    with pytest.raises(InvalidNodeConfig, match="least and most"):
        head.watch()


def test_the_watch_of_a_head_with_bounds_asks_the_group(head: Head, tmp_path: Path) -> None:
    config = NodeConfig(
        1, "demo", "train", "train-head", "aws", True, "0.0.0.0:1", cpu_slots=1, scheduler_only=True, max_nodes=8
    )
    file = tmp_path / "node.json"
    file.write_text(config.dumps())
    head.runner.ask(2)
    Watch(file, endpoint=head.service.url).check()
    assert head.sizes == [2] and json.loads((tmp_path / "group.state").read_text())["asked"] == 2


def test_a_group_that_is_being_destroyed_gets_no_node(tmp_path: Path) -> None:
    group = LocalGroup(NodeDirectory(tmp_path / "cpu-0"), "cpu", lambda: "127.0.0.1:1")
    group.ask(3)
    assert list(tmp_path.iterdir()) == [] and group.held() == 0


def test_a_head_that_takes_over_a_folder_that_is_just_made_goes_on(tmp_path: Path) -> None:
    group = LocalGroup(NodeDirectory(tmp_path / "cpu-0"), "cpu", lambda: "127.0.0.1:1")
    (tmp_path / "group.json").write_text("{}")
    (tmp_path / "cpu-group-1").mkdir()
    group.tend()
    assert group.held() == 1


def test_what_an_ended_node_has_left_is_removed_and_nothing_else(tmp_path: Path) -> None:
    group = LocalGroup(NodeDirectory(tmp_path / "cpu-0"), "cpu", lambda: "127.0.0.1:1")
    for name in ("cpu-group-1", "cpu-0", "cpu-1", "head"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "runner.lock").touch()
    (tmp_path / "cpu-group-2").mkdir()  # another head has just begun with it
    group.tend()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cpu-0", "cpu-1", "cpu-group-2", "head"]
    assert group.held() == 1


def test_other_places_are_refused(tmp_path: Path) -> None:
    with pytest.raises(NodeFailed, match="starts no nodes of azure"):
        group_of("azure", NodeDirectory(tmp_path), "p", lambda: None, list)


class Containers:
    """What the containers p-1 to p-4 share, and what those do that are set up."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "wanted").mkdir()
        self.write("bounds", "0 4")
        self.group = ContainerGroup("p", folder)

    def write(self, name: str, text: str) -> None:
        (self.folder / name).write_text(text)

    def end(self, name: str) -> None:
        """The start of a node ends that is wanted."""
        self.write(name, (self.folder / "wanted" / name).read_text())

    def running(self) -> list[str]:
        starts = {path.name: int(path.read_text()) for path in (self.folder / "wanted").iterdir()}
        return sorted(name for name, wanted in starts.items() if wanted > int((self.folder / name).read_text()))


@pytest.fixture
def containers(tmp_path: Path) -> Containers:
    found = Containers(tmp_path)
    for number in (1, 2, 3, 10):
        found.write(f"p-{number}", "0")
    return found


def test_containers_start_that_are_set_up_and_each_once(containers: Containers) -> None:
    group = containers.group
    assert (group.bounds(), group.held()) == ((0, 4), 0)
    group.ask(2)
    group.ask(2)
    assert containers.running() == ["p-1", "p-2"] and group.held() == 2
    # There may be four, of which three are set up; what is left of a tenth is none.
    group.ask(4)
    assert containers.running() == ["p-1", "p-2", "p-3"] and group.held() == 3
    containers.write("p-4", "0")
    group.ask(4)
    assert group.held() == 4


def test_a_container_whose_node_has_ended_starts_again_when_it_is_wanted(containers: Containers) -> None:
    group = containers.group
    group.ask(3)
    containers.end("p-2")
    assert group.held() == 2
    # Fewer are no order to end: nodes end themselves.
    group.ask(1)
    assert containers.running() == ["p-1", "p-3"]
    group.ask(3)
    assert containers.running() == ["p-1", "p-2", "p-3"]
    assert (containers.folder / "wanted/p-2").read_text() == "2\n"
    # Another head finds what this one has asked for.
    assert ContainerGroup("p", containers.folder).held() == 3


def test_another_range_reaches_the_group_while_it_runs(containers: Containers) -> None:
    containers.group.ask(3)
    containers.write("bounds", "1 2")
    assert containers.group.bounds() == (1, 2) and containers.group.held() == 2
    containers.write("bounds", "1 12")
    containers.group.ask(4)
    assert containers.running() == ["p-1", "p-10", "p-2", "p-3"]


@pytest.mark.parametrize("text", ["", "many", "1", "1 2 3", "-"])
def test_bounds_that_are_none_leave_those_of_the_head(containers: Containers, text: str) -> None:
    containers.write("bounds", text)
    assert containers.group.bounds() is None
    containers.group.ask(4)
    assert containers.group.held() == 4


def test_what_a_task_puts_there_is_no_number(containers: Containers) -> None:
    wanted = containers.folder / "wanted"
    os.mkfifo(wanted / "p-1")
    (containers.folder / "elsewhere").write_text("7")
    (wanted / "p-2").symlink_to(containers.folder / "elsewhere")
    (wanted / "p-3").write_text("-7")
    assert containers.group.held() == 0
    containers.group.ask(3)
    assert containers.group.held() == 3 and (containers.folder / "elsewhere").read_text() == "7"


def test_a_head_without_the_folder_says_so(tmp_path: Path) -> None:
    (tmp_path / "p-1").write_text("0")
    with pytest.raises(StateDirectoryError, match="wanted"):
        ContainerGroup("p", tmp_path).ask(1)
