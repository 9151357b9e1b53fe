"""The profiles and placements of each MIG-capable GPU model: geometry.json, read once."""

from __future__ import annotations

import json
import re
from collections.abc import Collection
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

from skyinfra.errors import MigNotSupported, UnknownProfile, did_you_mean

_DATA = Path(__file__).with_name("geometry.json")

_PROFILE_NAME = re.compile(
    r"(?:(?P<part>[1-9]\d?)c\.)?(?P<compute>\d{1,2})g\.(?P<memory>\d{1,4})gb"
    r"(?P<attributes>(?:[+-][a-z.]+(?:,[a-z.]+)*)*)",
    re.A,
)

# Drivers and early boards name one profile by slightly different sizes (A100-80: 3g.40gb or 3g.39gb; GB200: 1g.23gb
# or 1g.24gb, 7g.186gb or 7g.189gb), because the name follows the memory they report.
_DRIFT_GB = 3
_DRIFT = 0.05

# Compute slices of a GPU instance -> those of the compute instances that may share it. `nvidia-smi mig -lcip` lists 1c
# and 2c in a 3g (MIG User Guide, "Compute Instances") and in a 4g, which has no 3c (A100, A800: listings that people
# published), 1c, 2c and 3c stand in a 7g in the guide's "MIG Device Names", 4c.7g.40gb is what ALCF's A100 say they are
# (argonne-lcf/GettingStarted). Read 2026-11-24. On a node the device has the last word.
_SHARING = {2: (1,), 3: (1, 2), 4: (1, 2), 7: (1, 2, 3, 4)}


@dataclass(frozen=True, slots=True)
class Profile:
    """One MIG instance kind of one GPU model.

    name: NVIDIA's name, such as "3g.40gb" or "1g.10gb+me".
    compute_slices: of the GPU's; memory_gb: the number in the name.
    memory_slices: of the GPU's (eighths or quarters); None where unknown.
    size: the placement units of an instance; None where unknown.
    starts: the placement units at which an instance may start; None where unknown.
    expected: the starts follow from the driver's source and were not seen on this part.
    max_count: how many stand on one GPU at most; None where unknown.
    nvml_enum: the argument of nvmlDeviceGetGpuInstanceProfileInfo; None where unknown.
    profile_id: the id that creates an instance. Differs between GPUs for one name: on a node, ask the device.
    sm: streaming multiprocessors of an instance; varies with the board, None where unknown.
    sources: where the name, the id and the starts come from (None where the value itself is unknown).
    """

    name: str
    compute_slices: int
    memory_slices: int | None
    size: int | None
    memory_gb: int
    max_count: int | None
    nvml_enum: int | None = None
    profile_id: int | None = None
    sm: int | None = None
    starts: tuple[int, ...] | None = None
    expected: bool = False
    sources: tuple[str | None, str | None, str | None] = (None, None, None)

    @property
    def attributes(self) -> str:
        """The attributes after the size in the name: "+me", "+gfx", "+me.all", "-me" or nothing."""
        return self.name.partition("gb")[2]

    @property
    def compute_sizes(self) -> tuple[int, ...]:
        """The compute slices of the compute instances that may share a GPU instance of this profile; () for none.

        Nothing is known of those beside graphics.
        """
        return () if "gfx" in self.attributes else _SHARING.get(self.compute_slices, ())

    def compute_starts(self, slices: int) -> tuple[int, ...]:
        """Returns the compute slices at which a compute instance of so many *slices* may start in its GPU instance.

        Those of NVIDIA/go-nvml's H100 (pkg/nvml/mock/shared/gpus/h100.go @3d26c39): multiples of 1, 2 or 4.
        """
        step = 1 << (slices - 1).bit_length()
        return tuple(range(0, self.compute_slices - slices + 1, step))


@dataclass(frozen=True, slots=True)
class Geometry:
    """One GPU model: its profiles, and the grid on which they are placed.

    model: the key, such as "h100_80gb".
    placement_units, compute_slices: how many the GPU has; None where unknown.
    memory_gib: the memory that the GPU reports, in GiB; None where unknown.
    resetless: MIG mode is switched without a GPU reset (Hopper and later).
    min_driver: the oldest driver that offers MIG on this part, such as "525.85.12"; None where unknown.
    min_driver_detail: where single profiles need a newer one.
    profiles: empty where none are known.
    """

    model: str
    products: tuple[str, ...]
    pci_device_ids: tuple[str, ...]
    architecture: str
    memory_gib: int | None
    memory_slices: int | None
    compute_slices: int | None
    placement_units: int | None
    resetless: bool
    min_driver: str | None = None
    min_driver_detail: str | None = None
    notes: tuple[str, ...] = ()
    profiles: tuple[Profile, ...] = ()
    # Whether the names are those of a driver.
    listed: ClassVar[bool] = False

    def check_known(self) -> None:
        """Raises MigNotSupported where the profiles of this GPU are not known."""
        if not self.profiles:
            raise MigNotSupported(f"the profiles of {self.model} are not known", hint="; ".join(self.notes) or None)

    def profile(self, name: str) -> Profile:
        """Returns the profile of that name on this GPU; also by the name that other drivers give it.

        See same_profile(). Raises UnknownProfile with the profiles that this GPU has, and MigNotSupported where none of
        them are known.
        """
        self.check_known()
        known = {profile.name: profile for profile in self.profiles}
        found = same_profile(name.strip().lower(), known, device=self.listed)
        if found is None:
            raise self._unknown(name)
        return known[found]

    def divided(self, name: str) -> tuple[Profile, int]:
        """Returns the profile of that name, and the compute slices of the compute instance that the name is of.

        ``1c.3g.40gb`` is a compute instance of one slice in a GPU instance of the profile ``3g.40gb``. 0 slices: the
        GPU instance has a single one, that fills it. Raises as profile() does.
        """
        form = _PROFILE_NAME.fullmatch(name.strip().lower())
        slices = int(form["part"] or 0) if form else 0
        profile = self.profile(name.strip().lower().removeprefix(f"{slices}c."))
        if slices not in (0, profile.compute_slices, *profile.compute_sizes):
            known = ", ".join(f"{each}c.{profile.name}" for each in profile.compute_sizes) or "none"
            raise UnknownProfile(
                f"no compute instance of {slices} slices shares a {profile.name}",
                given=name,
                hint=f"Those that do: {known}.",
            )
        return profile, 0 if slices == profile.compute_slices else slices

    def _unknown(self, name: str) -> UnknownProfile:
        known = [profile.name for profile in self.profiles]
        hint = f"{did_you_mean(name, known)} Profiles of {self.model}: {', '.join(known)}.".lstrip()
        wanted = name.strip().lower()
        others = [model for model in models() if any(each.name == wanted for each in geometry(model).profiles)]
        if others:
            hint += f" {wanted} is a profile of {', '.join(others)}."
        return UnknownProfile(f"{self.model} has no profile of that name", given=name, hint=hint)


def is_profile_name(text: str) -> bool:
    """Returns whether *text* has the form of the name of a profile, or of a compute instance in one, of any GPU."""
    return _PROFILE_NAME.fullmatch(text.strip().lower()) is not None


def gpu_profile(name: str) -> str:
    """Returns the profile of the GPU instance of a partition by its *name*: ``3g.40gb`` for ``1c.3g.40gb``."""
    form = _PROFILE_NAME.fullmatch(name)
    return name.removeprefix(f"{form['part']}c.") if form and form["part"] else name


class DeviceGeometry(Geometry):
    """The profiles that the driver of one GPU lists. Their names may differ from those of its model."""

    listed = True


def same_profile(name: str, names: Collection[str], *, device: bool = False) -> str | None:
    """The profile *name* among the *names* that one GPU has, else the only one that is *name* with other drivers.

    Slices, also of a compute instance, and attributes are then the same, and the memory differs by at most 3 GB and
    5 %. device: one of both is what a driver says of the very GPU; the memory may differ by 1 GB then, also of a small
    profile. None where there is none.
    """
    if name in names:
        return name
    form = _PROFILE_NAME.fullmatch(name)
    least = 1 if device else 0
    drifted = [other for other in names if form and _is_drifted(form, _PROFILE_NAME.fullmatch(other), least)]
    return drifted[0] if len(drifted) == 1 else None


def _is_drifted(form: re.Match[str], other: re.Match[str] | None, least: int) -> bool:
    if other is None or any(form[part] != other[part] for part in ("part", "compute", "attributes")):
        return False
    memory = int(other["memory"])
    return abs(int(form["memory"]) - memory) <= max(least, min(_DRIFT_GB, _DRIFT * memory))


@cache
def _data() -> dict[str, Any]:
    data: dict[str, Any] = json.loads(_DATA.read_text(encoding="utf-8"))
    return data


@cache
def models() -> tuple[str, ...]:
    """Returns the keys of every GPU model with MIG, such as "h100_80gb"."""
    return tuple(_data()["gpus"])


def sources() -> dict[str, str]:
    """Returns the meaning of the keys in Profile.sources."""
    return dict(_data()["sources"])


@cache
def geometry(model: str) -> Geometry:
    """Returns the geometry of one GPU model. Raises MigNotSupported for a model without MIG, with the nearest keys."""
    entry = _data()["gpus"].get(model)
    if entry is None:
        hint = did_you_mean(model, models()) or f"Models with MIG: {', '.join(models())}."
        raise MigNotSupported("no GPU model of that name has MIG", given=model, hint=hint)
    fields: dict[str, Any] = {key: tuple(value) if isinstance(value, list) else value for key, value in entry.items()}
    fields["profiles"] = tuple(_profile(row) for row in entry["profiles"])
    return Geometry(model=model, **fields)


def _profile(row: list[Any]) -> Profile:
    values = dict(zip(_data()["columns"], row, strict=True))
    starts = values.pop("starts")
    named = tuple(values.pop(key) for key in ("source", "id_source", "placement_source"))
    return Profile(starts=None if starts is None else tuple(starts), sources=named, **values)
