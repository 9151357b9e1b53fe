"""The networks between the machines of a provider, for remote direct memory access (RDMA): ``[[fabrics]]``."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

from pydantic import Field

from skyinfra.declared import Declaration
from skyinfra.errors import NotSupported
from skyinfra.offers import Offer


class Fabric(Declaration):
    """A row of ``[[fabrics]]``: the network of one family of machines. The first row that fits a machine counts.

    machines: pattern of the machine types; empty for all. column: of the offers, in which a machine of the row has more
    than 0, where they know it. network: its kind; None where there is none, for the reason `why`. names: by region,
    the names of the fabrics that a module asks for, the first of which is taken; empty where it asks for none. env:
    variables that NCCL and UCX need there; those of the image count more.
    """

    machines: str = ""
    column: Literal["efa_interfaces"] | None = None
    network: Literal["InfiniBand", "RoCE", "EFA"] | None = None
    names: Mapping[str, Sequence[str]] = Field(default_factory=dict)
    env: Mapping[str, str] = Field(default_factory=dict)
    why: str = ""
    source: str
    date: str

    def fits(self, offer: Offer) -> bool:
        """Returns whether it is the row of the machine of *offer*."""
        return re.match(self.machines, offer.machine_type) is not None and (
            self.column is None or getattr(offer, self.column) > 0
        )

    def lacks(self, region: str | None) -> str | None:
        """The reason why machines of *region* (None: of any) are not connected by it; None where they are."""
        if self.network is None:
            return self.why
        if self.names and region is not None and region not in self.names:
            return f"no {self.network} fabric of {region} is known for it: {', '.join(self.names)} have one"
        return None


def unconnected(
    fabrics: Sequence[Fabric], found: Iterable[Offer], sold: Iterable[Offer], region: str | None, *, field: str
) -> NotSupported:
    """Returns the error for machines without a network for RDMA in *region*.

    found: the machines that would have been taken. sold: those that the provider sells, for the hint. region: None
    where the declaration names a fabric itself. field: with which they were asked for.
    """
    reasons: dict[str, list[str]] = {}
    for offer in found:
        reasons.setdefault(_why(fabrics, offer, region), []).append(offer.machine_type)
    why = "; ".join(f"{', '.join(names)}: {reason}" for reason, names in reasons.items())
    here = [offer for offer in sold if region is None or not offer.regions or region in offer.regions]
    names = sorted({f"{offer.machine_type} ({offer.carries})" for offer in connected(fabrics, here, region)})
    hint = f"Machines that have one: {', '.join(names) or 'none that is known here'}. Or leave rdma out."
    return NotSupported(f"no network for RDMA: {why}", field=field, given=True, hint=hint)


def connected(fabrics: Sequence[Fabric], found: Iterable[Offer], region: str | None) -> list[Offer]:
    """Returns the offers of *found* whose machines are connected in *region*; None for any."""
    return [offer for offer in found if _why(fabrics, offer, region) == ""]


def _why(fabrics: Sequence[Fabric], offer: Offer, region: str | None) -> str:
    """The reason why machines of *offer* are not connected; empty where they are."""
    row = fabric_of(fabrics, offer)
    if row is None:
        return "no source says that they are connected"
    return row.lacks(region) or ""


def fabric_of(fabrics: Sequence[Fabric], offer: Offer) -> Fabric | None:
    """Returns the row of the machine of *offer*; None where no row is."""
    return next((row for row in fabrics if row.fits(offer)), None)
