"""A bucket of a moto server in this process, whose network fails when a test says so, and which compares MD5s as S3."""

from __future__ import annotations

import base64
import hashlib
import io
import socket
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import cached_property
from typing import Any

import boto3
from moto.s3 import models
from moto.server import create_backend_app
from werkzeug.serving import WSGIRequestHandler, make_server

NAME = "runs"
# Of an upload in parts, but for the last one; 5 MiB on S3.
LEAST_PART = 2**10
_REFUSED = b"<?xml version='1.0'?><Error><Code>%s</Code><Message>of the test</Message></Error>"


class _Quiet(WSGIRequestHandler):
    def log(self, type: str, message: str, *args: object) -> None:
        pass


class BucketServer:
    """A store with the bucket `NAME`.

    requests: method, path and headers of those that came. cut_at: from which one on, counted from 1, the network is
    gone; answers_last: whether that one is still carried out, and its answer lost. lost: the numbers of others that are
    carried out, and whose answers are lost. refuse: by the number of a request, an error code in place of its answer.
    broken: of uploads, whose first byte is another when it arrives. ends_early: how many of the next reads of an object
    end in the middle. hears: is called with the number of each request first.
    """

    def __init__(self) -> None:
        models.S3_UPLOAD_PART_MIN_SIZE = LEAST_PART
        self._store = create_backend_app("s3")
        self._lock = threading.Lock()
        self._completed: set[str] = set()
        self._server = make_server("127.0.0.1", 0, self._answer, threaded=True, request_handler=_Quiet)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self.heal()

    def heal(self) -> None:
        """Forgets what came, and what fails."""
        self.requests: list[tuple[str, str, dict[str, str]]] = []
        self.cut_at: int | None = None
        self.answers_last = False
        self.refuse: dict[int, str] = {}
        self.lost: set[int] = set()
        self.broken: Callable[[str], bool] = lambda path: False
        self.ends_early = 0
        self.hears: Callable[[int], object] = lambda number: None

    @contextmanager
    def serving(self) -> Iterator[BucketServer]:
        """Answers in the body."""
        thread = threading.Thread(target=self._server.serve_forever, args=(0.05,))
        thread.start()
        try:
            self.client.create_bucket(Bucket=NAME)
            # moto has one store for a process: of the server of another module, what that has left is there.
            self.empty()
            yield self
        finally:
            self._server.shutdown()
            self._server.server_close()
            thread.join()

    @cached_property
    def client(self) -> Any:
        """A client of the tests."""
        keys = {"aws_access_key_id": "test", "aws_secret_access_key": "test", "region_name": "us-east-1"}
        return boto3.client("s3", endpoint_url=self.url, **keys)

    def names(self) -> list[str]:
        """The objects that there are."""
        pages = self.client.get_paginator("list_objects_v2").paginate(Bucket=NAME)
        return sorted(each["Key"] for page in pages for each in page.get("Contents", ()))

    def unfinished(self) -> list[str]:
        """The objects whose uploads in parts nobody has ended."""
        return [each["Key"] for each in self.client.list_multipart_uploads(Bucket=NAME).get("Uploads", ())]

    def empty(self) -> None:
        """Removes what there is."""
        self.heal()
        client = self.client
        for key in self.names():
            client.delete_object(Bucket=NAME, Key=key)
        for each in client.list_multipart_uploads(Bucket=NAME).get("Uploads", ()):
            client.abort_multipart_upload(Bucket=NAME, Key=each["Key"], UploadId=each["UploadId"])
        self.heal()

    def _answer(self, environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        content = environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
        path, method = environ["PATH_INFO"], environ["REQUEST_METHOD"]
        with self._lock:
            headers = {name[5:].lower(): value for name, value in environ.items() if name.startswith("HTTP_")}
            self.requests.append((method, f"{path}?{environ.get('QUERY_STRING', '')}", headers))
            number, cut = len(self.requests), self.cut_at
        self.hears(number)
        if cut is not None and (number > cut or (number == cut and not self.answers_last)):
            self._drop(environ)
        if content and method == "PUT" and self.broken(path):
            content = bytes([content[0] ^ 1]) + content[1:]
        wanted = environ.get("HTTP_CONTENT_MD5")
        refused = self.refuse.get(number)
        if wanted and base64.b64encode(hashlib.md5(content).digest()).decode() != wanted:
            refused = "BadDigest"
        if refused:
            status = "503 x" if refused == "SlowDown" else "403 x" if refused == "AccessDenied" else "400 x"
            start_response(status, [("Content-Type", "application/xml")])
            return [_REFUSED % refused.encode()]
        completes = (
            f"{path}?{environ['QUERY_STRING']}" if method == "POST" and "uploadId" in environ["QUERY_STRING"] else ""
        )
        with self._lock:  # moto keeps its store without a lock of its own
            try:
                if completes in self._completed:
                    raise KeyError
                answer = list(self._store(environ | {"wsgi.input": io.BytesIO(content)}, start_response))
                self._completed |= {completes} - {""}
            except KeyError:
                # An upload that was completed or aborted: S3 knows it no more, and moto fails.
                start_response("404 x", [("Content-Type", "application/xml")])
                answer = [_REFUSED % b"NoSuchUpload"]
        if number == cut or number in self.lost:
            self._drop(environ)
        if method == "GET" and self.ends_early and environ.get("HTTP_RANGE"):
            self.ends_early -= 1
            return self._half(b"".join(answer), environ)
        return answer

    def _half(self, content: bytes, environ: dict[str, Any]) -> Iterator[bytes]:
        yield content[: len(content) // 2]
        self._drop(environ)

    def _drop(self, environ: dict[str, Any]) -> None:
        """Ends the connection without an answer."""
        with suppress(OSError):
            environ["werkzeug.socket"].shutdown(socket.SHUT_RDWR)
        raise ConnectionResetError
