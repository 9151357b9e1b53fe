"""Machine types that carry accelerators, with their prices by region and date.

    offers.find("H100:8", provider="aws")       # cheapest first; the first is what would be chosen
    offers.find(["H100:8", "A100:8"], region="us-east-1", spot=True, max_price=40)
    offers.find(memory_gb=24, count=1)          # any accelerator with 24 GB

The data is shipped with the package: every price says of which region and day it is. Nothing here asks a provider.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Unpack

from skyinfra.offers.nearest import described, not_offered
from skyinfra.offers.offer import EVERYWHERE, Offer, Price, load, regions, usd
from skyinfra.offers.query import Limits, Query, Wanted, ask, carries, providers
from skyinfra.offers.substitutes import instead, named

__all__ = [
    "EVERYWHERE",
    "Limits",
    "Offer",
    "Price",
    "Query",
    "ask",
    "carries",
    "find",
    "instead",
    "load",
    "named",
    "not_offered",
    "providers",
    "regions",
    "described",
    "usd",
]


def find(
    accelerator: Wanted | None = None, *, provider: str | Sequence[str] | None = None, **limits: Unpack[Limits]
) -> tuple[Offer, ...]:
    """Returns the offers that match, at least one: the more wanted accelerator first, then by price, then by name.

    The price is that of the purchase that is asked for, on-demand or spot; offers whose price is not known come last,
    and do not come at all where there is a max_price. A price may be of another region than the one asked for: it says
    of which.

    accelerator: a string such as "A100-40GB:8", an Accelerator, or a list of them in order of preference. A count in it
    is exact; without one, each provider's smallest machines that carry it are found. No other accelerator stands in.
    With a layout only machines are found whose tenant may partition the GPUs. provider: one name or several.
    limits: see Limits.

    Raises NotOffered, with what comes nearest, where nothing matches; UnknownAccelerator, InvalidAccelerator and
    InvalidField, with the nearest names, for what cannot be asked.
    """
    query = ask(accelerator, provider=provider, **limits)
    found = query.run(load())
    if not found:
        raise not_offered(query)
    return found
