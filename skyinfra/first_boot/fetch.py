"""Fetching files: over HTTP, from a bucket that only the nodes may read, or from the machine's own metadata."""

from __future__ import annotations

import contextlib
import datetime
import email.utils
import hashlib
import hmac
import json
import os
import re
import ssl
import urllib.error
import urllib.parse
import urllib.request
from functools import lru_cache
from pathlib import Path
from typing import Any

from .programs import Failed

_LARGEST = 2**28
_EMPTY = hashlib.sha256(b"").hexdigest()
_TIMEOUT_S = 60.0
_METADATA_S = 5.0


def fetch(url: str, path: Path, sha256: str | None = None) -> None:
    """Keeps what stands at *url* at *path*, for root alone: https, http, file, s3://BUCKET/KEY, gce://PREFIX/NAME.

    Raises `Failed`. It is whole there, whenever the power fails; where *sha256* is given, it has that hash.
    """
    if not re.match("(https?|file|s3|gce)://", url):
        raise Failed(f"no https://, http://, file:// or s3:// address: {url[:100]!r}")
    part = path.with_name(path.name + ".part")
    try:
        with _opened(url) as answer:
            found = _keep(answer, part)
    except urllib.error.HTTPError as error:
        code = re.search(rb"<Code>(\w+)</Code>", error.read(2000))
        why = code.group(1).decode() if code else error.reason
        raise Failed(f"{url} cannot be fetched: HTTP status {error.code}, {why}") from None
    except (OSError, ValueError) as error:
        raise Failed(f"{url} cannot be fetched: {getattr(error, 'reason', error)}") from None
    if sha256 is not None and found != sha256:
        part.unlink()
        raise Failed(f"{url} is not the fleet's runner: its SHA-256 is {found}, not {sha256}")
    part.replace(path)
    _synced(path.parent)


def _keep(answer: Any, part: Path) -> str:
    """The SHA-256 of what is on the disk in *part* when this returns. Raises ValueError where it ends early."""
    digest = hashlib.sha256()
    with contextlib.suppress(FileNotFoundError):
        part.unlink()
    handle = os.open(str(part), os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(handle, "wb") as file:
        for data in iter(lambda: answer.read(2**16), b""):
            digest.update(data)
            file.write(data)
            if file.tell() > _LARGEST:
                raise Failed(f"it has more than {_LARGEST} bytes")
        promised, size = answer.headers.get("Content-Length"), file.tell()
        if promised is not None and int(promised) != size:
            raise ValueError(f"it ends after {size} of {promised} bytes")
        file.flush()
        os.fsync(file.fileno())
    return digest.hexdigest()


def _synced(folder: Path) -> None:
    """The names in *folder* are on the disk when this returns."""
    handle = os.open(str(folder), os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


class _Stay(urllib.request.HTTPRedirectHandler):
    """A signature is for one address: it is sent nowhere else."""

    def redirect_request(self, *arguments: Any) -> None:
        return None


def _opened(url: str) -> Any:
    if url.startswith("gce://"):
        # Only its machines have it.
        from . import gce

        return gce.opened(url)
    request = _s3_request(url) if url.startswith("s3://") else urllib.request.Request(url)  # noqa: S310
    # Made anew each time: the certificates may have changed since this program began.
    handlers: list[urllib.request.BaseHandler] = [
        urllib.request.HTTPSHandler(context=ssl.create_default_context()),
    ]
    if request.has_header("Authorization"):
        handlers.append(_Stay())
    return urllib.request.build_opener(*handlers).open(request, timeout=_TIMEOUT_S)


@lru_cache
def direct() -> urllib.request.OpenerDirector:
    """Opens addresses of this machine: without a proxy, and without following a redirect."""
    return urllib.request.build_opener(urllib.request.ProxyHandler({}), _Stay())


def metadata(path: str, base: str | None = None) -> str:
    """The text at *path* of EC2's metadata service, version 2, of this machine. Raises OSError, ValueError."""
    base = (base or _metadata_base()).rstrip("/")

    def ask(method: str, path: str, headers: dict[str, str]) -> str:
        request = urllib.request.Request(base + path, headers=headers, method=method)  # noqa: S310
        with direct().open(request, timeout=_METADATA_S) as answer:
            return str(answer.read().decode())

    token = ask("PUT", "/latest/api/token", {"X-aws-ec2-metadata-token-ttl-seconds": "300"})
    return ask("GET", f"/latest/meta-data/{path}", {"X-aws-ec2-metadata-token": token})


def metadata_time() -> float:
    """Unix time as the metadata service has it, whatever else it answers; 0 where it says none."""
    try:
        answer = direct().open(_metadata_base(), timeout=_METADATA_S)
    except urllib.error.HTTPError as error:
        answer = error
    except (OSError, ValueError):
        return 0.0
    with contextlib.suppress(TypeError, ValueError), answer:
        return email.utils.parsedate_to_datetime(answer.headers["Date"]).timestamp()
    return 0.0


def _metadata_base() -> str:
    # The variable that AWS's own tools have for another address.
    return os.environ.get("AWS_EC2_METADATA_SERVICE_ENDPOINT", "http://169.254.169.254")


def _s3_request(url: str) -> urllib.request.Request:
    """A signed request, with the credentials of the instance's role."""
    bucket, _, key = url[len("s3://") :].partition("/")
    try:
        roles = "iam/security-credentials/"
        credentials = json.loads(metadata(roles + metadata(roles).split()[0]))
        region, domain = metadata("placement/region").strip(), metadata("services/domain").strip()
    except (OSError, ValueError, IndexError) as error:
        raise Failed(f"{url} needs the credentials of the instance's role, and there are none: {error}") from None
    own = os.environ.get("AWS_ENDPOINT_URL_S3")
    address = f"{own.rstrip('/')}/{bucket}" if own else f"https://{bucket}.s3.{region}.{domain}"
    address += "/" + urllib.parse.quote(key, safe="/~")
    now = datetime.datetime.now(datetime.timezone.utc).strftime("%Y%m%dT%H%M%SZ")
    headers = signed(address, region=region, service="s3", credentials=credentials, now=now)
    return urllib.request.Request(address, headers=headers)  # noqa: S310


def signed(url: str, *, region: str, service: str, credentials: dict[str, str], now: str) -> dict[str, str]:
    """The headers of a GET of *url*, whose query is sorted, by AWS Signature Version 4. *now*: ``20260102T030405Z``."""
    parts = urllib.parse.urlsplit(url)
    headers = {"host": parts.netloc, "x-amz-content-sha256": _EMPTY, "x-amz-date": now}
    if credentials.get("Token"):
        headers["x-amz-security-token"] = credentials["Token"]
    names = ";".join(sorted(headers))
    lines = [f"{name}:{headers[name]}" for name in sorted(headers)]
    canonical = "\n".join(["GET", parts.path or "/", parts.query, *lines, "", names, _EMPTY])
    scope = f"{now[:8]}/{region}/{service}/aws4_request"
    text = "\n".join(["AWS4-HMAC-SHA256", now, scope, hashlib.sha256(canonical.encode()).hexdigest()])
    key = ("AWS4" + credentials["SecretAccessKey"]).encode()
    for part in scope.split("/"):
        key = hmac.new(key, part.encode(), "sha256").digest()
    signature = hmac.new(key, text.encode(), "sha256").hexdigest()
    credential = f"AWS4-HMAC-SHA256 Credential={credentials['AccessKeyId']}/{scope}"
    headers["Authorization"] = f"{credential}, SignedHeaders={names}, Signature={signature}"
    return headers
