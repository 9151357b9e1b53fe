"""Volumes that outlive a fleet: their declaration, the place that they share with a pool, and the resource of each."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, cast

from pydantic import AfterValidator, Field, InstanceOf, PrivateAttr, model_validator

from skyinfra.declared import Declaration, is_output
from skyinfra.errors import InvalidField, NotSupported
from skyinfra.providers.base import Provider
from skyinfra.providers.data import Output, VolumeData, kinds, read

# Of one pool: the letters of the devices on AWS.
LIMIT = 8
_PATH = re.compile(r"(/[A-Za-z0-9][A-Za-z0-9._-]*)+")
# Folders of the system, and those that the unit of the tasks does not see (ProtectHome, PrivateTmp) or that are ours.
_TAKEN = re.compile(
    r"/(bin|boot|dev|etc|home|lib|lib32|lib64|libx32|opt|proc|root|run|sbin|sys|tmp|usr|var)(/.*)?|/(mnt|srv|media)"
)
_OURS = "/mnt/scratch"
# By these two differ accounts, projects and regions; a profile names the same account as another may.
_PLACE = ("region", "project", "account_id", "subscription_id", "project_id")


class Volume(Declaration):
    """A disk or file system of a cloud that outlives the fleets that mount it.

    name: of the volume, and of its resource in the stack that declares it. provider: where it is; of a place with zones
    it names the one of the volume, such as ``sky.AWS(zones=["us-east-1a"])``. size_gb: it may only grow; nodes take the
    room at their next boot. id: of a volume that there is already, which is made by no stack here. kind: of disk, such
    as ``pd-ssd``; None is the cheapest that serves. protect: neither a destroy nor a changed declaration removes it, as
    long as it is so.
    """

    name: str = Field(pattern=r"^[a-z][a-z0-9-]{0,39}$", examples=["datasets"])
    provider: InstanceOf[Provider]
    size_gb: int | None = Field(default=None, ge=1)
    id: Output = Field(default=None, min_length=1)
    kind: str | None = None
    protect: bool = True
    # Of the app, which declares it; found by the stack that mounts it.
    _stack: str | None = PrivateAttr(default=None)

    def found(self, id: str, stack: str) -> Volume:
        """Returns this volume with the *id* that the *stack* which declares it has of it."""
        made = self.model_copy(update={"id": id})
        made._stack = stack
        return made

    @model_validator(mode="after")
    def _check(self) -> Volume:
        field, data, own = f"Volume({self.name!r})", self.provider.data.volume, self.provider
        if data is None:
            raise NotSupported(
                own.data.lacks.get("volumes", "has none"),
                field=f"{field}.provider",
                given=type(own).__name__,
                hint=f"Volumes are made on {', '.join(_having())}.",
            )
        if self.id is None and self.size_gb is None:
            raise InvalidField("is needed, or the id of a volume that there is", field=f"{field}.size_gb")
        if self.id is not None and not is_output(self.id) and not re.fullmatch(data.id, self.id):
            raise InvalidField(f"expected the id of {data.called}", field=f"{field}.id", given=self.id)
        if self.kind is not None and self.kind not in data.usd_per_gb:
            hint = f"Kinds: {', '.join(data.usd_per_gb)}."
            raise InvalidField("no such kind", field=f"{field}.kind", given=self.kind, hint=hint)
        least, most = data.gb
        if self.size_gb is not None and not least <= self.size_gb <= most:
            raise InvalidField(f"{data.called} has {least} to {most} GB", field=f"{field}.size_gb", given=self.size_gb)
        if data.zone and not self.zone:
            hint = f"Such as sky.{type(own).__name__}({data.example}); its pools are there too."
            raise InvalidField(f"{data.called} is in one zone", field=f"{field}.provider.{data.zone}", hint=hint)
        return self

    @property
    def data(self) -> VolumeData:
        """Returns what its place says of volumes."""
        return cast(VolumeData, self.provider.data.volume)

    @property
    def zone(self) -> str | None:
        """The zone that its provider names; None where it names none, or several."""
        return _zone(self.provider, self.data)

    @property
    def sold_as(self) -> str:
        """The kind, declared or not."""
        return self.kind or next(iter(self.data.usd_per_gb))

    @property
    def usd_per_month(self) -> float | None:
        """Its price at the shipped date; None where its size or price is not known."""
        return round(self.data.usd_per_gb[self.sold_as] * (self.size_gb or 0), 2) or None

    def describe(self) -> dict[str, Any]:
        """Returns plain JSON values, for programs that show a stack."""
        usd, data = self.usd_per_month, self.data
        known = {"usd_per_month": usd, "price_note": f"{data.region}, {data.date}"} if usd else {}
        return {
            "name": self.name,
            "protect": self.protect,
            "provider": self.provider.kind,
            "kind": self.sold_as,
            **({"stack": self._stack} if self._stack else {}),
            "zone": self.zone or getattr(self.provider, "region", None),
            **({"size_gb": self.size_gb} if self.size_gb else {}),
            **known,
        }

    def resource(self, stack: str) -> dict[str, Any]:
        """Returns the arguments of its Terraform resource."""
        values = {name: getattr(self.provider, name) for name in type(self.provider).model_fields}
        values |= {"name": self.name, "stack": stack, "size_gb": self.size_gb, "zone": self.zone, "kind": self.sold_as}
        # Two people, one account, one name: the part behind it is of the stack that made it.
        values["title"] = f"skyinfra-{self.name}-${{substr(terraform_data.volumes.id, 0, 6)}}"
        values["label"] = re.sub(r"[^a-z0-9_-]", "-", stack.lower())[:63]
        made: dict[str, Any] = _filled(self.data.arguments, values)
        # A name that it was made with, and what a cloud changes by making another disk, without the data.
        made["lifecycle"] = {"prevent_destroy": self.protect, "ignore_changes": list(self.data.ignored)}
        return made


def _filled(template: Any, values: Mapping[str, Any]) -> Any:
    """*template* with ``{NAME}`` replaced; where that is all of a text it keeps its type, and None is left out."""
    if isinstance(template, Mapping):
        filled = {name: _filled(part, values) for name, part in template.items()}
        return {name: value for name, value in filled.items() if value is not None}
    if not isinstance(template, str):
        return template
    whole = re.fullmatch(r"\{(\w+)\}", template)
    return values[whole[1]] if whole else template.format_map(values)


def _having(*, several: bool = False) -> list[str]:
    found = [data for data in map(read, kinds()) if data.volume is not None]
    return [data.about.called for data in found if not several or cast(VolumeData, data.volume).several]


def _zone(provider: Provider, data: VolumeData) -> str | None:
    declared = getattr(provider, data.zone) if data.zone else None
    if isinstance(declared, str) or declared is None:
        return declared
    return declared[0] if len(declared) == 1 else None


def check_path(path: str, *, field: str) -> None:
    """Raises `InvalidField` for a path that the tasks of a node would not see."""
    if not _PATH.fullmatch(path) or any(part in (".", "..") for part in path.split("/")):
        raise InvalidField("expected an absolute path such as /data", field=field, given=path)
    if _TAKEN.fullmatch(path) or path == _OURS or path.startswith(f"{_OURS}/"):
        hint = "Such as /data, /mnt/data or /srv/data."
        raise InvalidField("is of the system, or not seen by tasks", field=field, given=path, hint=hint)


def _paths(given: Mapping[str, Volume]) -> Mapping[str, Volume]:
    """Raises `InvalidField` for a path of `check_path`, or one that is another's."""
    for path in given:
        check_path(path, field="volumes")
        if any(other != path and path.startswith(f"{other}/") for other in given):
            raise InvalidField("lies in the path of another volume", field="volumes", given=path)
    names = [volume.name for volume in given.values()]
    for name in names:
        if names.count(name) > 1:
            raise InvalidField("is mounted twice, or two have this name", field="volumes", given=name)
    if len(given) > LIMIT:
        raise InvalidField(f"a node has at most {LIMIT}", field="volumes", given=len(given))
    return given


Volumes = Annotated[Mapping[str, InstanceOf[Volume]], AfterValidator(_paths)]


def beside(provider: Provider, volumes: Mapping[str, Volume], nodes: int) -> Provider:
    """Returns the *provider* of a pool in the zone of its *volumes*, which *nodes* mount.

    Raises `InvalidField` where they are in two places, and `NotSupported` for a disk of one node that several ask for.
    """
    for path, volume in volumes.items():
        field = f"volumes[{path!r}]"
        if provider.kind != volume.provider.kind:
            if provider.data.volume is None:
                continue  # the pool's own refusal says why
            here, there = provider.data.about.called, volume.provider.data.about.called
            raise InvalidField(f"is a volume of {there}, and the pool is on {here}", field=field, given=volume.name)
        for name in _PLACE:
            own, its = getattr(provider, name, None), getattr(volume.provider, name, None)
            if own and its and own != its and not is_output([own, its]):
                hint = "A volume is mounted where it is: declare both with one provider."
                raise InvalidField(f"is in the {name} {its}, and the pool in {own}", field=field, hint=hint)
        provider = _in_zone(provider, volume, field)
        if nodes > 1 and not volume.data.several:
            raise NotSupported(
                f"{volume.data.called} is attached to one node, and the pool has {nodes}",
                field=field,
                given=volume.name,
                hint=f"Declare nodes=1. File systems of several nodes are on: {', '.join(_having(several=True))}.",
            )
    return provider


def _in_zone(provider: Provider, volume: Volume, field: str) -> Provider:
    data = volume.data
    if not data.zone:
        return provider
    declared = getattr(provider, data.zone)
    if not declared:
        return provider.model_copy(update={data.zone: getattr(volume.provider, data.zone)})
    if _zone(provider, data) != volume.zone:
        here = declared if isinstance(declared, str) else ", ".join(declared)
        raise InvalidField(
            f"is in {volume.zone}, and the nodes of the pool may stand in {here}",
            field=field,
            given=volume.name,
            hint=f"Leave {data.zone} of the pool's provider out: it is then that of the volume.",
        )
    return provider
