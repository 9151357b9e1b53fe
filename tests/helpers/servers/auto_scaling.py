"""The API of Amazon EC2 Auto Scaling, and an instance whose role may use it."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qsl, urlsplit

import pytest
from botocore.auth import SigV4Auth
from botocore.awsrequest import AWSRequest
from botocore.credentials import Credentials

from servers.metadata_service import AWS, MetadataService

ROLE = {"AccessKeyId": "ASIAEXAMPLE", "SecretAccessKey": "s3cr3t/key+x", "Token": "t0ken//with=="}
# As it stands in issues of those who met it.
_AT_LEAST = (
    b"<Error><Code>ValidationError</Code><Message>Currently, desiredSize equals minSize (2). Terminating instance "
    b"without replacement will violate group's min size constraint. Either set shouldDecrementDesiredCapacity flag to "
    b"false or lower group's min size.</Message></Error>"
)
_DENIED = b"<Error><Code>AccessDenied</Code><StringToSign>s3cr3t/key+x</StringToSign></Error>"


class Groups(ThreadingHTTPServer):
    """The API, which takes requests that the role has signed. at_least: the group has its least number of nodes."""

    daemon_threads = True
    allows = True
    at_least = False

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.asked: list[dict[str, str]] = []


class _Handler(BaseHTTPRequestHandler):
    server: Groups

    def log_message(self, *arguments: object) -> None:
        pass

    def do_GET(self) -> None:
        query = urlsplit(self.path).query
        asked = dict(parse_qsl(query))
        request = AWSRequest("GET", f"http://{self.headers['Host']}/", params=asked)
        request.context["timestamp"] = self.headers["x-amz-date"]
        for name in ("X-Amz-Date", "X-Amz-Security-Token", "X-Amz-Content-SHA256"):
            request.headers[name] = self.headers[name]
        auth = SigV4Auth(Credentials(*ROLE.values()), "autoscaling", "eu-central-1")
        wanted = auth.signature(auth.string_to_sign(request, auth.canonical_request(request)), request)
        allowed = self.headers["Authorization"].endswith(f"Signature={wanted}") and self.server.allows
        shrinks = asked.get("ShouldDecrementDesiredCapacity") == "true"
        if allowed:
            self.server.asked.append(asked)
        self.send_response(403 if not allowed else 400 if shrinks and self.server.at_least else 200)
        self.end_headers()
        self.wfile.write(_AT_LEAST if allowed else _DENIED)


@contextlib.contextmanager
def instance_of_a_group(
    monkeypatch: pytest.MonkeyPatch, role: str = "worker"
) -> Iterator[tuple[MetadataService, Groups]]:
    """The metadata service of this machine, which is an instance with that *role* in its fleet, and the API."""
    service, groups = MetadataService(), Groups()
    roles = f"{AWS}iam/security-credentials/"
    service.values |= {roles: "node", f"{roles}node": json.dumps(ROLE), f"{AWS}placement/region": "eu-central-1"}
    service.values |= {f"{AWS}services/domain": "amazonaws.com", f"{AWS}instance-id": "i-0123"}
    service.values[f"{AWS}tags/instance/skyinfra:role"] = role
    monkeypatch.setenv("AWS_EC2_METADATA_SERVICE_ENDPOINT", service.url)
    monkeypatch.setenv("AWS_ENDPOINT_URL_AUTO_SCALING", f"http://127.0.0.1:{groups.server_address[1]}")
    for server in (service, groups):
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
    try:
        yield service, groups
    finally:
        for server in (service, groups):
            server.shutdown()
            server.server_close()
