"""Cloud Storage on this machine: an emulator of its API behind what IAM refuses, and a node's metadata service."""

from __future__ import annotations

import json
import threading
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from http.server import HTTPServer
from typing import Any

from gcp_storage_emulator.handlers.buckets import create_bucket
from gcp_storage_emulator.server import RequestHandler
from gcp_storage_emulator.storage import Storage

_TOKEN = "/computeMetadata/v1/instance/service-accounts/default/token"


@dataclass
class CloudStorage:
    """A store with buckets whose access is uniform. below: the prefix of the condition by which the nodes' account is
    let in; "" for all of the bucket. may_not: a permission that it does not have."""

    address: str
    storage: Any
    below: str = ""
    may_not: str = ""

    def make(self, bucket: str) -> None:
        create_bucket(bucket, self.storage)

    def remove(self, bucket: str) -> None:
        for name in self.sizes(bucket):
            self.storage.delete_file(bucket, name)
        # Uploads that have begun.
        self.storage.resumable.clear()
        self.storage.delete_bucket(bucket)

    def put(self, bucket: str, name: str, body: bytes) -> None:
        query = urllib.parse.urlencode({"uploadType": "media", "name": name})
        url = f"http://{self.address}/upload/storage/v1/b/{bucket}/o?{query}"
        headers = {"Content-Type": "text/plain", "Authorization": "Bearer test"}
        with urllib.request.urlopen(urllib.request.Request(url, body, headers)):
            pass

    def get(self, bucket: str, name: str) -> bytes:
        return bytes(self.storage.get_file(bucket, name))

    def sizes(self, bucket: str) -> dict[str, int]:
        """The objects of a bucket and their sizes."""
        found, _ = self.storage.get_file_list(bucket)
        return {each["name"]: int(each["size"]) for each in found}

    def refused(self, method: str, url: urllib.parse.SplitResult) -> tuple[int, str] | None:
        """The status and the words by which IAM, or uniform access, refuses a request; None where it does not."""
        query = {name: values[0] for name, values in urllib.parse.parse_qs(url.query).items()}
        if {"predefinedAcl", "destinationPredefinedAcl"} & query.keys():
            return 400, "Cannot use ACL API to set object policy when object policies are disabled."
        _, _, name = url.path.partition("/o/")
        writes = method in ("POST", "PUT")
        if name:
            names = [urllib.parse.unquote(each) for each in name.replace("/rewriteTo/b/", "/o/").split("/o/")[::2]]
            right = "storage.objects.delete" if method == "DELETE" else "storage.objects.get"
            inside = all(each.startswith(self.below) for each in names)
        elif url.path.endswith("/o"):
            right = "storage.objects.create" if writes else "storage.objects.list"
            # Who may list may list all: it is asked of the bucket.
            inside = not writes or query.get("name", self.below).startswith(self.below)
        else:
            right, inside = "storage.buckets.get", False
        if inside and right != self.may_not:
            return None
        return 403, f"node@p.iam.gserviceaccount.com does not have {right} access. Permission '{right}' denied."


class _Handler(RequestHandler):  # type: ignore[misc]
    def __init__(self, store: CloudStorage, *arguments: Any) -> None:
        self.store = store
        super().__init__(store.storage, *arguments)

    def parse_request(self) -> bool:
        """Answers what IAM and the metadata service do, before the emulator sees it."""
        if not super().parse_request():
            return False
        url = urllib.parse.urlsplit(self.path)
        if url.path == _TOKEN and self.headers["Metadata-Flavor"] == "Google":
            return self._answer(200, {"access_token": "node", "expires_in": 3599, "token_type": "Bearer"})
        who = self.headers["Authorization"]
        # What has begun goes on by its upload_id; "test" is the test itself.
        if who == "Bearer test" or "upload_id=" in url.query:
            return True
        said = self.store.refused(self.command, url) if who == "Bearer node" else (401, "Anonymous caller")
        if said is None:
            return True
        code, message = said
        error = {"code": code, "message": message, "errors": [{"message": message, "reason": "forbidden"}]}
        return self._answer(code, {"error": error})

    def send_response(self, code: int, message: str | None = None) -> None:
        """Says 308 as Google does to its own libraries, which ask for that."""
        if code == 308 and self.headers["X-GUploader-No-308"]:
            super().send_response(200)
            self.send_header("X-HTTP-Status-Code-Override", "308")
        else:
            super().send_response(code, message)

    def _answer(self, code: int, document: dict[str, Any]) -> bool:
        self._read_all()
        body = json.dumps(document).encode()
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Metadata-Flavor", "Google")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
        return False

    def _read_all(self) -> None:
        """Reads what is sent: a connection that is closed before may take the answer with it."""
        if self.headers.get("Transfer-Encoding") != "chunked":
            self.rfile.read(int(self.headers.get("Content-Length") or 0))
            return
        while size := int(self.rfile.readline().partition(b";")[0] or b"0", 16):
            self.rfile.read(size + 2)
        self.rfile.readline()


@contextmanager
def cloud_storage(address: str = "127.0.0.1") -> Iterator[CloudStorage]:
    """Yields a store without buckets, on an *address* of this machine."""
    store = CloudStorage("", Storage(use_memory_fs=True))
    server = HTTPServer((address, 0), partial(_Handler, store))
    store.address = f"{address}:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield store
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
