"""Queries over the offers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from functools import cache
from typing import TypeAlias, TypedDict, Unpack

from skyinfra.accelerators import Accelerator, parse_preferences
from skyinfra.errors import InvalidField, did_you_mean
from skyinfra.offers.offer import Offer, load, regions

# A third may be asked for as 0.334.
_ROUNDING = 0.001

Wanted: TypeAlias = str | Accelerator | Sequence[str | Accelerator]


@dataclass(frozen=True, slots=True)
class Query:
    """The filters of an offer query; None and () filter nothing.

    accelerators: most wanted first. count: of whole accelerators, or of devices that a share is taken of.
    memory_gb: nominal GB that a task gets on one accelerator, at least. fraction: the share of an accelerator that is
    enough; None is a whole one. vcpus, ram_gib: of the machine, at least. spot: the purchase that is asked for, whose
    price is sorted by and limited by max_price (USD per hour and machine). legacy: also what is no longer sold to all.
    """

    accelerators: tuple[Accelerator, ...] = ()
    providers: tuple[str, ...] = ()
    region: str | None = None
    spot: bool = False
    count: int | None = None
    memory_gb: float | None = None
    fraction: float | None = None
    vcpus: int | None = None
    ram_gib: float | None = None
    max_price: float | None = None
    legacy: bool = False

    def run(self, offers: Iterable[Offer]) -> tuple[Offer, ...]:
        """Returns the offers that match, by preference of the accelerator, then price, then name.

        Offers of which no source says whether the region has them come last.
        Where an accelerator is asked for without a count, each provider's smallest machines that carry it are taken.
        """
        if self.accelerators:  # most carry none of them, and a look at their names is cheap
            names = {wanted.name for wanted in self.accelerators}
            offers = [o for o in offers if o.accelerator in names or o.accelerator.rpartition("-")[0] in names]
        offers = [offer for offer in offers if self._matches(offer)]
        if not self.accelerators:
            return tuple(sorted(offers, key=self._order))
        found: dict[Offer, None] = {}
        for wanted in self.accelerators:
            carrying = [offer for offer in offers if carries(offer, wanted)]
            if self.count is None and wanted.count is None:
                carrying = _smallest(carrying)
            found |= dict.fromkeys(sorted(carrying, key=self._order))
        return tuple(found)

    def _matches(self, offer: Offer) -> bool:
        """Returns whether everything but the accelerator is as asked."""
        return (
            (not self.providers or offer.provider in self.providers)
            and (self.legacy or not offer.legacy)
            and (self.region is None or offer.offered_in(self.region) is not False)
            and (self.count is None or offer.count == self.count)
            and offer.fraction > (1 if self.fraction is None else self.fraction) - _ROUNDING
            and _at_least(offer.share_gb, self.memory_gb)
            and _at_least(offer.vcpus, self.vcpus)
            and _at_least(offer.ram_gib, self.ram_gib)
            and (self.max_price is None or self._affordable(offer, self.max_price))
        )

    def _affordable(self, offer: Offer, most: float) -> bool:
        price = offer.price(spot=self.spot)
        return price is not None and price.usd_per_hour <= most

    def _order(self, offer: Offer) -> tuple[bool, bool, float, str, str]:
        price = offer.price(spot=self.spot)
        usd = 0.0 if price is None else price.usd_per_hour
        unknown = self.region is not None and offer.offered_in(self.region) is None
        return unknown, price is None, usd, offer.provider, offer.machine_type

    def constraints(self) -> dict[str, object]:
        """Returns the other filters, by the names of their fields."""
        skipped = ("accelerators", "spot", "legacy")
        values = {each.name: getattr(self, each.name) for each in fields(self) if each.name not in skipped}
        return {name: value for name, value in values.items() if value not in (None, ())}


def carries(offer: Offer, wanted: Accelerator) -> bool:
    """Returns whether the machine carries the accelerator, and as many of it as asked, if any number is.

    A TPU chip is carried by the slice that has as many chips.
    """
    if wanted.custom:
        return False
    if wanted.vendor == "google" and offer.accelerator.rpartition("-")[0] == wanted.name:
        return wanted.count in (None, offer.chips)
    return is_it(offer, wanted) and wanted.count in (None, offer.count)


def is_it(offer: Offer, wanted: Accelerator) -> bool:
    """Returns whether the machine has the wanted accelerator, in any number; with a layout, one to partition."""
    return (
        offer.accelerator == wanted.name
        and offer.memory_gb == wanted.memory_gb
        and wanted.form_factor in (None, offer.form_factor)
        and (wanted.mig is None or offer.mig_model is not None)
    )


class Limits(TypedDict, total=False):
    """Filters of find() and ask() besides accelerator and provider; None filters nothing.

    region: what is offered there, and last what may be: of which no source says where it is.
    spot: the spot price counts, in place of the on-demand price.
    count: exact, where no accelerator says one. memory_gb: nominal GB that a task gets on one accelerator, at least.
    fraction: the share of an accelerator that is enough; without it only whole ones are found.
    vcpus, ram_gib: of the machine, at least. max_price: USD per hour and machine.
    legacy: also what its provider no longer sells to everybody.
    """

    region: str | None
    spot: bool
    count: int | None
    memory_gb: float | None
    fraction: float | None
    vcpus: int | None
    ram_gib: float | None
    max_price: float | None
    legacy: bool


def ask(
    accelerator: Wanted | None = None, *, provider: str | Sequence[str] | None = None, **limits: Unpack[Limits]
) -> Query:
    """Returns a query, checked.

    Raises UnknownAccelerator and InvalidAccelerator for what is not in the catalog; InvalidField for a provider or
    region that no offer has, with the nearest names, and for a number that cannot be.
    """
    accelerators = parse_preferences(accelerator)
    given = (provider,) if isinstance(provider, str) else tuple(provider or ())
    query = Query(accelerators, given, **limits)
    for name in given:
        if name not in providers():
            hint = f"{did_you_mean(name, providers())} There are offers of {', '.join(providers())}."
            raise InvalidField("no provider of that name has offers", field="provider", given=name, hint=hint.lstrip())
    if query.region is not None:
        check_region(query.region, given)
    for name in ("count", "memory_gb", "vcpus", "ram_gib", "max_price"):
        value = getattr(query, name)
        if value is not None and not value > 0:
            raise InvalidField("must be more than 0", field=name, given=value)
    if query.fraction is not None and not 0 < query.fraction <= 1:
        raise InvalidField("a share is more than 0 and at most 1", field="fraction", given=query.fraction)
    for each in accelerators:
        if query.count is not None and each.count not in (None, query.count):
            raise InvalidField(f"{each} says {each.count}", field="count", given=query.count)
    return query


def check_region(region: str, given: Sequence[str]) -> None:
    """Raises InvalidField, with the nearest, for a region that no offer of these providers (default: any) has."""
    known = regions(*given)
    if region in known:
        return
    whose = " or ".join(given) or "any provider"
    if not known:
        hint = "Leave region out: their lists do not say in which regions they offer what."
    else:
        hint = did_you_mean(region, known) or f"They offer in {', '.join(known[:20])}{'...' if known[20:] else '.'}"
    elsewhere = [name for name in providers() if region in regions(name)]
    if elsewhere:
        hint += f" {region} is a region of {' and '.join(elsewhere)}."
    raise InvalidField(f"no offer of {whose} is known there", field="region", given=region, hint=hint)


@cache
def providers() -> tuple[str, ...]:
    """Returns the providers that have offers, by name."""
    return tuple(sorted({offer.provider for offer in load()}))


def _smallest(offers: list[Offer]) -> list[Offer]:
    least = {
        provider: min(o.chips for o in offers if o.provider == provider) for provider in {o.provider for o in offers}
    }
    return [offer for offer in offers if offer.chips == least[offer.provider]]


def _at_least(value: float | None, wanted: float | None) -> bool:
    return wanted is None or (value is not None and value >= wanted)
