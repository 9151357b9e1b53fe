"""The metadata service of Google Cloud, which also delivers the runner. It is in the user data of its machines only."""

from __future__ import annotations

import base64
import bz2
import contextlib
import email.message
import http.client
import io
import json
import os
import re
import urllib.error
import urllib.response
from pathlib import Path
from typing import Any

_TIMEOUT_S = 30.0


def metadata(path: str, base: str | None = None) -> str:
    """The text at *path* of this machine: without a proxy and redirects. Raises OSError, ValueError."""
    # The variable that Google's own tools have for another address.
    base = base or f"http://{os.environ.get('GCE_METADATA_HOST', '169.254.169.254')}"
    address = f"/computeMetadata/v1/instance/{path}"
    with contextlib.closing(http.client.HTTPConnection(base.partition("://")[2], timeout=_TIMEOUT_S)) as connection:
        try:
            connection.request("GET", address, headers={"Metadata-Flavor": "Google"})
            answer = connection.getresponse()
            content = answer.read()
        except http.client.HTTPException as error:
            raise OSError(f"the metadata service ends its answer early: {error}") from None
    if answer.status != 200:
        raise urllib.error.HTTPError(base + address, answer.status, answer.reason, answer.headers, io.BytesIO(content))
    return content.decode()


def opened(url: str) -> Any:
    """Opens ``gce://PREFIX/NAME``: the attribute ``PREFIX-NAME``, with a dash for what no key may have.

    What is no text, or longer than a value may be, is base64 in ``PREFIX-NAME-0``, ``PREFIX-NAME-1``, ... One request
    reads all of them, so that they fit together. Raises OSError, ValueError.
    """
    found = json.loads(metadata("attributes/?recursive=true&alt=json"))
    key = re.sub(r"[^A-Za-z0-9_-]", "-", url[len("gce://") :])
    count = 0
    while f"{key}-{count}" in found:
        count += 1
    parts = [found[f"{key}-{n}"] for n in range(count)]
    if key not in found and not parts:
        raise ValueError(f"the metadata of this machine have no {key}")
    content = base64.b64decode("".join(parts)) if parts else found[key].encode()
    return urllib.response.addinfourl(io.BytesIO(content), email.message.Message(), url)


def unpacked(path: Path) -> Path:
    """The wheel that the compressed file *path* holds, beside it."""
    wheel = path.with_suffix("")
    wheel.write_bytes(bz2.decompress(path.read_bytes()))
    return wheel
