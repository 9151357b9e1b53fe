"""The layout in a tag of the head's instance, by a metadata service that speaks version 2 as EC2's does."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from local_fleets.running_node import h100
from servers.metadata_service import GCP, serving

from skyinfra import InvalidField, InvalidLayout, LayoutDoesNotFit, NodeFailed, UnknownProfile
from skyinfra.accelerators import Accelerator
from skyinfra.mig import layout_tag
from skyinfra.node.folder import NodeDirectory
from skyinfra.protocol.nodeconfig import VERSION, NodeAccelerator, NodeConfig
from skyinfra.runner.watch import Declared, Watch

FOUR = (("3g.40gb", 0, 4), ("3g.40gb", 4, 4))


class Metadata(ThreadingHTTPServer):
    """EC2's metadata service: a token first, then the tags, where they are allowed."""

    tag: str | None = None
    status = 200

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class Handler(BaseHTTPRequestHandler):
    server: Metadata

    def do_PUT(self) -> None:
        known = self.path == "/latest/api/token" and self.headers["X-aws-ec2-metadata-token-ttl-seconds"]
        self.answer(self.server.status if known else 400, "TOKEN")

    def do_GET(self) -> None:
        if self.headers["X-aws-ec2-metadata-token"] != "TOKEN":
            self.answer(401, "")
        elif self.path != "/latest/meta-data/tags/instance/skyinfra:layout" or self.server.tag is None:
            self.answer(404, "")
        else:
            self.answer(200, self.server.tag)

    def answer(self, status: int, text: str) -> None:
        self.send_response(status)
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def metadata() -> Iterator[Metadata]:
    with Metadata(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def node(folder: Path, accelerator: NodeAccelerator | None = None, *, head: bool = True, provider: str = "aws") -> Path:
    config = NodeConfig(
        VERSION, "s", "p", "p-0", provider, head, "10.0.0.1:8786", accelerator or h100(FOUR, FOUR), scheduler_only=head
    )
    file = folder / "node.json"
    file.write_text(config.dumps())
    return file


class Both:
    """What asks for the tag, and what the runner of the head makes of it."""

    def __init__(self, config: Path, metadata: Metadata) -> None:
        self.watch = Watch(config, endpoint=metadata.url)
        self.runner = Declared(config, NodeDirectory(config.parent))

    def check(self) -> bool:
        self.watch.check()
        return self.runner.take()


def desired(folder: Path) -> list[list[str]]:
    layouts = json.loads((folder / "desired-layout.json").read_text())["declared"].get("layouts", ())
    return [[partition["profile"] for partition in layout] for layout in layouts]


def test_another_layout_is_taken_over_once(metadata: Metadata, tmp_path: Path) -> None:
    watch = Both(node(tmp_path), metadata)
    assert not watch.check(), "there is no tag yet"
    metadata.tag = "3g.40gb"
    assert not watch.check(), "the configuration says the same"
    metadata.tag = "2g.20gb:3+1g.10gb"
    assert watch.check()
    assert desired(tmp_path) == [["2g.20gb"] * 3 + ["1g.10gb"]] * 2
    assert not watch.check()
    metadata.tag = "7g.80gb/1g.10gb:7"
    assert watch.check()
    assert desired(tmp_path) == [["7g.80gb"], ["1g.10gb"] * 7]
    metadata.tag = "off"
    assert watch.check()
    assert desired(tmp_path) == []
    metadata.tag = "3g.40gb"
    assert watch.check(), "back to what the configuration says"
    # What else writes the layout does not last, and nothing else is written.
    (tmp_path / "desired-layout.json").unlink()
    assert not watch.check(), "the configuration says it as well"
    (tmp_path / "desired-layout.json").write_text("{}")
    assert watch.check()
    assert desired(tmp_path) == [["3g.40gb"] * 2] * 2


def test_a_tag_that_the_runner_cannot_take_over_is_named(metadata: Metadata, tmp_path: Path) -> None:
    both = Both(node(tmp_path), metadata)
    (tmp_path / "declared-layout").write_text("9g.1gb")
    with pytest.raises(UnknownProfile, match="tag skyinfra:layout"):
        both.runner.take()
    assert not both.runner.take(), "told once"
    (tmp_path / "declared-layout").unlink()
    (tmp_path / "declared-layout").symlink_to("/etc/hostname")
    with pytest.raises(InvalidField, match="it is a link"):
        both.runner.take()
    assert not (tmp_path / "desired-layout.json").exists()


@pytest.mark.parametrize(
    "declared",
    ["H100:2/3g.40gb", "H100:2/3g.40gb+2g.20gb+1g.10gb*2", "H100:2/7g.80gb|1g.10gb*7", "H100:2", "H100:2/1g.10gb+me"],
)
def test_what_is_written_is_what_is_read(declared: str) -> None:
    accelerator = Accelerator.parse(declared)
    tag = layout_tag.write_tag(accelerator.mig)
    assert layout_tag.read_tag(tag, "h100_80gb", 2) == accelerator.layouts(2)


@pytest.mark.parametrize(
    ("tag", "error"),
    [("3g.20gb", UnknownProfile), ("4g.40gb:2", LayoutDoesNotFit), ("3g.40gb/3g.40gb/3g.40gb", InvalidLayout)],
)
def test_a_tag_that_cannot_be_changes_nothing(
    metadata: Metadata, tmp_path: Path, tag: str, error: type[Exception]
) -> None:
    watch = Both(node(tmp_path), metadata)
    metadata.tag = tag
    with pytest.raises(error, match="tag skyinfra:layout"):
        watch.check()
    assert not (tmp_path / "desired-layout.json").exists()


def test_a_metadata_service_that_refuses(metadata: Metadata, tmp_path: Path) -> None:
    metadata.status = 403
    with pytest.raises(NodeFailed, match="it answers 403"):
        Watch(node(tmp_path), endpoint=metadata.url).check()
    with pytest.raises(NodeFailed, match="metadata service does not say"):
        Watch(tmp_path / "node.json", endpoint="http://127.0.0.1:9").check()


def test_an_attribute_of_the_instance_on_google_cloud(tmp_path: Path) -> None:
    with serving() as service:
        config = node(tmp_path, provider="gcp")
        watch, runner = Watch(config, endpoint=service.url), Declared(config, NodeDirectory(tmp_path))
        watch.check()
        assert not runner.take(), "there is none yet"
        service.values[f"{GCP}attributes/skyinfra-layout"] = "7g.80gb/1g.10gb:7\n"
        watch.check()
        assert runner.take()
        assert desired(tmp_path) == [["7g.80gb"], ["1g.10gb"] * 7]
        service.refuses = 503
        with pytest.raises(NodeFailed, match="it answers 503"):
            watch.check()


def test_who_has_something_to_watch(tmp_path: Path) -> None:
    for other in ({"head": False}, {"provider": "local"}):
        with pytest.raises(InvalidField, match="only the head of a fleet on aws, gcp has something to watch"):
            Watch(node(tmp_path, **other))  # type: ignore[arg-type]
