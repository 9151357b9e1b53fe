"""Offers: machine types that carry accelerators, and their prices. Reads offers.json on first use.

The file is written by tools/build_offers.py; one line is one machine type of one provider.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any, Literal

from skyinfra.accelerators import catalog, partitions

_DATA = Path(__file__).with_name("offers.json")

# The region of a price that its source states for the provider as a whole.
EVERYWHERE = "all regions"

COLUMNS = (
    "provider",
    "machine_type",
    "accelerator",
    "form_factor",
    "count",
    "memory_gb",
    "fraction",
    "vcpus",
    "ram_gib",
    "on_demand",
    "spot",
    "regions",
    "network_cards",
    "efa_interfaces",
    "divisible",
    "legacy",
    "notes",
    "source",
)


@dataclass(frozen=True, slots=True)
class Price:
    """The price of one machine. There is no price without its region and date.

    usd_per_hour: of the whole machine. region: where that is the price; "all regions" where the source states one price
    for the provider. date: the day, or month, of which it is known ("2026-05-20", "2026-08").
    basis: "listed"; "undated" where the source says no more than that it is older than `date`; "estimated" where it was
    worked out or is approximate; "suspect" where it cannot be right, so that it is shown and not counted.
    """

    usd_per_hour: float
    region: str
    date: str
    basis: Literal["listed", "undated", "estimated", "suspect"] = "listed"

    def __str__(self) -> str:
        before = "before " if self.basis == "undated" else ""
        return f"{self.marked('/h')} in {self.region}, {before}{self.date}"

    def is_old(self, today: str | None = None) -> bool:
        """Returns whether it is of more than twelve months before *today* ("2026-11-25"), by default the clock's."""
        day = today or datetime.now(UTC).strftime("%Y-%m-%d")
        return self.date < f"{int(day[:4]) - 1}{day[4:]}"[: len(self.date)]

    def marked(self, unit: str = "") -> str:
        """The amount with *unit* and the mark of its basis: ``~$26.42/h`` for an estimate, ``$43.07?`` for a doubt."""
        about, doubt = "~" if self.basis == "estimated" else "", "?" if self.basis == "suspect" else ""
        return f"{about}{usd(self.usd_per_hour)}{unit}{doubt}"


@dataclass(frozen=True, slots=True)
class Offer:
    """A machine type of one provider that carries accelerators.

    accelerator: by the catalog's name. count: how many; for a fraction, how many devices it has a share of.
    memory_gb: nominal, in decimal GB, of one whole device. form_factor: None where no source says which.
    fraction: the share of each device, 1.0 for whole ones. vcpus, ram_gib: of the machine; None where unknown.
    on_demand, spot: None where no price is known; see `price`, which leaves out those that cannot be right.
    regions: where it is offered; empty where unknown.
    network_cards: None where unknown. efa_interfaces: of AWS's EFA, 0 without.
    divisible: whether the tenant may partition the accelerators, where they can be partitioned at all.
    legacy: no longer offered to everybody; only found when asked for.
    notes: what to know about the row, such as what was corrected. source: where it comes from.
    """

    provider: str
    machine_type: str
    accelerator: str
    count: int
    memory_gb: int
    form_factor: str | None = None
    fraction: float = 1.0
    vcpus: int | None = None
    ram_gib: float | None = None
    on_demand: Price | None = None
    spot: Price | None = None
    regions: tuple[str, ...] = ()
    network_cards: int | None = None
    efa_interfaces: int = 0
    divisible: bool = True
    legacy: bool = False
    notes: tuple[str, ...] = ()
    source: str = ""

    def price(self, *, spot: bool = False) -> Price | None:
        """Returns the price of one purchase or the other, as far as it can be believed."""
        found = self.spot if spot else self.on_demand
        return None if found is None or found.basis == "suspect" else found

    @property
    def share_gb(self) -> float:
        """The nominal memory that a task gets on one device: of a whole one, or of the share."""
        return self.memory_gb if self.fraction == 1 else round(self.memory_gb * self.fraction, 3)

    @property
    def mig_model(self) -> str | None:
        """The key of the MIG geometry of its GPUs; None where the tenant cannot partition them."""
        if not self.divisible or self.fraction != 1:
            return None
        return self._row.mig_model

    @property
    def partitionable(self) -> bool:
        """Whether its accelerators can be partitioned at all: NVIDIA's with MIG, AMD's with partition modes."""
        return self._row.mig_model is not None or self.accelerator in {part.name for part in partitions.parts()}

    @property
    def vendor(self) -> str:
        """The vendor of the accelerator, such as "nvidia"."""
        return self._row.vendor

    @property
    def chips(self) -> int:
        """The number of chips of the machine; more than `count` for slices of TPUs."""
        return self.count * self._row.chips

    @property
    def accelerated(self) -> str:
        """The whole accelerators that the machine has or shares, as a declaration writes them: "A100-40GB:8"."""
        return f"{self._named}:{self.count}"

    @property
    def carries(self) -> str:
        """The accelerators as a declaration writes them: "A100-40GB:8", "H100-PCIe:1"; a share is "1/4 L4"."""
        return f"1/{round(1 / self.fraction)} {self._named}" if self.fraction != 1 else self.accelerated

    @property
    def _named(self) -> str:
        """The accelerator with its memory and form factor, where they are not the usual ones."""
        name = self.accelerator
        if self.memory_gb != catalog.choose(name).memory_gb:
            name += f"-{self.memory_gb}GB"
        usual = catalog.choose(self.accelerator, self.memory_gb).form_factor
        if self.form_factor not in (None, usual):
            name += f"-{self.form_factor}"
        return name

    def in_region(self, region: str) -> bool:
        """Returns whether it is known to be offered there."""
        if self.regions:
            return region in self.regions
        return any(price is not None and price.region == region for price in (self.on_demand, self.spot))

    def offered_in(self, region: str) -> bool | None:
        """Returns whether it is offered there; None where no source says it, and its provider has that region."""
        if self.in_region(region):
            return True
        return None if not self.regions and region in regions(self.provider) else False

    @property
    def _row(self) -> catalog.Variant:
        return catalog.choose(self.accelerator, self.memory_gb, self.form_factor)


@cache
def load() -> tuple[Offer, ...]:
    """Returns every offer that is shipped, in the order of the file."""
    data: dict[str, Any] = json.loads(_DATA.read_text(encoding="utf-8"))
    columns = data["columns"]
    regions = [tuple(names) for names in data["regions"]]
    return tuple(_offer(dict(zip(columns, row, strict=True)), data, regions) for row in data["offers"])


@cache
def regions(*providers: str) -> tuple[str, ...]:
    """Returns the regions in which these providers (default: all) are known to offer something, by name."""
    selected = [offer for offer in load() if not providers or offer.provider in providers]
    named = {region for offer in selected for region in offer.regions}
    prices = (offer.price(spot=spot) for offer in selected if not offer.regions for spot in (False, True))
    return tuple(sorted(named | {price.region for price in prices if price is not None} - {EVERYWHERE}))


def _offer(row: dict[str, Any], data: dict[str, Any], regions: list[tuple[str, ...]]) -> Offer:
    row["fraction"] = row["fraction"] or 1.0
    row["on_demand"] = row["on_demand"] and Price(*row["on_demand"])
    row["spot"] = row["spot"] and Price(*row["spot"])
    row["regions"] = regions[row["regions"]]
    row["notes"] = tuple(data["notes"][note] for note in row["notes"])
    row["source"] = data["sources"][row["source"]]
    return Offer(**row)


def usd(amount: float) -> str:
    """Dollars with two decimals, or as many as a small amount needs."""
    text = f"{amount:,.2f}"
    return f"${text}" if amount >= 1 or float(text) == amount else f"${amount:.4f}".rstrip("0")
