"""The machine types that a provider lists now, with prices and places, read as its data file says."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from skyinfra.preflight.rest import Api, kept, number, picked, rows, text
from skyinfra.providers.preflight_requests import Capacity, Machines


@dataclass(frozen=True, slots=True)
class Listed:
    """A machine type as its provider lists it now.

    on_demand, spot: USD per hour; None where it says none. priced_in: the region of the prices; None for all. regions:
    where it can be had now; None where the provider does not say. accelerator, count, memory_gb, vcpus, ram_gib: as far
    as it says; memory_gb of one device.
    """

    name: str
    on_demand: float | None = None
    spot: float | None = None
    priced_in: str | None = None
    regions: tuple[str, ...] | None = None
    accelerator: str = ""
    count: int = 1
    memory_gb: float | None = None
    vcpus: int | None = None
    ram_gib: float | None = None


def listed(api: Api, *, names: Iterable[str] = (), region: str | None = None) -> list[Listed]:
    """Returns the machine types that the provider lists, by name and the region of the price. Raises `Unanswered`.

    names: of the machine types that matter; region: that matters, None for any. Providers that list all take no notice.
    """
    wanted = sorted(names)
    found: dict[tuple[str, str | None], Listed] = {}
    for table in api.asked.machines:
        given = {
            "machines": table.joined.join(table.machine.replace("{}", name) for name in wanted),
            "region": region or table.region,
        }
        mine: dict[tuple[str, str | None], Listed] = {}
        for answer in api.pages(table.path, table.query, table.next, **given):
            for row in rows(answer, table.rows):
                if kept(row, table.where, table.skip) and (machine := _listed(table, row)) is not None:
                    key = machine.name, machine.priced_in
                    mine[key] = _merged(mine[key], machine) if key in mine else machine
        found |= {(machine.name, machine.priced_in): machine for machine in _cheapest(table, mine.values())}
    if api.asked.capacity is not None:
        places = capacity(api, api.asked.capacity, region=region)
        return [replace(each, regions=places.get(each.name, ())) for each in found.values()]
    return list(found.values())


def capacity(api: Api, table: Capacity, *, region: str | None = None) -> dict[str, tuple[str, ...]]:
    """Returns the regions that have each machine type now. Raises `Unanswered`."""
    places: dict[str, set[str]] = {}
    for row in rows(api.get(table.path, region=region or ""), table.rows):
        if kept(row, table.where, table.skip):
            for name in picked(row, table.names):
                places.setdefault(str(name), set()).add(text(row, table.region))
    return {name: tuple(sorted(regions)) for name, regions in places.items()}


def _listed(table: Machines, row: Mapping[str, Any]) -> Listed | None:
    name = text(row, table.name)
    if not name:
        return None
    price, spot = number(row, table.price, table.scale), number(row, table.spot, table.scale)
    if table.spot_where and kept(row, table.spot_where, {}):
        price, spot = None, price
    count = number(row, table.count)
    memory, vcpus = number(row, table.memory_gb, table.memory_scale), number(row, table.vcpus)
    if memory is not None and table.memory_of == "all":
        memory /= count or 1
    regions = tuple(sorted({str(each) for each in picked(row, table.regions)})) if table.regions else None
    return Listed(
        name,
        price,
        spot,
        text(row, table.priced_in) or None if table.priced_in else None,
        regions,
        text(row, table.accelerator) if table.accelerator else "",
        int(count or 1),
        memory,
        int(vcpus) if vcpus else None,
        number(row, table.ram_gib, table.ram_scale),
    )


def _merged(one: Listed, other: Listed) -> Listed:
    """Two rows of one machine type, such as one for each purchase."""
    return replace(
        one,
        on_demand=one.on_demand if one.on_demand is not None else other.on_demand,
        spot=one.spot if one.spot is not None else other.spot,
        regions=None
        if one.regions is None and other.regions is None
        else tuple(sorted({*(one.regions or ()), *(other.regions or ())})),
    )


def _cheapest(table: Machines, found: Iterable[Listed]) -> list[Listed]:
    """Returns the cheapest of each accelerator and count, where the table keeps no more."""
    machines = sorted(found, key=lambda each: (each.on_demand is None, each.on_demand or 0.0, each.name))
    if table.cheapest is None:
        return machines
    seen: dict[tuple[str, int], int] = {}
    few = []
    for each in machines:
        alike = each.accelerator, each.count
        seen[alike] = seen.get(alike, 0) + 1
        if seen[alike] <= table.cheapest:
            few.append(each)
    return few
