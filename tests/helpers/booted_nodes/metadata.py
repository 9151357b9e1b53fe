"""The metadata service of one booted node: EC2's with ``http_tokens = "required"``, and Google Cloud's."""

from __future__ import annotations

import json
import re
import secrets
import socket
import threading
import time
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

# A folder of the service is a mapping: its listing names what is in it, folders with a slash.
Tree = dict[str, Any]
_VERSIONS = ("2009-04-04", "2016-09-02", "2018-09-24", "2021-03-23", "latest")
_LONGEST_TOKEN_S = 21600
_GOOGLE = "/computeMetadata/v1/"


class Metadata:
    """Serves on *listener*. What it says can be changed at any time: ``user_data``, ``tree``, ``tags``, `notice`.

    On Google Cloud: ``attributes``, ``preempted``. ``refused``: how many requests came without a token, or the header.
    """

    def __init__(self, listener: socket.socket, instance: str, address: str) -> None:
        self.user_data = b""
        self.tags: dict[str, str] = {}
        self.tree: Tree = {
            "ami-id": "ami-0123456789abcdef0",
            "hostname": f"ip-{address.replace('.', '-')}.ec2.internal",
            "instance-action": "none",
            "instance-id": instance,
            "instance-life-cycle": "spot",
            "instance-type": "p5.4xlarge",
            "local-hostname": f"ip-{address.replace('.', '-')}.ec2.internal",
            "local-ipv4": address,
            "mac": "02:00:00:00:00:01",
            "placement": {"availability-zone": "us-east-1a", "region": "us-east-1"},
            "tags": {"instance": self.tags},
        }
        self.attributes: dict[str, str] = {}
        self.preempted = "FALSE"
        self.refused = 0
        self._tokens: set[str] = set()
        self._identity = {"instanceId": instance, "region": "us-east-1", "privateIp": address, "accountId": "0"}
        handler = type("Handler", (_Handler,), {"metadata": self})
        self._server = ThreadingHTTPServer(listener.getsockname(), handler, bind_and_activate=False)
        self._server.socket.close()
        self._server.socket = listener
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.1}, daemon=True)
        self._thread.start()

    def notice(self, action: str, time: str) -> None:
        """EC2 takes the instance back: *action* (``terminate``) at *time* (ISO 8601)."""
        self.tree["spot"] = {"instance-action": json.dumps({"action": action, "time": time}), "termination-time": time}

    def recommend(self, time: str) -> None:
        """EC2 may soon take the instance back: a recommendation to rebalance, given at *time*."""
        self.tree["events"] = {"recommendations": {"rebalance": json.dumps({"noticeTime": time})}}

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def token(self) -> str:
        token = secrets.token_urlsafe(32)
        self._tokens.add(token)
        return token

    def accepts(self, token: str | None) -> bool:
        if token in self._tokens:
            return True
        self.refused += 1
        return False

    def of_google(self, path: str) -> str | None:
        """What stands at *path* below ``/computeMetadata/v1/``, None where nothing does."""
        place, _, query = path.partition("?")
        if place.startswith("instance/attributes/") and place.count("/") == 2 and not query:
            return self.attributes.get(place.rpartition("/")[2])
        return {
            "instance/attributes/": json.dumps(self.attributes),
            "instance/hostname": f"{self.tree['local-hostname']}",
            "instance/id": str(int(self.tree["instance-id"].removeprefix("i-"), 16)),
            "instance/maintenance-event": "NONE",
            "instance/preempted": self.preempted,
            "instance/zone": "projects/1/zones/us-central1-a",
            "project/attributes/": "{}",
        }.get(place)

    def find(self, path: str) -> bytes | None:
        """What stands at *path*, None where nothing does."""
        parts = [part for part in path.split("/") if part]
        if not parts:
            return "\n".join(_VERSIONS).encode()
        if parts[0] not in _VERSIONS:
            return None
        found: Any = {
            "meta-data": self.tree,
            "user-data": self.user_data,
            "dynamic": {"instance-identity": {"document": json.dumps(self._identity)}},
        }
        for part in parts[1:]:
            if not isinstance(found, dict) or part not in found:
                return None
            found = found[part]
        if isinstance(found, dict):
            found = "\n".join(f"{name}/" if isinstance(value, dict) else name for name, value in found.items())
        return found if isinstance(found, bytes) else str(found).encode()


class _Handler(BaseHTTPRequestHandler):
    metadata: Metadata

    def do_PUT(self) -> None:
        seconds = self.headers.get("X-aws-ec2-metadata-token-ttl-seconds", "")
        if self.path != "/latest/api/token":
            self._answer(HTTPStatus.NOT_FOUND)
        elif "X-Forwarded-For" in self.headers:
            self._answer(HTTPStatus.FORBIDDEN)
        elif not seconds.isdigit() or not 1 <= int(seconds) <= _LONGEST_TOKEN_S:
            self._answer(HTTPStatus.BAD_REQUEST)
        else:
            ttl = {"X-Aws-Ec2-Metadata-Token-Ttl-Seconds": seconds}
            self._answer(HTTPStatus.OK, self.metadata.token().encode(), **ttl)

    def do_GET(self) -> None:
        if self.path.startswith(_GOOGLE):
            self._of_google(self.path.removeprefix(_GOOGLE))
            return
        if not self.metadata.accepts(self.headers.get("X-aws-ec2-metadata-token")):
            self._answer(HTTPStatus.UNAUTHORIZED)
            return
        found = self.metadata.find(self.path)
        if found is None:
            self._answer(HTTPStatus.NOT_FOUND)
        else:
            self._answer(HTTPStatus.OK, found)

    def _of_google(self, path: str) -> None:
        if self.headers.get("Metadata-Flavor") != "Google":
            self.metadata.refused += 1
            self._answer(HTTPStatus.FORBIDDEN)
            return
        seen = re.search(r"last_etag=(\w+)", path)
        deadline = time.monotonic() + 5
        while seen and seen[1] == self.metadata.preempted and time.monotonic() < deadline:
            time.sleep(0.1)
        found = self.metadata.of_google(path)
        status = HTTPStatus.NOT_FOUND if found is None else HTTPStatus.OK
        self._answer(status, (found or "").encode(), ETag=self.metadata.preempted)

    def _answer(self, status: HTTPStatus, body: bytes = b"", **headers: str) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Type", "text/plain")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *arguments: object) -> None:
        """Nothing is logged."""
