"""``skyinfra offers``: machine types that carry an accelerator, with prices."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from rich.markup import escape

from skyinfra import offers
from skyinfra.cli import tables
from skyinfra.cli.options import OPTIONS
from skyinfra.offers import Offer, Price, Query

CHOSEN = "->"


def show_offers(query: Query, *, as_json: bool) -> None:
    """Prints the matching offers, with a mark at the one that would be chosen. Raises NotOffered without a match."""
    found = query.run(offers.load())
    if not found:
        raise offers.not_offered(query, called=OPTIONS)
    if as_json:
        listed = [offer_document(offer) | {"chosen": offer is found[0]} for offer in found]
        tables.print_json({"offers": listed, "notes": remarks(query, found)})
        return
    first, second = ("SPOT PER HOUR", "ON DEMAND PER HOUR") if query.spot else ("ON DEMAND PER HOUR", "SPOT PER HOUR")
    made = tables.table("", "PROVIDER", "MACHINE", "ACCELERATOR", "MEMORY", "MIG", "VCPUS", "RAM", first, second)
    for offer in found:
        made.add_row(
            CHOSEN if offer is found[0] else "",
            offer.provider,
            escape(offer.machine_type),
            offer.carries,
            f"{offer.share_gb:g} GB",
            "yes" if offer.mig_model else "",
            tables.known(offer.vcpus),
            "unknown" if offer.ram_gib is None else f"{offer.ram_gib:g} GiB",
            cell(offer.price(spot=query.spot)),
            cell(offer.price(spot=not query.spot)),
        )
    out = tables.console()
    out.print(made)
    last = f"{CHOSEN} is what would be chosen. The quotas of your account are not known here."
    for line in (*remarks(query, found), last):
        out.print(escape(line), soft_wrap=True)


def remarks(query: Query, found: tuple[Offer, ...]) -> list[str]:
    """Returns notes on the prices, and on the offers that are left out."""
    lines = []
    purchase = "spot" if query.spot else "on-demand"
    priced = [(offer, price) for offer in found if (price := offer.price(spot=query.spot)) is not None]
    elsewhere = sorted({price.region for _, price in priced if price.region not in (query.region, offers.EVERYWHERE)})
    if query.region and elsewhere:
        lines.append(f"The {purchase} prices are of {'; '.join(elsewhere)}: none of {query.region} are known.")
    if any(price.basis == "estimated" for _, price in priced):
        lines.append("~ is an estimate, not a quote.")
    if len(priced) < len(found):
        lines.append(f"The {purchase} price of {len(found) - len(priced)} of them is not known; they come last.")
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
    }


def cell(price: Price | None) -> str:
    """A price in a table: "$55.04 us-east-1 2026-07-20"."""
    if price is None:
        return "unknown"
    sign = "~" if price.basis == "estimated" else ""
    before = "before " if price.basis == "undated" else ""
    return escape(f"{sign}{offers.usd(price.usd_per_hour)} {price.region} {before}{price.date}")
