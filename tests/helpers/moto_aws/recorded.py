"""The requests that a moto server got, as the IAM actions that they need."""

from __future__ import annotations

import base64
import json
import re
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any
from urllib.parse import parse_qs, parse_qsl, urlsplit

from botocore.session import Session

from moto_aws.cloud import Cloud

# Operations of S3 whose IAM action has another name.
_S3 = {
    "DeleteBucketEncryption": "PutEncryptionConfiguration",
    "DeleteObjects": "DeleteObject",
    "DeletePublicAccessBlock": "PutBucketPublicAccessBlock",
    "GetBucketAccelerateConfiguration": "GetAccelerateConfiguration",
    "GetBucketCors": "GetBucketCORS",
    "GetBucketEncryption": "GetEncryptionConfiguration",
    "GetBucketLifecycleConfiguration": "GetLifecycleConfiguration",
    "GetBucketReplication": "GetReplicationConfiguration",
    "GetObjectLockConfiguration": "GetBucketObjectLockConfiguration",
    "GetPublicAccessBlock": "GetBucketPublicAccessBlock",
    "HeadBucket": "ListBucket",
    "HeadObject": "GetObject",
    "ListObjectsV2": "ListBucket",
    "ListObjectVersions": "ListBucketVersions",
    "PutBucketEncryption": "PutEncryptionConfiguration",
    "PutPublicAccessBlock": "PutBucketPublicAccessBlock",
}


@contextmanager
def recording(cloud: Cloud) -> Iterator[set[str]]:
    """A set that holds the IAM actions of all requests within, once it is left."""
    found: set[str] = set()
    for step in ("reset-recording", "start-recording"):
        _report(cloud, step)
    try:
        yield found
    finally:
        _report(cloud, "stop-recording")
        with urllib.request.urlopen(f"{cloud.url}/moto-api/recorder/download-recording") as answer:
            found |= {_action(entry) for entry in _entries(answer.read().decode())}


def _entries(text: str) -> Iterator[dict[str, Any]]:
    """The requests of a recording. Two that came at the same time may share a line."""
    decoder, at = json.JSONDecoder(), 0
    while (found := re.compile(r"\S").search(text, at)) is not None:
        entry, at = decoder.raw_decode(text, found.start())
        yield entry


def _report(cloud: Cloud, step: str) -> None:
    request = urllib.request.Request(f"{cloud.url}/moto-api/recorder/{step}", method="POST")
    urllib.request.urlopen(request).close()


def _action(entry: dict[str, Any]) -> str:
    headers = {name.lower(): value for name, value in entry["headers"].items()}
    scope = re.search(r"Credential=[^/]+/\d+/[^/]+/([^/]+)/aws4_request", headers["authorization"])
    assert scope, headers
    service = scope[1]
    if service == "s3":
        return f"s3:{_s3_action(entry, headers)}"
    if "x-amz-target" in headers:
        return f"{service}:{headers['x-amz-target'].rpartition('.')[2]}"
    body = base64.b64decode(entry["body"]).decode() if entry["body_encoded"] else entry["body"]
    return f"{service}:{parse_qs(body)['Action'][0]}"


def _s3_action(entry: dict[str, Any], headers: dict[str, str]) -> str:
    address = urlsplit(entry["url"])
    if "x-amz-copy-source" in headers:
        return "PutObject"
    depth = 2 if address.path.strip("/").count("/") else 1 if address.path.strip("/") else 0
    given = dict(parse_qsl(address.query, keep_blank_values=True))
    matching = [
        (len(flags), name)
        for name, method, at, flags in _s3_operations()
        if (method, at) == (entry["method"], depth) and all(given.get(key) == value for key, value in flags.items())
    ]
    name = max(matching)[1]
    return _S3.get(name, name)


@cache
def _s3_operations() -> list[tuple[str, str, int, dict[str, str]]]:
    """Name, method, depth of the path and fixed parameters of every operation."""
    model = Session().get_service_model("s3")
    # Of two with one address, the one that Terraform's provider does not use.
    unused = {"AbortMultipartUpload", "CopyObject", "CreateSession", "ListDirectoryBuckets", "ListObjects", "ListParts"}
    unused |= {"UploadPart", "UploadPartCopy"}
    found = []
    for name in model.operation_names:
        http = model.operation_model(name).http
        path, _, query = http["requestUri"].partition("?")
        if name not in unused:
            flags = dict(parse_qsl(query, keep_blank_values=True))
            flags.pop("x-id", None)
            found.append((name, http["method"], path.count("{"), flags))
    return found
