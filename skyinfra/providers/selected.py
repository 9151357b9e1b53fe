"""The machines that a pool gets: their offers, which of them are alike, and what is known of their prices."""

from __future__ import annotations

from dataclasses import dataclass

from skyinfra.accelerators import Accelerator
from skyinfra.errors import InvalidField, NotOffered, NotSupported
from skyinfra.offers import Offer, Price
from skyinfra.providers.base import Request
from skyinfra.providers.fabrics import Fabric

# A spot pool falls back to machines with the same accelerators at up to this multiple of the lowest price.
_FALLBACK_PRICE = 2.0


@dataclass(frozen=True)
class SelectedMachines:
    """The machines of a pool; see `Selection`. offers: of the machine types, in their order; none for CPU nodes.

    fabric: the network between them; None where RDMA is not asked for.
    """

    accelerator: Accelerator | None
    machine_types: tuple[str, ...]
    offers: tuple[Offer, ...]
    prices: dict[str, Price]
    price_note: str
    fabric: Fabric | None = None

    @property
    def share(self) -> float:
        """Of each accelerator that a node has."""
        return self.offers[0].fraction if self.offers else 1.0


def fallback(found: list[Offer], *, spot: bool) -> list[Offer]:
    """Returns the machine types to try: the first, and for spot those at a similar price, cheapest first."""
    price = found[0].price(spot=spot)
    if not spot or price is None:
        return found[:1]
    limit = price.usd_per_hour * _FALLBACK_PRICE
    return [offer for offer in found if (p := offer.price(spot=True)) is not None and p.usd_per_hour <= limit]


def check_alike(selected: list[Offer]) -> None:
    """Raises `InvalidField` where two of the *selected* machines carry different accelerators."""
    first = selected[0]
    for offer in selected:
        if (offer.accelerator, offer.memory_gb, offer.count, offer.fraction) != (
            first.accelerator,
            first.memory_gb,
            first.count,
            first.fraction,
        ):
            raise InvalidField(
                f"carries {offer.carries}, and {first.machine_type} {first.carries}",
                field="provider.instance_types",
                given=offer.machine_type,
                hint="The nodes of a pool are alike. Declare a pool for each.",
            )


def check_cap(machine_types: tuple[str, ...], known: dict[str, Price], request: Request) -> None:
    """Raises `NotOffered` where one of them costs more than is declared, `NotSupported` where nobody knows."""
    cap = request.max_hourly_cost
    if cap is None:
        return
    for name in machine_types:
        if name not in known:
            purchase = "spot" if request.spot else "on-demand"
            raise NotSupported(f"the {purchase} price of {name} is not known here", field="max_hourly_cost")
        if known[name].usd_per_hour > cap:
            raise NotOffered(
                f"{name} costs {known[name]}",
                field="max_hourly_cost",
                given=cap,
                hint="Declare fewer vCPUs or less memory, or raise it.",
            )


def price_note(price: Price | None, *, spot: bool) -> str:
    """Says of which kind a price is, of which region and day."""
    purchase = "spot" if spot else "on-demand"
    if price is None:
        return f"{purchase} price not known"
    about = "about, " if price.basis == "estimated" else ""
    return f"{about}{purchase} in {price.region}, {price.date}"
