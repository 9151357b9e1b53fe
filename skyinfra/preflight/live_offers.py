"""Offers as their providers list them now: the live look-up of ``skyinfra offers --live``."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime

from skyinfra.accelerators import catalog
from skyinfra.errors import InvalidAccelerator, UnknownAccelerator
from skyinfra.offers import EVERYWHERE, Offer, Price, Query, load
from skyinfra.preflight.listing import Listed, listed
from skyinfra.preflight.rest import Api, Unanswered, at_once
from skyinfra.providers import kinds, read

SECONDS = 20.0
# A listed size of a device may differ from its nominal size by as much: GiB, or what the driver leaves.
_NEAR = 0.12


@dataclass(frozen=True)
class Live:
    """The offers of now: those of the providers that answered as they list them, all others as they are shipped.

    answered: how many machine types each listed. silent: why the others did not. unknown: how many of the listed ones
    carry nothing that the catalog has; sold_out: how many cannot be had now. Both are left out of the offers.
    """

    offers: tuple[Offer, ...]
    answered: Mapping[str, int]
    silent: Mapping[str, str]
    unknown: Mapping[str, int]
    sold_out: Mapping[str, int]

    def remarks(self, found: Iterable[Offer] = ()) -> list[str]:
        """Sentences on who answered, who did not, and who of the *found* offers cannot be asked."""
        lines = []
        for name, count in self.answered.items():
            less = {"sold out": self.sold_out[name], "not in the catalog": self.unknown[name]}
            counts = ", ".join(f"{number} {what}" for what, number in less.items() if number)
            lines.append(f"{name} listed {count} machine types just now{f', of them {counts}' if counts else ''}.")
        shipped = "did not answer, so that its prices are the shipped ones"
        lines += [f"{name} {shipped}: {why}." for name, why in self.silent.items()]
        others = sorted({offer.provider for offer in found} - {*self.answered, *self.silent})
        return [*lines, f"Not asked, with the shipped prices: {', '.join(others)}."] if others else lines


def look_up(query: Query, *, environment: Mapping[str, str] | None = None, seconds: float = SECONDS) -> Live:
    """Asks the providers of *query* that can be asked, all at a time and no longer than *seconds* in all.

    environment: with the keys; None is that of the process.
    """
    among = [kind for kind in kinds() if not query.providers or kind in query.providers]
    asked = {kind: table for kind in among if (table := read(kind).preflight) is not None and table.machines}
    deadline = time.monotonic() + seconds

    def ask(kind: str) -> list[Listed]:
        wanted = [offer.machine_type for offer in replace(query, providers=(kind,), region=None).run(load())]
        api = Api(read(kind).about.called, asked[kind], deadline=deadline, environment=environment)
        return listed(api, names=wanted, region=query.region)

    found = at_once(ask, asked, deadline)
    silent = {kind: str(each) for kind, each in found.items() if isinstance(each, Unanswered)}
    today = datetime.now(UTC).strftime("%Y-%m-%d")
    offers = [offer for offer in load() if offer.provider not in found or offer.provider in silent]
    answered, unknown, sold_out = {}, {}, {}
    for kind, machines in found.items():
        if isinstance(machines, Unanswered):
            continue
        here = [each for each in machines if each.regions != ()]
        carrying = [offer for each in here if (offer := made(kind, each, today)) is not None]
        offers += carrying
        if not all(table.complete for table in asked[kind].machines):
            names = {each.name for each in machines}
            offers += [each for each in load() if each.provider == kind and each.machine_type not in names]
        answered[kind] = len(machines)
        sold_out[kind], unknown[kind] = len(machines) - len(here), len(here) - len(carrying)
    return Live(tuple(offers), answered, silent, unknown, sold_out)


def made(kind: str, machine: Listed, today: str) -> Offer | None:
    """Returns the offer, with the listing's accelerator where it is not shipped; None where that is unknown."""
    shipped = next((o for o in load() if (o.provider, o.machine_type) == (kind, machine.name)), None)
    offer = shipped or _unshipped(kind, machine)
    if offer is None:
        return None
    place = machine.priced_in or EVERYWHERE

    def price(usd: float | None, before: Price | None) -> Price | None:
        return before if usd is None else Price(round(usd, 6), place, today)

    lists_prices = machine.on_demand is not None or machine.spot is not None
    return replace(
        offer,
        on_demand=price(machine.on_demand, None if lists_prices else offer.on_demand),
        spot=price(machine.spot, None if lists_prices else offer.spot),
        regions=offer.regions if machine.regions is None else machine.regions,
        source=f"{read(kind).about.called}, asked on {today}",
    )


def _unshipped(kind: str, machine: Listed) -> Offer | None:
    try:
        spelling = catalog.read_name(machine.accelerator)
        variants = [v for v in catalog.variants(spelling.name) if spelling.form_factor in (None, v.form_factor)]
    except (UnknownAccelerator, InvalidAccelerator):
        return None
    size = machine.memory_gb or spelling.memory_gb
    near = [v for v in variants if size is None or abs(v.memory_gb - size) <= _NEAR * v.memory_gb]
    if not near:
        return None
    selected = min(near, key=lambda v: (abs(v.memory_gb - (size or v.memory_gb)), not v.default))
    return Offer(
        kind,
        machine.name,
        selected.name,
        machine.count,
        selected.memory_gb,
        spelling.form_factor,
        vcpus=machine.vcpus,
        ram_gib=machine.ram_gib,
        divisible=read(kind).traits.partitioned_by != "nobody",
    )
