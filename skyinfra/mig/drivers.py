"""The driver that a layout needs: drivers.json, and the oldest driver of each part in geometry.json."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path

from skyinfra.errors import DriverTooOld, InvalidField
from skyinfra.mig.geometry import Geometry
from skyinfra.mig.grid import Placement, layout_text

_DATA = Path(__file__).with_name("drivers.json")
_VERSION = re.compile(r"[Rr]?(\d+(?:\.\d+)*)", re.A)


@cache
def rules(model: str) -> tuple[tuple[frozenset[str], str], ...]:
    """Profiles that need a newer driver than the part itself where all of them stand together, with that driver."""
    data = json.loads(_DATA.read_text(encoding="utf-8"))
    return tuple((frozenset(rule["profiles"]), rule["driver"]) for rule in data["rules"].get(model, ()))


def required_driver(profiles: Iterable[str], geometry: Geometry) -> str | None:
    """Returns the oldest driver that offers *profiles* together, such as "525.85.12" or "510" (any of that branch).

    None where no source says which driver the part needs.
    """
    held = {geometry.profile(name).name for name in profiles}
    needed = [driver for together, driver in rules(geometry.model) if together <= held]
    if geometry.min_driver is not None:
        needed.append(geometry.min_driver)
    return max(needed, key=version, default=None)


def check_driver(layout: Sequence[Placement], geometry: Geometry, driver: str) -> None:
    """Raises DriverTooOld, saying which is needed, where *driver* does not offer the layout.

    driver: a version such as "535.161.07", or a branch such as "R510". Nothing is refused where no source says which
    driver the part needs. Raises InvalidField for what is not a version.
    """
    given = version(driver)
    needed = required_driver((placement.profile for placement in layout), geometry)
    if needed is not None and given < version(needed):
        names = layout_text(layout)
        raise DriverTooOld(
            f"{names or 'MIG'} on {geometry.model} needs driver {needed} or later",
            given=driver,
            hint="Choose an image with that driver, or a layout that the older one has.",
        )


def version(driver: str) -> tuple[int, ...]:
    """Returns a driver version, to be compared. Raises InvalidField."""
    form = _VERSION.fullmatch(driver.strip())
    if not form:
        hint = 'Write it like "535.161.07" or "R510".'
        raise InvalidField("not the version of a driver", field="driver", given=driver, hint=hint)
    return tuple(int(part) for part in form[1].split("."))
