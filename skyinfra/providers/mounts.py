"""Folders of buckets that the nodes of a pool mount: their declaration, and where they can be."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, InstanceOf, model_validator

from skyinfra.declared import Declaration
from skyinfra.errors import InvalidField, NotSupported
from skyinfra.providers.base import Provider
from skyinfra.providers.data import kinds, read
from skyinfra.providers.volumes import check_path

# What names of buckets are made of: https://docs.aws.amazon.com/AmazonS3/latest/userguide/bucketnamingrules.html
# (2026-11-26), https://docs.cloud.google.com/storage/docs/buckets#naming (2026-11-27).
_NAMES = {
    "s3": re.compile(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]"),
    "gs": re.compile(r"[a-z0-9][a-z0-9._-]{1,220}[a-z0-9]"),
}
# What neither a unit of systemd nor a policy of a cloud reads as something else.
_PREFIX = re.compile(r"[A-Za-z0-9._=+@-]+(/[A-Za-z0-9._=+@-]+)*")
_CACHE_GB = 20


class Mount(Declaration):
    """A folder of a bucket, which every node of a pool mounts and tasks see as files.

    bucket: such as ``s3://my-bucket/data`` on AWS and ``gs://my-bucket/data`` on Google Cloud; what it names is below
    that prefix. path: where tasks see it. mode: "read" reads from the bucket; "write" writes new files too, each from
    its beginning to its end, and closing one returns when the bucket has it; "cached" reads and writes through copies
    on the disk of the node, which are uploaded after they are closed. cache_gb: for these copies, 20 unless it says
    otherwise.
    """

    bucket: str
    path: str
    mode: Literal["read", "write", "cached"] = "read"
    cache_gb: int | None = Field(default=None, ge=1)

    def __init__(self, bucket: str, path: str, **values: Any) -> None:
        super().__init__(bucket=bucket, path=path, **values)  # type: ignore[call-arg]

    @property
    def scheme(self) -> str:
        """The service that has the bucket: ``s3`` or ``gs``."""
        return self.bucket.partition("://")[0]

    @property
    def source(self) -> str:
        """The bucket and the prefix, as ``my-bucket/data``."""
        return self.bucket.partition("://")[2].rstrip("/")

    @property
    def cache(self) -> int:
        """GB for copies on the disk; 0 without."""
        return (self.cache_gb or _CACHE_GB) if self.mode == "cached" else 0

    @model_validator(mode="after")
    def _check(self) -> Mount:
        if self.scheme not in _NAMES or "://" not in self.bucket:
            raise InvalidField(
                "expected a bucket such as s3://my-bucket/data or gs://my-bucket/data",
                field="Mount.bucket",
                given=self.bucket,
            )
        name, _, prefix = self.source.partition("/")
        if not _NAMES[self.scheme].fullmatch(name):
            raise InvalidField("no bucket has such a name", field="Mount.bucket", given=name)
        if prefix and (not _PREFIX.fullmatch(prefix) or any(part in (".", "..") for part in prefix.split("/"))):
            hint = "Letters, digits and ._=+@- are taken, with one / between two parts."
            raise InvalidField("cannot mount such a prefix", field="Mount.bucket", given=prefix, hint=hint)
        if self.cache_gb is not None and self.mode != "cached":
            hint = 'Leave it out, or declare mode="cached".'
            raise InvalidField(
                f'mode="{self.mode}" keeps no copies', field="Mount.cache_gb", given=self.cache_gb, hint=hint
            )
        check_path(self.path, field="Mount.path")
        return self


def _apart(given: Sequence[Mount]) -> Sequence[Mount]:
    """Raises `InvalidField` where one path is another's, or lies in it."""
    for each in given:
        for other in given:
            if other is not each and f"{each.path}/".startswith(f"{other.path}/"):
                raise InvalidField("lies in the path of another mount", field="mounts", given=each.path)
    return tuple(given)


Mounts = Annotated[tuple[InstanceOf[Mount], ...] | list[InstanceOf[Mount]], AfterValidator(_apart)]


def check(provider: Provider, mounts: Sequence[Mount], volumes: Iterable[str]) -> None:
    """Raises `NotSupported` where the place of *provider* does not mount such buckets, and `InvalidField` where a path
    and that of one of the *volumes* lie in each other."""
    here = provider.data.traits.mounts
    for mount in mounts:
        if mount.scheme != here:
            every = [read(kind) for kind in kinds()]
            having = [f"{each.about.called} ({each.traits.mounts}://)" for each in every if each.traits.mounts]
            raise NotSupported(
                f"no bucket{f' of {mount.scheme}://' if here else ''} is mounted on {provider.data.about.called}",
                field="mounts",
                given=mount.bucket,
                hint=f"Buckets are mounted on {' and '.join(having)}. Elsewhere a task fetches what it reads, and "
                "saves with sky.SpotCheckpointer.",
            )
    for path in volumes:
        for mount in mounts:
            if f"{mount.path}/".startswith(f"{path}/") or f"{path}/".startswith(f"{mount.path}/"):
                raise InvalidField(f"and the volume at {path} lie in each other", field="mounts", given=mount.path)
