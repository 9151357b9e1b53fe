"""Machines of Google Cloud that stand ready: what the head asks for, and what its watch does with that."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from servers.metadata_service import GCP, MetadataService, serving
from servers.rest import Rest
from servers.rest import serving as api

from skyinfra.elastic import clouds
from skyinfra.elastic.clouds import ATTRIBUTE, GoogleMachines, GroupWatch
from skyinfra.elastic.sizing import Sizing
from skyinfra.errors import InvalidNodeConfig
from skyinfra.node.folder import NodeDirectory
from skyinfra.protocol.nodeconfig import NodeConfig
from skyinfra.runner.watch import Watch

PATHS = {f"train-{number}": f"projects/p-1/zones/us-central1-a/instances/train-{number}-abc123" for number in range(4)}
TOKEN = "ya29.s3cr3t"


class Head:
    """A head on Google Cloud, the machines that it may start, and the API of Compute Engine."""

    def __init__(self, folder: Path, service: MetadataService, engine: Rest, patch: pytest.MonkeyPatch) -> None:
        self.folder, self.service, self.engine = folder, service, engine
        self.nodes: list[str] = []
        directory = NodeDirectory(folder)
        self.runner, self._watch = GoogleMachines(directory, lambda: self.nodes), GroupWatch("gcp", directory)
        self.attribute({"least": 0, "most": 4, "machines": PATHS})
        self.now = 1000.0
        patch.setattr(clouds, "since_boot", lambda: self.now)

    def attribute(self, document: object) -> None:
        self.service.values[GCP + ATTRIBUTE] = document if isinstance(document, str) else json.dumps(document)

    def watch(self) -> None:
        self._watch.check(self.service.values.get(GCP + ATTRIBUTE))

    @property
    def started(self) -> list[str]:
        asked = [(method, path, headers.get("Authorization")) for method, path, headers, _ in self.engine.asked]
        assert all((method, key) == ("POST", f"Bearer {TOKEN}") for method, _, key in asked)
        return [path.removesuffix("-abc123/start").rpartition("/")[2] for _, path, _ in asked]


@pytest.fixture
def head(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Head]:
    answers: dict[str, Any] = {f"/compute/v1/{path}/start": {"status": "PENDING"} for path in PATHS.values()}
    with serving() as service, api(answers) as engine:
        token = {"access_token": TOKEN, "expires_in": 3599, "token_type": "Bearer"}
        service.values[f"{GCP}service-accounts/default/token"] = json.dumps(token)
        monkeypatch.setenv("GCE_METADATA_HOST", service.url.removeprefix("http://"))
        monkeypatch.setenv("CLOUDSDK_API_ENDPOINT_OVERRIDES_COMPUTE", f"{engine.address}/compute/v1/")
        yield Head(tmp_path, service, engine, monkeypatch)


def test_the_machines_start_that_are_missing_and_each_once(head: Head) -> None:
    head.watch()
    assert head.runner.bounds() == (0, 4) and head.started == []
    head.runner.ask(2)
    head.watch()
    head.watch()
    assert head.started == ["train-0", "train-1"]
    assert head.engine.asked[0][1] == f"/compute/v1/{PATHS['train-0']}/start" and head.runner.problem() is None
    head.nodes = ["train-0", "train-1"]
    head.runner.ask(2)
    head.watch()
    assert len(head.started) == 2, "all of them are there"
    head.runner.ask(3)
    head.watch()
    assert head.started[2:] == ["train-2"]


def test_another_one_is_tried_where_one_did_not_come(head: Head) -> None:
    head.watch()
    for name in ("train-0", "train-1", "train-2", "train-3", "train-0"):
        head.runner.ask(1)
        head.watch()
        assert head.started[-1] == name
        head.now += GoogleMachines.patience_s


def test_one_that_boots_is_asked_for_again_and_no_other_one(head: Head) -> None:
    head.watch()
    sizing, asked = Sizing(GoogleMachines.patience_s, GoogleMachines.boot_s), 0
    for _ in range(200):
        head.now += 1
        if sizing.observe(len(head.nodes), 1, (0, 4), "a task waits", head.now, head.now):
            head.runner.ask(sizing.size)
            head.watch()
            asked += 1
        head.runner.tend()
    assert asked > 2 and set(head.started) == {"train-0"}
    head.runner.ask(3)
    head.watch()
    assert set(head.started) == {"train-0", "train-1", "train-2"}, "more of them where more are wanted"


def test_one_that_came_and_ended_is_not_waited_for(head: Head) -> None:
    head.watch()
    head.runner.ask(1)
    head.watch()
    head.nodes = ["train-0"]
    head.runner.tend()
    # It is about to stop, and takes no order to start.
    head.nodes = []
    head.runner.ask(1)
    head.watch()
    assert head.started == ["train-0", "train-1"]


def test_one_that_failed_is_not_waited_for(head: Head) -> None:
    head.watch()
    head.runner.ask(1)
    head.watch()
    head.runner.ask(0)
    head.runner.ask(1)
    head.watch()
    assert head.started == ["train-0", "train-1"]


def test_no_number_leads_beyond_what_is_declared(head: Head) -> None:
    head.watch()
    head.runner.ask(900)
    head.watch()
    assert head.started == list(PATHS)
    head.attribute({"least": 1, "most": 2, "machines": dict(list(PATHS.items())[:2])})
    head.watch()
    head.runner.ask(4)
    head.watch()
    assert head.started[4:] == ["train-0", "train-1"] and head.runner.bounds() == (1, 2)


def test_what_the_cloud_refuses_is_said_once_and_without_the_token(head: Head) -> None:
    path = f"/compute/v1/{PATHS['train-0']}/start"
    head.watch()
    head.engine.answers[path] = 403
    head.runner.ask(2)
    head.watch()
    assert head.started == ["train-0", "train-1"], "one that is refused keeps no other one from starting"
    problem = str(head.runner.problem())
    assert "does not start train-0" in problem and "needs compute.instances.start on it" in problem
    assert TOKEN not in problem and head.runner.problem() is None
    head.engine.answers[f"/compute/v1/{PATHS['train-2']}/start"] = 503
    head.runner.ask(1)
    head.watch()
    assert "503" in str(head.runner.problem())
    del head.service.values[f"{GCP}service-accounts/default/token"]
    head.runner.ask(1)
    head.watch()
    assert "no token to start train-3 with" in str(head.runner.problem())


def test_a_watch_that_starts_again_does_not_start_the_nodes_of_this_morning(
    head: Head, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    head.watch()
    head.runner.ask(4)
    later = time.time() + 3600
    monkeypatch.setattr("skyinfra.elastic.clouds.time.time", lambda: later)
    again = Head(tmp_path, head.service, head.engine, monkeypatch)
    again.watch()
    assert head.started == []
    again.runner.ask(1)
    again.watch()
    assert head.started == ["train-0"]


@pytest.mark.parametrize("text", ["many 5", "train-9 5", "../../x 5", "; 5", "\0"])
def test_what_is_no_request_is_none(head: Head, tmp_path: Path, text: str) -> None:
    (tmp_path / "group.request").write_text(text)
    head.watch()
    assert head.engine.asked == []


@pytest.mark.parametrize(
    "document",
    [
        "least most",
        {"least": 0, "most": 4},
        {"least": 0, "most": "x", "machines": PATHS},
        {"least": 0, "most": 1, "machines": {"train-0": "../../../v1/projects/other"}},
        {"least": 0, "most": 1, "machines": ["train-0"]},
        [],
    ],
)
def test_an_attribute_that_is_none_is_refused(head: Head, document: object) -> None:
    head.attribute(document)
    head.runner.ask(1)
    with pytest.raises(InvalidNodeConfig, match="JSON with least, most and machines"):
        head.watch()
    assert head.engine.asked == []


def test_the_watch_of_a_head_with_bounds_starts_machines(head: Head, tmp_path: Path) -> None:
    config = NodeConfig(
        1, "demo", "train", "train-head", "gcp", True, "0.0.0.0:1", cpu_slots=1, scheduler_only=True, max_nodes=4
    )
    file = tmp_path / "node.json"
    file.write_text(config.dumps())
    watch = Watch(file, endpoint=head.service.url)
    watch.check()
    head.runner.ask(2)
    watch.check()
    assert head.started == ["train-0", "train-1"]
    del head.service.values[GCP + ATTRIBUTE]
    head.runner.ask(4)
    watch.check()
    assert len(head.started) == 2
