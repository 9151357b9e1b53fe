"""Stores of files that outlive the fleets of a stack: the bucket of its state, else a folder of the project."""

from __future__ import annotations

import importlib
import io
import os
import tempfile
import threading
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import IO, Any, Protocol

from skyinfra.buckets import asking, load_boto3
from skyinfra.errors import ProjectError
from skyinfra.terraform.state import refuse_shared
from skyinfra.terraform.synthesized import SynthesizedStack

_PURPOSE = "jobs are kept in the bucket of the state"
_CONNECT_S = 5.0
_READ_S = 15.0
_ATTEMPTS = 2


class Store(Protocol):
    """Files by name, such as ``pool/job/record.json``. *where*: the store, for a person.

    Its methods may be called from several threads. They raise `ProjectError`, or `CloudRefused` and `MissingDependency`
    where the store is a bucket.
    """

    where: str

    def names(self, folder: str) -> set[str]:
        """Returns the names of all files below *folder*."""

    def read(self, name: str) -> bytes:
        """Returns the content of a file."""

    def write(self, name: str, content: IO[bytes] | io.RawIOBase) -> None:
        """Writes a file anew; whoever reads it sees the old content or the new one."""

    def remove(self, name: str) -> None:
        """Removes a file, where it is there."""


def store_of(stack: SynthesizedStack, project: Path) -> Store:
    """Returns the store of the kept jobs of *stack*: beside its state in S3, else in the folder of the *project*."""
    if "s3" in stack.backend:
        return _Bucket(stack.backend["s3"], stack.workspace)
    return local_store(project, stack.name)


def local_store(project: Path, stack: str) -> Store:
    """Returns the store of the kept jobs of a stack in the folder of the *project*."""
    return _Folder(project / ".skyinfra" / ".jobs" / stack)


def jobs_prefix(backend: Mapping[str, Any], workspace: str = "default") -> str:
    """Returns the prefix of the kept jobs in the bucket of a state in S3: beside the state of the *workspace*."""
    above = "" if workspace == "default" else f"{backend.get('workspace_key_prefix', 'env:')}/{workspace}/"
    return f"{above}{str(backend['key']).removesuffix('.tfstate')}/jobs/"


class _Folder:
    """Files below *folder*, for its owner alone."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.where = str(folder)

    def names(self, folder: str) -> set[str]:
        """See `Store.names`."""
        found = (file for file in (self._folder / folder).rglob("*") if file.is_file() and file.suffix != ".part")
        return {file.relative_to(self._folder).as_posix() for file in found}

    def read(self, name: str) -> bytes:
        """See `Store.read`."""
        with self._named(name) as file:
            return file.read_bytes()

    def write(self, name: str, content: IO[bytes] | io.RawIOBase) -> None:
        """See `Store.write`."""
        with self._named(name) as file:
            for folder in reversed(file.parents):
                if folder.is_relative_to(self._folder.parent):
                    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            refuse_shared(self._folder.parent)
            descriptor, part = tempfile.mkstemp(suffix=".part", dir=file.parent)
            try:
                with os.fdopen(descriptor, "wb") as stream:
                    while data := content.read(2**20):
                        stream.write(data)
                Path(part).replace(file)
            except BaseException:
                Path(part).unlink(missing_ok=True)
                raise

    def remove(self, name: str) -> None:
        """See `Store.remove`."""
        with self._named(name) as file:
            file.unlink(missing_ok=True)

    @contextmanager
    def _named(self, name: str) -> Iterator[Path]:
        file = self._folder / name
        try:
            yield file
        except OSError as error:
            raise ProjectError(f"cannot be kept or read: {error.strerror or error}", field=str(file)) from None


class _Bucket:
    """Objects below a prefix of the bucket of a state, reached and encrypted as the state is."""

    def __init__(self, backend: Mapping[str, Any], workspace: str) -> None:
        self._backend = backend
        self._bucket: str = backend["bucket"]
        self._prefix = jobs_prefix(backend, workspace)
        self._lock = threading.Lock()
        self._made: Any = None
        self.where = f"s3://{self._bucket}/{self._prefix}"

    def names(self, folder: str) -> set[str]:
        """See `Store.names`."""
        with self._asking("s3:ListBucket", folder):
            pages = self._client.get_paginator("list_objects_v2")
            found = pages.paginate(Bucket=self._bucket, Prefix=f"{self._prefix}{folder}/").search("Contents[].Key")
            return {key.removeprefix(self._prefix) for key in found if key is not None}

    def read(self, name: str) -> bytes:
        """See `Store.read`."""
        with self._asking("s3:GetObject", name):
            body = self._client.get_object(Bucket=self._bucket, Key=f"{self._prefix}{name}")["Body"]
            content: bytes = body.read()
            return content

    def write(self, name: str, content: IO[bytes] | io.RawIOBase) -> None:
        """See `Store.write`."""
        encryption: dict[str, str] = {}
        if self._backend.get("encrypt"):
            key = self._backend.get("kms_key_id")
            encryption = {"ServerSideEncryption": "aws:kms", "SSEKMSKeyId": key} if key else {}
            encryption = encryption or {"ServerSideEncryption": "AES256"}
        with self._asking("s3:PutObject", name):
            self._client.put_object(Bucket=self._bucket, Key=f"{self._prefix}{name}", Body=content, **encryption)

    def remove(self, name: str) -> None:
        """See `Store.remove`."""
        with self._asking("s3:DeleteObject", name):
            self._client.delete_object(Bucket=self._bucket, Key=f"{self._prefix}{name}")

    def _asking(self, action: str, name: str) -> AbstractContextManager[None]:
        load_boto3(_PURPOSE)
        hint = "`skyinfra iam` prints the rights that who deploys needs."
        return asking(action, f"{self.where}{name}", hint=hint)

    @property
    def _client(self) -> Any:
        with self._lock:
            if self._made is None:
                self._made = self._connect()
            return self._made

    def _connect(self) -> Any:
        """Returns a client with the credentials, the role, the region and the endpoint of the backend."""
        boto3, config = (
            load_boto3(_PURPOSE),
            importlib.import_module("botocore.config"),
        )
        given, region = self._backend, self._backend["region"]
        limits = config.Config(
            connect_timeout=_CONNECT_S,
            read_timeout=_READ_S,
            retries={"mode": "standard", "total_max_attempts": _ATTEMPTS},
        )
        session = boto3.Session(profile_name=given.get("profile"), region_name=region)
        if role := given.get("assume_role", {}).get("role_arn"):
            taken = session.client("sts", config=limits).assume_role(RoleArn=role, RoleSessionName="skyinfra")
            keys = taken["Credentials"]
            session = boto3.Session(keys["AccessKeyId"], keys["SecretAccessKey"], keys["SessionToken"], region)
        own: dict[str, Any] = {"s3": {"addressing_style": "path"}} if given.get("use_path_style") else {}
        if given.get("skip_s3_checksum") and "request_checksum_calculation" in config.Config.OPTION_DEFAULTS:
            own["request_checksum_calculation"] = "when_required"
        return session.client(
            "s3", endpoint_url=given.get("endpoints", {}).get("s3"), config=limits.merge(config.Config(**own))
        )
