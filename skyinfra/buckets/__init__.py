"""Objects below a prefix of a bucket: of S3, and of whatever speaks its language.

Each upload carries its MD5, which the store compares. boto3 is imported when a bucket is asked for something.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import importlib
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from skyinfra.errors import (
    CloudCredentialsRefused,
    CloudPermissionDenied,
    CloudRefused,
    InvalidField,
    MissingDependency,
)

# Larger files travel in parts of this many bytes, or of more where they would be too many. The store admits 10,000.
PART = 16 * 2**20
_PARTS = 9_000
_TOGETHER = 8
ATTEMPTS = 6
_CONNECT_S = 10.0
_READ_S = 60.0
_GOOGLE = "https://storage.googleapis.com"
# With the rules that S3 and Cloud Storage share.
_URL = re.compile(r"(?P<kind>s3|gs)://(?P<bucket>[a-z0-9][a-z0-9._-]{1,61}[a-z0-9])(/(?P<prefix>[^?#\s]*))?")
_DENIED = ("AccessDenied", "Forbidden", "403", "AllAccessDisabled", "KMS.DisabledException")
_CREDENTIALS = (
    *("ExpiredToken", "InvalidAccessKeyId", "InvalidToken", "SignatureDoesNotMatch"),
    *("NoCredentialsError", "PartialCredentialsError", "CredentialRetrievalError", "ProfileNotFound"),
)


def parse(url: str, field: str) -> tuple[str, str, str]:
    """Returns ``"s3"`` or ``"gs"``, the bucket and the prefix, without slashes around it. Raises `InvalidField`."""
    found = _URL.fullmatch(url)
    prefix = (found["prefix"] or "").strip("/") if found else ""
    if found is None or any(part in ("", ".", "..") for part in prefix.split("/") if prefix):
        # In front of an @ may stand a key.
        shown = None if "@" in url else url
        raise InvalidField("expected s3://BUCKET/PREFIX or gs://BUCKET/PREFIX", field=field, given=shown)
    return found["kind"], found["bucket"], prefix


def load_boto3(purpose: str, hint: str = 'Install it with: pip install "skyinfra[aws]"') -> Any:
    """The boto3 package. *purpose*: what needs it, such as ``preflight asks AWS``. Raises `MissingDependency`."""
    try:
        return importlib.import_module("boto3")
    except ModuleNotFoundError as error:
        if error.name != "boto3":
            raise
    raise MissingDependency(f"{purpose} through boto3, which is not installed", hint=hint)


@contextmanager
def asking(action: str, where: str, *, hint: str | None = None) -> Iterator[None]:
    """Raises `CloudRefused`, or one below it, for what boto3 raises in the body. hint: for who lacks a permission."""
    exceptions = importlib.import_module("botocore.exceptions")
    try:
        yield
    except exceptions.ClientError as error:
        code, words = error.response["Error"].get("Code", ""), error.response["Error"].get("Message", "")
    except (exceptions.BotoCoreError, OSError) as error:
        code, words = type(error).__name__, str(error)
    else:
        return
    kind = CloudRefused
    if code in _DENIED:
        kind = CloudPermissionDenied
    elif code in _CREDENTIALS:
        kind = CloudCredentialsRefused
    raise kind(f"{action} on {where}: {code}: {words}", hint=hint if kind is CloudPermissionDenied else None)


class Objects:
    """The objects below the prefix of *url*, by the rest of their keys.

    Its methods raise `CloudRefused`. It is for one operation, as it takes the credentials that there are now.
    """

    def __init__(self, url: str, *, purpose: str) -> None:
        kind, self._bucket, prefix = parse(url, "url")
        self._prefix = f"{prefix}/"
        self.where = f"{kind}://{self._bucket}/{prefix}"
        self._client = _connect(kind, purpose)

    def sizes(self, below: str = "") -> dict[str, int]:
        """Returns the size of each object whose name begins with *below*."""
        with self._asking("s3:ListBucket", below):
            pages = self._client.get_paginator("list_objects_v2").paginate(
                Bucket=self._bucket, Prefix=f"{self._prefix}{below}"
            )
            found = [each for page in pages for each in page.get("Contents", ())]
        return {each["Key"].removeprefix(self._prefix): each["Size"] for each in found}

    def read(self, name: str, start: int = 0, end: int | None = None) -> bytes:
        """Returns the content of an object, or its bytes from *start* to before *end*; raises FileNotFoundError too."""
        exceptions = importlib.import_module("botocore.exceptions")
        part = {} if end is None else {"Range": f"bytes={start}-{end - 1}"}
        with self._asking("s3:GetObject", name):
            for left in reversed(range(ATTEMPTS)):
                # boto3 sends a request again, and reads no answer again that ends early.
                try:
                    content: bytes = self._client.get_object(**self._named(name), **part)["Body"].read()
                    return content
                except self._client.exceptions.NoSuchKey:
                    break
                except exceptions.BotoCoreError:
                    if not left:
                        raise
        raise FileNotFoundError(f"there is no {self.where}/{name}")

    def write(self, name: str, content: bytes) -> None:
        """Writes an object; whoever reads it sees all of *content* or nothing."""
        with self._asking("s3:PutObject", name):
            self._client.put_object(**self._named(name), Body=content, ContentMD5=_md5(content))

    def upload(self, files: Mapping[str, Path]) -> None:
        """Writes the *files* by the names of their objects, several at once, and large ones in parts."""
        small = {name: file for name, file in files.items() if file.stat().st_size <= PART}
        with ThreadPoolExecutor(_TOGETHER) as pool:
            list(pool.map(lambda name: self.write(name, small[name].read_bytes()), small))
            for name in files.keys() - small.keys():
                self._upload_parts(pool, name, files[name])

    def _upload_parts(self, pool: ThreadPoolExecutor, name: str, file: Path) -> None:
        size, named, asked = file.stat().st_size, self._named(name), self._asking
        step = max(PART, -(-size // _PARTS))
        with asked("s3:PutObject", name):
            upload = self._client.create_multipart_upload(**named)["UploadId"]

        def part(number: int) -> dict[str, Any]:
            with file.open("rb") as stream:
                stream.seek((number - 1) * step)
                data = stream.read(step)
            with asked("s3:PutObject", name):
                made = self._client.upload_part(
                    **named, UploadId=upload, PartNumber=number, Body=data, ContentMD5=_md5(data)
                )
            return {"PartNumber": number, "ETag": made["ETag"]}

        parts = list(pool.map(part, range(1, -(-size // step) + 1)))
        with asked("s3:PutObject", name):
            try:
                self._client.complete_multipart_upload(**named, UploadId=upload, MultipartUpload={"Parts": parts})
            except self._client.exceptions.NoSuchUpload:
                # The answer to a request that was sent again: the first one may have done it. Its size tells.
                if self.sizes(name).get(name) != size:
                    raise

    def download(self, name: str, file: Path, size: int) -> None:
        """Writes the *size* bytes of an object to *file*, which it makes, several parts at once."""
        with file.open("wb") as stream, ThreadPoolExecutor(_TOGETHER) as pool:

            def part(start: int) -> None:
                data = self.read(name, start, min(size, start + PART))
                os.pwrite(stream.fileno(), data, start)

            list(pool.map(part, range(0, size, PART)))

    def remove(self, names: Iterable[str]) -> None:
        """Removes objects, in order."""
        for name in names:
            with self._asking("s3:DeleteObject", name):
                self._client.delete_object(**self._named(name))

    def abort_uploads(self, admitted: Callable[[str], bool]) -> None:
        """Ends the uploads in parts that nobody has completed, of objects whose names are *admitted*."""
        with self._asking("s3:ListBucketMultipartUploads", ""):
            pages = self._client.get_paginator("list_multipart_uploads").paginate(
                Bucket=self._bucket, Prefix=self._prefix
            )
            found = [each for page in pages for each in page.get("Uploads", ())]
        for each in found:
            if admitted(each["Key"].removeprefix(self._prefix)):
                with (
                    self._asking("s3:AbortMultipartUpload", each["Key"]),
                    contextlib.suppress(self._client.exceptions.NoSuchUpload),
                ):
                    self._client.abort_multipart_upload(Bucket=self._bucket, Key=each["Key"], UploadId=each["UploadId"])

    def _named(self, name: str) -> dict[str, str]:
        return {"Bucket": self._bucket, "Key": f"{self._prefix}{name}"}

    def _asking(self, action: str, name: str) -> contextlib.AbstractContextManager[None]:
        return asking(action, f"{self.where}/{name}", hint="docs/buckets.md has the permissions.")


def _connect(kind: str, purpose: str) -> Any:
    """Returns a client with the credentials and the endpoint that boto3 finds; of Cloud Storage in S3's language."""
    boto3 = load_boto3(purpose, hint='On nodes it is part of the image: sky.Image(pip=["boto3"]).')
    config = importlib.import_module("botocore.config").Config
    own = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
    if kind == "gs":
        own = os.environ.get("STORAGE_EMULATOR_HOST") or _GOOGLE
    given: dict[str, Any] = {
        "retries": {"mode": "standard", "total_max_attempts": ATTEMPTS},
        "connect_timeout": _CONNECT_S,
        "read_timeout": _READ_S,
        "max_pool_connections": _TOGETHER,
        # Other stores than AWS's know buckets as paths, and not the checksums that boto3 adds since 1.36.
        **({"s3": {"addressing_style": "path"}} if own else {}),
    }
    for name in ("request_checksum_calculation", "response_checksum_validation"):
        if name in config.OPTION_DEFAULTS:
            given[name] = "when_required"
    with asking("a session", f"{kind}://"):
        return boto3.Session().client("s3", endpoint_url=own, config=config(**given))


def _md5(content: bytes) -> str:
    return base64.b64encode(hashlib.md5(content, usedforsecurity=False).digest()).decode()
