"""A metadata service that answers as those of AWS, Google Cloud and Azure do."""

from __future__ import annotations

import contextlib
import hashlib
import json
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, urlsplit

AWS = "/latest/meta-data/"
GCP = "/computeMetadata/v1/instance/"
AZURE_EVENTS = "/metadata/scheduledevents"
AZURE_NAME = "/metadata/instance/compute/name"


class MetadataService(ThreadingHTTPServer):
    """``values`` holds the text of each path; ``token`` is the one that AWS's paths want, ``acknowledged`` what was."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.values: dict[str, str] = {}
        # Of the machine itself, on Google Cloud.
        self.attributes: dict[str, str] = {}
        self.token = "first"
        self.acknowledged: list[str] = []
        self.asked: list[str] = []
        # The status of every answer, in place of the right one; how long an answer takes.
        self.refuses: int | None = None
        self.slow_s = 0.0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def spot(self, action: str, end: float) -> None:
        when = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(end))
        self.values[f"{AWS}spot/instance-action"] = json.dumps({"action": action, "time": when})

    def rebalance(self) -> None:
        self.values[f"{AWS}events/recommendations/rebalance"] = json.dumps({"noticeTime": "2026-01-02T03:04:05Z"})

    def event(self, kind: str, machine: str, when: str = "") -> None:
        event = {"EventId": "E-1", "EventType": kind, "Resources": [machine], "NotBefore": when}
        self.values[AZURE_EVENTS] = json.dumps({"DocumentIncarnation": 1, "Events": [event]})


class _Handler(BaseHTTPRequestHandler):
    server: MetadataService

    def do_PUT(self) -> None:
        known = self.path == "/latest/api/token" and self.headers["X-aws-ec2-metadata-token-ttl-seconds"]
        self._answer(200 if known else 400, self.server.token)

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.acknowledged += [each["EventId"] for each in body["StartRequests"]]
        self._answer(200 if self.headers["Metadata"] == "true" else 400, "")

    def do_GET(self) -> None:
        parts = urlsplit(self.path)
        query = parse_qs(parts.query)
        self.server.asked.append(self.path)
        if parts.path.startswith(AWS) and self.headers["X-aws-ec2-metadata-token"] != self.server.token:
            self._answer(401, "")
            return
        if parts.path.startswith(GCP) and self.headers["Metadata-Flavor"] != "Google":
            self._answer(403, "")
            return
        if parts.path.startswith("/metadata/") and (self.headers["Metadata"] != "true" or "api-version" not in query):
            self._answer(400, "")
            return
        if parts.path == f"{GCP}attributes/" and query == {"recursive": ["true"], "alt": ["json"]}:
            self.server.values[parts.path] = json.dumps(self.server.attributes)
        before = self.server.values.get(parts.path)
        if query.get("wait_for_change") == ["true"] and query.get("last_etag", [_etag(before)]) == [_etag(before)]:
            deadline = time.monotonic() + float(query["timeout_sec"][0])
            while self.server.values.get(parts.path) == before and time.monotonic() < deadline:
                time.sleep(0.01)
        text = self.server.values.get(parts.path)
        self._answer(404 if text is None else 200, text or "")

    def _answer(self, status: int, text: str) -> None:
        time.sleep(self.server.slow_s)
        with contextlib.suppress(BrokenPipeError):
            self.send_response(self.server.refuses or status)
            self.send_header("ETag", _etag(text))
            self.end_headers()
            self.wfile.write(text.encode())

    def log_message(self, format: str, *args: object) -> None:
        pass


def _etag(text: str | None) -> str:
    return hashlib.sha256((text or "").encode()).hexdigest()[:16]


@contextlib.contextmanager
def serving() -> Iterator[MetadataService]:
    with MetadataService() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()
