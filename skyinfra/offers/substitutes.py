"""Substitutes for a machine type that is not available."""

from __future__ import annotations

from skyinfra.offers.offer import Offer, load, usd

_SHOWN = 4


def named(provider: str, machine_type: str) -> Offer | None:
    """Returns the offer of that machine type; None where there is none."""
    return next((each for each in load() if (each.provider, each.machine_type) == (provider, machine_type)), None)


def instead(provider: str, machine_type: str, region: str, *, spot: bool = False) -> list[str]:
    """Sentences on other machines with the same accelerators in *region*, and on other regions that have this one.

    Other machines carry at least as many of the same accelerator, the cheapest first. Empty where nothing is known.
    """
    offer = named(provider, machine_type)
    if offer is None:
        return []
    same = [
        other
        for other in load()
        if other.provider == provider
        and other.machine_type != machine_type
        and (other.accelerator, other.memory_gb) == (offer.accelerator, offer.memory_gb)
        and other.count * other.fraction >= offer.count * offer.fraction
        and other.in_region(region)
        and not other.legacy
    ]
    lines = []
    if same:
        listed = ", ".join(
            _described(other, spot=spot) for other in sorted(same, key=lambda each: _order(each, spot))[:_SHOWN]
        )
        lines.append(f"Other machines with {offer.accelerator} in {region}: {listed}.")
    # Regions of the same part of the world first.
    part = region.partition("-")[0]
    regions = sorted((each for each in offer.regions if each != region), key=lambda each: not each.startswith(part))
    if regions:
        more = f" and {len(regions) - 2 * _SHOWN} more" if len(regions) > 2 * _SHOWN else ""
        lines.append(f"{machine_type} is also offered in {', '.join(regions[: 2 * _SHOWN])}{more}.")
    return lines


def _order(offer: Offer, spot: bool) -> tuple[bool, float, str]:
    price = offer.price(spot=spot)
    return price is None, price.usd_per_hour if price else 0.0, offer.machine_type


def _described(offer: Offer, *, spot: bool) -> str:
    price = offer.price(spot=spot)
    return f"{offer.machine_type} ({offer.carries}{f', {usd(price.usd_per_hour)}/h' if price else ''})"
