"""The end of a machine, by root: a shutdown, or the group of the machine, asked as AWS wants it."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qsl, urlsplit

import pytest
from botocore.auth import SigV4Auth
from botocore.awsrequest import AWSRequest
from botocore.credentials import Credentials
from servers.metadata_service import AWS, MetadataService

from skyinfra.errors import InvalidField, NodeFailed
from skyinfra.idle import ending
from skyinfra.protocol.nodeconfig import NodeConfig

ROLE = {"AccessKeyId": "ASIAEXAMPLE", "SecretAccessKey": "s3cr3t/key+x", "Token": "t0ken//with=="}


class Groups(ThreadingHTTPServer):
    """The API of Auto Scaling, which takes requests that the role has signed."""

    daemon_threads = True
    allows = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.asked: list[dict[str, str]] = []


class _Handler(BaseHTTPRequestHandler):
    server: Groups

    def log_message(self, *arguments: object) -> None:
        pass

    def do_GET(self) -> None:
        query = urlsplit(self.path).query
        request = AWSRequest("GET", f"http://{self.headers['Host']}/", params=dict(parse_qsl(query)))
        request.context["timestamp"] = self.headers["x-amz-date"]
        for name in ("X-Amz-Date", "X-Amz-Security-Token", "X-Amz-Content-SHA256"):
            request.headers[name] = self.headers[name]
        auth = SigV4Auth(Credentials(*ROLE.values()), "autoscaling", "eu-central-1")
        wanted = auth.signature(auth.string_to_sign(request, auth.canonical_request(request)), request)
        right = self.headers["Authorization"].endswith(f"Signature={wanted}")
        if right and self.server.allows:
            self.server.asked.append(dict(parse_qsl(query)))
        self.send_response(200 if right and self.server.allows else 403)
        self.end_headers()
        self.wfile.write(b"<Error><Code>AccessDenied</Code><StringToSign>s3cr3t/key+x</StringToSign></Error>")


@pytest.fixture
def cloud(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[tuple[MetadataService, Groups, Path]]:
    """The metadata service of a machine, the API, and a file to which the machine's `systemctl` writes."""
    service, groups = MetadataService(), Groups()
    roles = f"{AWS}iam/security-credentials/"
    service.values |= {roles: "node", f"{roles}node": json.dumps(ROLE), f"{AWS}placement/region": "eu-central-1"}
    service.values |= {f"{AWS}services/domain": "amazonaws.com", f"{AWS}instance-id": "i-0123"}
    service.values[f"{AWS}tags/instance/skyinfra:role"] = "worker"
    called = tmp_path / "called"
    (tmp_path / "bin").mkdir()
    program = tmp_path / "bin" / "systemctl"
    program.write_text(f'#!/bin/sh\necho "$@" >>{called}\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    monkeypatch.setenv("AWS_EC2_METADATA_SERVICE_ENDPOINT", service.url)
    monkeypatch.setenv("AWS_ENDPOINT_URL_AUTO_SCALING", f"http://127.0.0.1:{groups.server_address[1]}")
    for server in (service, groups):
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
    yield service, groups, called
    for server in (service, groups):
        server.shutdown()
        server.server_close()


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
