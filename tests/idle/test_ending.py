"""The end of a machine, by root: a shutdown, or the group of the machine, asked as AWS wants it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from servers.auto_scaling import Groups, instance_of_a_group
from servers.metadata_service import AWS, MetadataService
from servers.rest import Rest, serving

from skyinfra.errors import InvalidField, NodeFailed
from skyinfra.idle import ending
from skyinfra.protocol.nodeconfig import NodeConfig


@pytest.fixture
def cloud(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[tuple[MetadataService, Groups, Path]]:
    """The metadata service of a machine, the API, and a file to which the machine's `systemctl` writes."""
    called = tmp_path / "called"
    (tmp_path / "bin").mkdir()
    program = tmp_path / "bin" / "systemctl"
    program.write_text(f'#!/bin/sh\necho "$@" >>{called}\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    with instance_of_a_group(monkeypatch) as (service, groups):
        yield service, groups, called


def configuration(folder: Path, provider: str = "aws", **fields: float) -> Path:
    file = folder / "node.json"
    config = NodeConfig(1, "demo", "train", "train-1", provider, False, "10.0.0.1:8786", cpu_slots=1, **fields)
    file.write_text(config.dumps())
    return file


Cloud = tuple[MetadataService, Groups, Path]


def test_an_instance_shuts_down(cloud: Cloud, tmp_path: Path) -> None:
    service, groups, called = cloud
    service.values[f"{AWS}tags/instance/skyinfra:node"] = "train-1"
    ending.end(configuration(tmp_path, idle_seconds=1800.0))
    assert called.read_text() == "--no-block poweroff\n"
    assert groups.asked == []


def test_an_instance_without_tags_shuts_down(cloud: Cloud, tmp_path: Path) -> None:
    service, groups, called = cloud
    del service.values[f"{AWS}tags/instance/skyinfra:role"]
    ending.end(configuration(tmp_path, idle_seconds=1800.0))
    assert called.read_text() == "--no-block poweroff\n"
    assert groups.asked == []


def test_a_machine_elsewhere_asks_no_metadata(cloud: Cloud, tmp_path: Path) -> None:
    service, _, called = cloud
    ending.end(configuration(tmp_path, "other", lifetime_seconds=1800.0))
    assert called.read_text() == "--no-block poweroff\n"
    assert service.asked == []


def test_an_instance_of_a_group_leaves_it_and_the_group_shrinks(cloud: Cloud, tmp_path: Path) -> None:
    _, groups, called = cloud
    ending.end(configuration(tmp_path, lifetime_seconds=1800.0))
    assert groups.asked == [
        {
            "Action": "TerminateInstanceInAutoScalingGroup",
            "InstanceId": "i-0123",
            "ShouldDecrementDesiredCapacity": "true",
            "Version": "2011-01-01",
        }
    ]
    # Shut down, it would be replaced.
    assert not called.exists()


def test_a_group_that_has_its_least_loses_the_instance_that_it_has_besides(cloud: Cloud, tmp_path: Path) -> None:
    _, groups, called = cloud
    groups.at_least = True
    ending.end(configuration(tmp_path, node_idle_seconds=600.0))
    assert [each["ShouldDecrementDesiredCapacity"] for each in groups.asked] == ["true", "false"]
    assert not called.exists()


def test_a_role_without_the_permission_is_named_and_nothing_shuts_down(cloud: Cloud, tmp_path: Path) -> None:
    _, groups, called = cloud
    groups.allows = False
    with pytest.raises(NodeFailed) as error:
        ending.end(configuration(tmp_path, idle_seconds=1800.0))
    assert "its group does not terminate this instance: HTTP Error 403" in str(error.value)
    assert "autoscaling:TerminateInstanceInAutoScalingGroup" in str(error.value)
    assert "s3cr3t" not in str(error.value)
    assert not called.exists()


def test_a_metadata_service_that_does_not_answer_ends_nothing(cloud: Cloud, tmp_path: Path) -> None:
    service, groups, called = cloud
    service.refuses = 500
    with pytest.raises(NodeFailed, match="500"):
        ending.end(configuration(tmp_path, idle_seconds=1800.0))
    assert not called.exists() and groups.asked == []


def test_a_machine_that_declares_no_end_stays(cloud: Cloud, tmp_path: Path) -> None:
    _, groups, called = cloud
    with pytest.raises(InvalidField, match="declares no end of this machine"):
        ending.end(configuration(tmp_path))
    assert not called.exists() and groups.asked == []


RENTED = "/v1/pods/abc123"


@pytest.fixture
def marketplace(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Rest]:
    """A marketplace, and what its container keeps to be deleted there."""
    with serving({RENTED: {}}) as rest:
        kept = tmp_path / "rented"
        kept.write_text(f"{rest.address}{RENTED} k3y-of-one")
        monkeypatch.setattr(ending, "_RENTED", kept)
        yield rest


def test_a_rented_container_is_deleted_with_its_own_key(cloud: Cloud, marketplace: Rest, tmp_path: Path) -> None:
    _, groups, called = cloud
    ending.end(configuration(tmp_path, "runpod", idle_seconds=1800.0))
    ((method, path, headers, body),) = marketplace.asked
    assert (method, path, body) == ("DELETE", RENTED, "")
    assert headers["Authorization"] == "Bearer k3y-of-one"
    # Named as Python's own, it would be refused by some.
    assert headers["User-Agent"] == "skyinfra"
    assert not called.exists() and groups.asked == []


def test_a_rented_container_that_is_gone_already_is_no_error(marketplace: Rest, tmp_path: Path) -> None:
    marketplace.answers[RENTED] = 404
    ending.end(configuration(tmp_path, "vastai", lifetime_seconds=1800.0))
    assert len(marketplace.asked) == 1


@pytest.mark.parametrize("status", [401, 403, 429, 500])
def test_a_marketplace_that_refuses_is_named_and_the_key_is_not(
    cloud: Cloud, marketplace: Rest, tmp_path: Path, status: int
) -> None:
    _, _, called = cloud
    marketplace.answers[RENTED] = status
    with pytest.raises(NodeFailed) as error:
        ending.end(configuration(tmp_path, "runpod", idle_seconds=1800.0))
    assert f"127.0.0.1 does not delete this container: HTTP Error {status}" in str(error.value)
    assert "skyinfra destroy" in str(error.value) and "k3y" not in str(error.value)
    assert not called.exists()


@pytest.mark.parametrize("kept", ["https://localhost:1/x k3y\nX: y", "no-address k3y", " k3y", "http://127.0.0.1:1/x "])
def test_what_a_marketplace_gave_may_be_anything(
    marketplace: Rest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kept: str
) -> None:
    (tmp_path / "rented").write_text(kept)
    with pytest.raises(NodeFailed, match="does not delete this container") as error:
        ending.end(configuration(tmp_path, "runpod", idle_seconds=1800.0))
    assert "k3y" not in str(error.value)


def test_a_rented_container_that_declares_no_end_stays(marketplace: Rest, tmp_path: Path) -> None:
    with pytest.raises(InvalidField, match="declares no end"):
        ending.end(configuration(tmp_path, "runpod"))
    assert marketplace.asked == []


def test_a_rented_container_ends_as_a_machine_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The end of its runner would be another start of it, which costs on."""
    config = NodeConfig(1, "s", "p", "p-0", "runpod", True, "h:1", cpu_slots=1, folder=str(tmp_path))
    monkeypatch.setattr(ending, "_SYSTEMD", tmp_path / "systemd")
    monkeypatch.setattr(ending, "_RENTED", tmp_path / "rented")
    assert ending.form(config) == "container"
    (tmp_path / "rented").touch()
    assert ending.form(config) == "machine"
