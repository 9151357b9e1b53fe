"""The nearest offers to a query that has no result."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import replace
from types import MappingProxyType

from skyinfra.errors import NotOffered
from skyinfra.offers.offer import Offer, load
from skyinfra.offers.query import Query, is_it

_SHOWN = 3
_AS_THEY_ARE: Mapping[str, str] = MappingProxyType({})


def not_offered(query: Query, *, called: Mapping[str, str] = _AS_THEY_ARE) -> NotOffered:
    """Returns the error for a query without a match: the query, and the nearest offers with price and provider.

    called: what the person who asked calls the fields of the query, where that is something else.
    """
    wanted = " or ".join(map(str, query.accelerators)) or "accelerator"
    whose = " or ".join(query.providers) or "no provider"
    asked = [
        f"{called.get(name, name)}={value!r}" for name, value in query.constraints().items() if name != "providers"
    ]
    message = f"{whose} offers {'no ' if query.providers else ''}{wanted}"
    if asked:
        message += f" with {', '.join(asked)}"
    custom = [each.name for each in query.accelerators if each.custom]
    if custom:
        return NotOffered(message, hint=f"{' and '.join(custom)} is not in the catalog, so that no offer carries it.")
    return NotOffered(message, hint=hint(query, called=called))


def hint(query: Query, *, called: Mapping[str, str] = _AS_THEY_ARE) -> str:
    """Returns the lines about the alternatives."""
    asked = query.constraints()
    lines = [
        _line(f"Without {called.get(name, name)}", less.run(load()), query)
        for name, less in _less(query).items()
        if name in asked
    ]
    if "region" in asked and (found := _less(query)["region"].run(load())) and found[0].regions:
        lines.append(f"{found[0].machine_type} is offered in {', '.join(found[0].regions)}.")
    # A region is one provider's.
    anywhere = replace(query, providers=(), region=None if query.providers else query.region)
    lines += [_line("In other numbers", _other_counts(query), query), _line("Elsewhere", _elsewhere(anywhere), query)]
    if not any(lines):
        lines.append(_line("Elsewhere, in other numbers", _other_counts(anywhere), query))
    lines.append(_line("Other kinds", _other_kinds(query), query))
    lines.append(_line("No longer sold to everybody", replace(query, legacy=True).run(load()), query))
    if not any(lines):
        lines.append(_line("Other kinds elsewhere", _other_kinds(anywhere), query))
    if not any(lines):
        lines.append(_line("With as much memory", _as_large(query) or _as_large(anywhere), query))
    return "\n".join(filter(None, lines)) or "Nothing comes near; `skyinfra offers` lists what there is."


def described(offer: Offer, *, spot: bool) -> str:
    """Returns a sentence about the offer: "aws p5.48xlarge (H100:8) at $55.04/h in us-east-1, 2026-07-20"."""
    price = offer.price(spot=spot)
    cost = f"at {price}" if price else f"({'spot' if spot else 'on-demand'} price unknown)"
    return f"{offer.provider} {offer.machine_type} ({offer.carries}) {cost}"


def _less(query: Query) -> dict[str, Query]:
    """Yields the query without one of its filters, the least important first."""
    return {
        "max_price": replace(query, max_price=None),
        "vcpus": replace(query, vcpus=None),
        "ram_gib": replace(query, ram_gib=None),
        "memory_gb": replace(query, memory_gb=None),
        "fraction": replace(query, fraction=None),
        "region": replace(query, region=None),
    }


def _line(label: str, offers: Iterable[Offer], query: Query) -> str:
    shown = "; ".join(described(offer, spot=query.spot) for offer in list(offers)[:_SHOWN])
    return f"{label}: {shown}." if shown else ""


def _other_counts(query: Query) -> list[Offer]:
    """Returns the cheapest machine of each other number of the same accelerators, the nearest number first."""
    wanted = query.count or next((each.count for each in query.accelerators if each.count), None)
    if wanted is None:
        return []
    found = [offer for offer in _with(query) if any(is_it(offer, each) for each in query.accelerators)]
    return _first_of_each(sorted(found, key=lambda offer: abs(offer.count - wanted)), lambda offer: offer.count)


def _elsewhere(query: Query) -> list[Offer]:
    """Returns the cheapest offer of each other provider."""
    return _first_of_each(query.run(load()), lambda offer: offer.provider)


def _other_kinds(query: Query) -> list[Offer]:
    """Accelerators of the same name with another memory or form factor, in as many where they are; cheapest first."""
    found = []
    for wanted in query.accelerators:
        same = [offer for offer in _with(query) if offer.accelerator == wanted.name and not is_it(offer, wanted)]
        found += [offer for offer in same if offer.count == wanted.count] or same
    return _first_of_each(found, lambda offer: (offer.provider, offer.memory_gb, offer.form_factor))


def _as_large(query: Query) -> list[Offer]:
    """Other accelerators of the same vendor with at least the memory; the cheapest of each name."""
    found = [
        offer
        for wanted in query.accelerators
        for offer in _with(query)
        if offer.vendor == wanted.vendor and offer.memory_gb >= wanted.memory_gb
    ]
    return _first_of_each(found, lambda offer: offer.accelerator)


def _with(query: Query) -> tuple[Offer, ...]:
    """Returns the offers that match the query, its accelerator and count aside."""
    return replace(query, accelerators=(), count=None).run(load())


def _first_of_each(offers: Iterable[Offer], key: Callable[[Offer], Hashable]) -> list[Offer]:
    first: dict[Hashable, Offer] = {}
    for offer in offers:
        first.setdefault(key(offer), offer)
    return list(first.values())
