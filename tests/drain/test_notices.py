"""What providers say of machines that they take back, and what becomes of it in the node's folder."""

from __future__ import annotations

import dataclasses
import email.utils
import json
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from local_fleets.running_node import h100
from servers.metadata_service import AZURE_EVENTS, AZURE_NAME, GCP, MetadataService, serving

from skyinfra import NodeFailed, NotSupported
from skyinfra.doctor import examine
from skyinfra.drain import request
from skyinfra.drain.notices import ENDPOINT, Notice
from skyinfra.drain.preemption import NoticeDocument, NoticeHandler, PreemptionWatch
from skyinfra.drain.request import Drain
from skyinfra.first_boot import fetch
from skyinfra.node import folder
from skyinfra.node.folder import NodeDirectory, Status
from skyinfra.protocol.nodeconfig import VERSION, NodeConfig
from skyinfra.runner import cli

WHOLE = ((), ())


class Both:
    """What asks the provider about the node with that configuration, and what its runner makes of it."""

    def __init__(self, config: Path) -> None:
        self.watch = PreemptionWatch(config)
        self.runner = NoticeHandler(NodeDirectory(config.parent))

    def poll(self) -> Notice | None:
        try:
            return self.watch.poll()
        finally:
            self.runner.poll()


@pytest.fixture
def metadata(monkeypatch: pytest.MonkeyPatch) -> Iterator[MetadataService]:
    with serving() as service:
        monkeypatch.setenv(ENDPOINT, service.url)
        yield service


def node(path: Path, provider: str, *, gpus: bool = True) -> Path:
    what = {"accelerator": h100(*WHOLE)} if gpus else {"cpu_slots": 1}
    file = path / "node.json"
    file.write_text(NodeConfig(VERSION, "s", "p", "p-0", provider, True, "10.0.0.1:8786", **what).dumps())
    return file


def asked(path: Path) -> Drain | None:
    return request.find(NodeDirectory(path))


def test_a_spot_notice_of_aws(metadata: MetadataService, tmp_path: Path) -> None:
    watcher = Both(node(tmp_path, "aws"))
    assert watcher.poll() is None
    assert asked(tmp_path) is None
    end = time.time() // 1 + 120
    metadata.spot("terminate", end)
    watcher.poll()
    found = asked(tmp_path)
    assert found is not None
    assert (found.by, found.if_others, found.boot) == ("aws", False, request.this_boot())
    assert found.until == end - 10
    assert found.why.startswith("AWS takes the spot instance back (terminate at 20")
    # The token runs out.
    metadata.token = "second"
    watcher.poll()
    assert asked(tmp_path) == found
    # An instance that was hibernated comes back, and nothing stands any more.
    metadata.values.clear()
    watcher.poll()
    assert asked(tmp_path) is None


def test_a_recommendation_of_aws_is_not_certain(metadata: MetadataService, tmp_path: Path) -> None:
    watcher = Both(node(tmp_path, "aws"))
    metadata.rebalance()
    watcher.poll()
    found = asked(tmp_path)
    assert found is not None
    assert (found.if_others, found.until, found.why) == (True, None, "AWS recommends to leave the spot instance")
    # What a person undid stays undone, until something else is said.
    request.clear(NodeDirectory(tmp_path))
    watcher.poll()
    assert asked(tmp_path) is None
    # Also where the runner, or what asks the provider, has started again meanwhile.
    watcher = Both(tmp_path / "node.json")
    watcher.poll()
    assert asked(tmp_path) is None
    metadata.spot("stop", time.time() + 120)
    watcher.poll()
    assert (asked(tmp_path) or found).if_others is False


def test_what_a_person_asked_for_counts_unless_the_provider_is_sooner(
    metadata: MetadataService, tmp_path: Path
) -> None:
    watcher = Both(node(tmp_path, "aws"))
    mine = Drain(request.VERSION, request.OPERATOR, "maintenance", time.time() + 600)
    request.write(NodeDirectory(tmp_path), mine)
    watcher.poll()
    metadata.rebalance()
    watcher.poll()
    assert asked(tmp_path) == mine
    metadata.spot("terminate", end := time.time() + 120)
    watcher.poll()
    both = asked(tmp_path) or mine
    assert both.until == pytest.approx(end - 10, abs=1) and both.why.startswith("maintenance; AWS takes")
    # It holds after the notice: a person undoes it.
    assert (both.by, both.boot) == (request.OPERATOR, None)
    metadata.values.clear()
    watcher.poll()
    assert asked(tmp_path) == both


def test_a_person_gives_tasks_no_more_time_than_the_provider(metadata: MetadataService, tmp_path: Path) -> None:
    watcher = Both(node(tmp_path, "aws"))
    metadata.spot("terminate", end := time.time() + 120)
    watcher.poll()
    assert cli.main(["drain", "--config", str(tmp_path / "node.json"), "--timeout", "600"]) == 0
    found = asked(tmp_path)
    assert found is not None and found.by == request.OPERATOR
    assert found.until == pytest.approx(end - 10, abs=1)


@pytest.mark.parametrize("by", [request.UPGRADE, request.IDLE, request.LIFETIME])
def test_a_recommendation_replaces_no_request(metadata: MetadataService, tmp_path: Path, by: str) -> None:
    watcher = Both(node(tmp_path, "aws"))
    before = Drain(request.VERSION, by, "it is the time", time.time() + 600)
    request.write(NodeDirectory(tmp_path), before)
    metadata.rebalance()
    watcher.poll()
    assert asked(tmp_path) == before
    metadata.spot("terminate", time.time() + 120)
    watcher.poll()
    assert (asked(tmp_path) or before).by == "aws"


@pytest.mark.parametrize(("gpus", "ahead"), [(True, 3590), (False, 50)])
def test_maintenance_of_google_cloud(metadata: MetadataService, tmp_path: Path, gpus: bool, ahead: float) -> None:
    metadata.values = {f"{GCP}preempted": "FALSE", f"{GCP}maintenance-event": "NONE"}
    watcher = Both(node(tmp_path, "gcp", gpus=gpus))
    assert watcher.poll() is None
    metadata.values[f"{GCP}maintenance-event"] = "TERMINATE_ON_HOST_MAINTENANCE"
    now = time.time()
    notice = Both(tmp_path / "node.json").poll()
    assert notice is not None
    assert notice.until == pytest.approx(now + ahead, abs=5)
    assert (asked(tmp_path) or request.Drain(0, "", "")).by == "gcp"


def test_maintenance_is_one_notice_where_its_service_starts_again(metadata: MetadataService, tmp_path: Path) -> None:
    metadata.values = {f"{GCP}preempted": "FALSE", f"{GCP}maintenance-event": "TERMINATE_ON_HOST_MAINTENANCE"}
    config = node(tmp_path, "gcp", gpus=True)
    Both(config).poll()
    found = asked(tmp_path)
    time.sleep(0.01)
    Both(config).poll()
    assert found is not None and asked(tmp_path) == found
    request.clear(NodeDirectory(tmp_path))
    Both(config).poll()
    assert asked(tmp_path) is None, "what a person has undone is not asked for again"


def test_preemption_of_google_cloud_is_waited_for(metadata: MetadataService, tmp_path: Path) -> None:
    metadata.values = {f"{GCP}preempted": "FALSE", f"{GCP}maintenance-event": "NONE"}
    watcher = Both(node(tmp_path, "gcp"))
    watcher.poll()
    metadata.values[f"{GCP}preempted"] = "TRUE"
    began = time.time()
    notice = watcher.poll()
    assert notice is not None
    # Seen later, it is still the same one.
    metadata.values[f"{GCP}preempted"] = "TRUE\n"
    assert watcher.poll() == notice
    assert notice.until == pytest.approx(began + 22.5, abs=5)
    assert any("preempted?wait_for_change=true&timeout_sec=10&last_etag=" in path for path in metadata.asked)


def test_an_event_of_azure_is_acknowledged_once_nothing_runs(metadata: MetadataService, tmp_path: Path) -> None:
    config = node(tmp_path, "azure")
    metadata.values[AZURE_NAME] = "vm-7"
    metadata.event("Preempt", "another-vm")
    watcher = Both(config)
    assert watcher.poll() is None
    metadata.event("Freeze", "vm-7")
    assert watcher.poll() is None
    end = time.time() // 1 + 30
    metadata.event("Preempt", "vm-7", email.utils.formatdate(end, usegmt=True))
    directory = NodeDirectory(tmp_path)
    with directory.held():
        status = Status("s/p", "p-0", "draining", "")
        directory.write(directory.status_file, status.dumps())
        watcher.poll()
        assert asked(tmp_path) == Drain(
            request.VERSION, "azure", "Azure takes the spot machine back", pytest.approx(end - 7.5, abs=2),
            boot=request.this_boot(),
        )  # fmt: skip
        assert metadata.acknowledged == []
        directory.write(directory.status_file, dataclasses.replace(status, state="drained").dumps())
        watcher.poll()
        watcher.poll()
    assert metadata.acknowledged == ["E-1"]
    metadata.values[AZURE_EVENTS] = json.dumps({"DocumentIncarnation": 2, "Events": []})
    watcher.poll()
    assert asked(tmp_path) is None


@pytest.mark.parametrize("text", ["[]", "not json", "3"])
def test_an_answer_that_is_none(metadata: MetadataService, tmp_path: Path, text: str) -> None:
    metadata.values["/latest/meta-data/spot/instance-action"] = text
    with pytest.raises(NodeFailed, match="does not answer with a JSON object"):
        Both(node(tmp_path, "aws")).poll()
    assert asked(tmp_path) is None


def test_a_silent_service_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ENDPOINT, "http://127.0.0.1:9")
    file = node(tmp_path, "aws")
    mine = Drain(request.VERSION, "aws", "taken back", None, boot=request.this_boot())
    request.write(NodeDirectory(tmp_path), mine)
    with pytest.raises(NodeFailed, match="does not say whether the machine is taken back"):
        Both(file).poll()
    assert asked(tmp_path) == mine


@pytest.mark.parametrize("refused", [403, 500, None])
def test_notices_that_cannot_be_read_are_told_until_they_can(
    metadata: MetadataService, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refused: int | None
) -> None:
    watcher = Both(node(tmp_path, "aws"))
    directory = NodeDirectory(tmp_path)
    assert watcher.poll() is None and directory.unwarned() is None
    metadata.refuses = refused
    if refused is None:
        monkeypatch.setattr(fetch, "_METADATA_S", 0.2)
        metadata.slow_s = 1.0
    for _ in range(2):
        with pytest.raises(NodeFailed):
            watcher.poll()
    why = "timed out" if refused is None else f"it answers {refused}"
    found = directory.unwarned() or ""
    assert found.startswith("the metadata service does not say whether the machine is taken back") and why in found
    (finding,) = examine._notices(directory)
    assert (finding.result, finding.found) == ("wrong", found)
    assert "tasks are not warned" in finding.to_do
    metadata.refuses, metadata.slow_s = None, 0.0
    watcher.poll()
    assert directory.unwarned() is None and list(examine._notices(directory)) == []
    # Of an earlier boot.
    directory.write(directory.unwarned_file, "it was so")
    Both(tmp_path / "node.json").poll()
    assert directory.unwarned() is None


def test_a_provider_without_notices(tmp_path: Path) -> None:
    with pytest.raises(NotSupported, match="gives no notice"):
        PreemptionWatch(node(tmp_path, "vastai"))


def test_a_notice_of_an_earlier_boot_is_over(tmp_path: Path) -> None:
    directory = NodeDirectory(tmp_path)
    request.write(directory, Drain(request.VERSION, "aws", "taken back", None, boot="another"))
    assert request.find(directory) is None
    request.write(directory, Drain(request.VERSION, request.OPERATOR, "by hand", None))
    assert request.find(directory) is not None


def test_a_message_that_is_gone_withdraws_nothing(metadata: MetadataService, tmp_path: Path) -> None:
    """The folder of a service goes when it ends, and comes back with it."""
    watcher = Both(node(tmp_path, "aws"))
    metadata.spot("terminate", time.time() + 120)
    watcher.poll()
    found = asked(tmp_path)
    (tmp_path / "notice.json").unlink()
    watcher.runner.poll()
    assert found is not None and asked(tmp_path) == found


def test_a_message_that_cannot_be_read_changes_nothing(
    metadata: MetadataService, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    runner = NoticeHandler(NodeDirectory(tmp_path))
    for text in ("", "[]", '{"version": 2}', '{"version": 1, "drain": 3}'):
        (tmp_path / "notice.json").write_text(text)
        runner.poll()
        assert asked(tmp_path) is None
        assert "notice.json" in caplog.text
        caplog.clear()
    drain = Drain(request.VERSION, "aws", "taken back", None, boot="another")
    (tmp_path / "notice.json").write_text(json.dumps(NoticeDocument(1, "of an earlier boot", drain).to_json()))
    runner.poll()
    assert not (tmp_path / "drain.json").exists()


def test_a_message_below_run_is_of_this_boot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In containers each service may see another name of the boot."""
    monkeypatch.setattr(folder, "_RUN", tmp_path / "run")
    own = tmp_path / "run/skyinfra-interrupt"
    own.mkdir(parents=True)
    drain = Drain(request.VERSION, "aws", "taken back", None, boot="of the service")
    (own / "notice.json").write_text(json.dumps(NoticeDocument(1, "a key", drain).to_json()))
    NoticeHandler(NodeDirectory(tmp_path, tmp_path / "root")).poll()
    assert asked(tmp_path) == dataclasses.replace(drain, boot=request.this_boot())
