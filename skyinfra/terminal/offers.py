"""How offers are shown: a table with the one that is selected, notes on their prices, and JSON."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict
from typing import Any

from rich.markup import escape
from rich.table import Table

from skyinfra import offers, providers
from skyinfra.offers import Offer, Price, Query
from skyinfra.terminal import tables

SELECTED = "->"


def offer_table(query: Query, found: Iterable[Offer], selected: Offer | None) -> Table:
    """Returns the offers as a table, with a mark at the *selected* one."""
    first, second = ("SPOT PER HOUR", "ON DEMAND PER HOUR") if query.spot else ("ON DEMAND PER HOUR", "SPOT PER HOUR")
    made = tables.table(
        *("", "PROVIDER", "MACHINE", "ACCELERATOR", "MEMORY", "PARTITIONED BY", "VCPUS", "RAM"),
        *(first, second, "DEPLOYABLE"),
        leave_out=("PARTITIONED BY", "RAM", "VCPUS", "DEPLOYABLE", second, "MEMORY"),
        sentences=("ACCELERATOR",),
    )
    for offer in found:
        prices = (offer.spot, offer.on_demand) if query.spot else (offer.on_demand, offer.spot)
        made.add_row(
            SELECTED if offer is selected else "",
            offer.provider,
            escape(offer.machine_type),
            offer.carries,
            f"{offer.share_gb:g} GB",
            providers.who_partitions(offer) or "",
            tables.known(offer.vcpus),
            "unknown" if offer.ram_gib is None else f"{offer.ram_gib:g} GiB",
            *map(cell, prices),
            deploys(offer),
        )
    return made


def deploys(offer: Offer) -> str:
    """Returns whether this version deploys the machine: yes, no, or only with an image that the declaration names, or
    as a spot machine, by a flex start or a reservation."""
    if providers.undeployable(offer.provider):
        return "no"
    sold = "yes" if providers.on_demand(offer) else "not on demand"
    return "own image" if providers.refuses(offer) else sold


def remarks(query: Query, found: tuple[Offer, ...]) -> list[str]:
    """Returns notes on the prices, on the providers that cannot be deployed to, and on the offers that are left out."""
    lines = []
    reasons: dict[str, list[str]] = {}
    for offer in sorted(found, key=lambda each: (each.provider, each.machine_type)):
        if (why := providers.undeployable(offer.provider)) and offer.provider not in reasons.setdefault(why, []):
            reasons[why].append(offer.provider)
    lines += [f"Not deployable: {', '.join(names)}: {why}." for why, names in reasons.items()]
    purchase = "spot" if query.spot else "on-demand"
    priced = [(offer, price) for offer in found if (price := offer.price(spot=query.spot)) is not None]
    elsewhere = sorted({price.region for _, price in priced if price.region not in (query.region, offers.EVERYWHERE)})
    if query.region and elsewhere:
        lines.append(f"The {purchase} prices are of {'; '.join(elsewhere)}: none of {query.region} are known.")
    if query.region and (unknown := [offer for offer in found if offer.offered_in(query.region) is None]):
        lines.append(
            f"No source here says whether {query.region} has {', '.join(offer.machine_type for offer in unknown)}; "
            "a declaration is allowed, and the deploy may be refused."
        )
    if any(price.basis == "estimated" for _, price in priced):
        lines.append("~ is an estimate, not a quote.")
    if any(price and price.basis == "suspect" for offer in found for price in (offer.on_demand, offer.spot)):
        lines.append(
            "? is a price that cannot be right and is not counted; --json says why, in the notes of the offer."
        )
    if any(price and price.is_old() for offer in found for price in (offer.on_demand, offer.spot)):
        lines.append("(old) is a price of more than 12 months ago; skyinfra offers --refresh asks for those of now.")
    if len(priced) < len(found):
        lines.append(
            f"The {purchase} price of {len(found) - len(priced)} of them is not known or doubtful; they come last."
        )
    if query.fraction is None and query.accelerators:
        shares = _shares(query)
        if shares:
            least = min(offer.fraction for offer in shares)
            lines.append(f"Left out: {len(shares)} with a share of one; --fraction {least:.3g} shows them.")
    return lines


def _shares(query: Query) -> list[Offer]:
    """Returns the offers of a share of the accelerator, by the same providers in the same region."""
    found = offers.ask(
        query.accelerators,
        provider=query.providers,
        region=query.region,
        spot=query.spot,
        fraction=0.001,
        max_price=query.max_price,
    ).run(offers.load())
    return [offer for offer in found if offer.fraction < 1]


def offer_document(offer: Offer) -> dict[str, Any]:
    """Returns an offer as JSON: the fields of Offer, and derived values."""
    return {
        **asdict(offer),
        "carries": offer.carries,
        "share_gb": offer.share_gb,
        "vendor": offer.vendor,
        "mig_model": offer.mig_model,
        "partitioned_by": providers.who_partitions(offer),
        "deployable": providers.undeployable(offer.provider) is None,
        "not_deployable_because": providers.undeployable(offer.provider),
        "refused_because": providers.refuses(offer),
        "sold_on_demand": providers.on_demand(offer),
        "rdma": providers.network(offer),
    }


def cell(price: Price | None) -> str:
    """Returns a price in a table: "$55.04 us-east-1 2026-07-20"."""
    if price is None:
        return "unknown"
    before = "before " if price.basis == "undated" else ""
    return escape(f"{price.marked()} {price.region} {before}{price.date}{' (old)' if price.is_old() else ''}")
