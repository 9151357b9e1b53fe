"""The cost of a stack at the shipped prices: of the machines of its pools, or of those in its Terraform state. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from skyinfra.offers import EVERYWHERE, Price, usd
from skyinfra.providers import Machines, machines_of
from skyinfra.terraform.state import Resource

DAYS = 30
HOURS = 24 * DAYS
# Providers whose nodes nobody pays for.
FREE = {"local", "container", "ssh"}
# Of a machine group of Google Cloud.
_TEMPLATE = "google_compute_instance_template"


@dataclass(frozen=True, slots=True)
class PoolCost:
    """The cost of one pool.

    region: of the pool; None where there are none. machine: the machine type that is tried first; others: how many it
    falls back to. price: of one node, None where it is not known or nothing is paid. dearest: the machine type among
    all of them that costs most, and its price, where that is more. note: what to know of the price. free: whether
    nobody pays. preferences: the accelerators of the declared list. moves: whether a refused deploy goes on with the
    next. budget: in USD; None without one. least: of the nodes, where their number follows the work, and *nodes* is the
    most.
    """

    pool: str
    region: str | None
    nodes: int
    machine: str
    others: int
    price: Price | None
    dearest: tuple[str, Price] | None
    note: str
    free: bool
    head: str | None = None
    head_price: Price | None = None
    preferences: tuple[str, ...] = ()
    moves: bool = False
    budget: float | None = None
    least: int | None = None

    @property
    def usd_per_hour(self) -> float | None:
        """The price of all nodes and a separate head; None where the price of the nodes is not known."""
        if self.free:
            return 0.0
        return self.of_nodes(self.price) if self.price else None

    @property
    def least_usd_per_hour(self) -> float | None:
        """The price of the least nodes and a separate head; None where their number is fixed, or no price is known."""
        if self.least is None or self.usd_per_hour is None:
            return None
        return 0.0 if self.free or self.price is None else self.of_nodes(self.price, self.least)

    def of_nodes(self, price: Price, nodes: int | None = None) -> float:
        """USD per hour where every one of *nodes*, of all by default, costs *price*, with a head besides them where its
        price is known."""
        count = self.nodes if nodes is None else nodes
        return count * price.usd_per_hour + (self.head_price.usd_per_hour if self.head_price else 0.0)

    @property
    def elsewhere(self) -> str | None:
        """The region that the price is of, where that is not the pool's."""
        if self.price is None or self.price.region in (self.region, EVERYWHERE):
            return None
        return self.price.region

    @property
    def estimated(self) -> bool:
        """Whether the price was worked out, not quoted."""
        return self.price is not None and self.price.basis == "estimated"

    def to_json(self) -> dict[str, Any]:
        """Returns plain JSON values. The price is of one node, the costs are of all and of a head besides them; least:
        those of the least nodes, where their number follows the work."""
        usd, least = self.usd_per_hour, self.least_usd_per_hour
        at_least = {
            "nodes": self.least,
            "usd_per_hour": _rounded(least),
            "usd_per_30_days": _rounded(least and least * HOURS),
        }
        return {
            "pool": self.pool,
            "region": self.region,
            "nodes": self.nodes,
            "machine_type": self.machine,
            "free": self.free,
            **_price(self.price),
            "head": {"machine_type": self.head, **_price(self.head_price)} if self.head else None,
            "dearest": {"machine_type": self.dearest[0], **asdict(self.dearest[1])} if self.dearest else None,
            "usd_per_hour": _rounded(usd),
            "usd_per_30_days": _rounded(usd and usd * HOURS),
            **({"least": at_least} if self.least is not None else {}),
            "note": self.note,
        }


@dataclass(frozen=True, slots=True)
class Cost:
    """The cost of the pools of a stack, in their order. volumes: that it declares or mounts, which are in no sum."""

    pools: tuple[PoolCost, ...]
    volumes: tuple[Mapping[str, Any], ...] = ()

    @property
    def unknown(self) -> tuple[str, ...]:
        """The pools with no known price, which are not in the sum."""
        return tuple(pool.pool for pool in self.pools if pool.usd_per_hour is None)

    @property
    def usd_per_hour(self) -> float:
        """The price of all pools whose price is known."""
        return sum(pool.usd_per_hour or 0.0 for pool in self.pools)

    @property
    def usd_per_30_days(self) -> float:
        """The price of 30 days of all pools whose price is known."""
        return self.usd_per_hour * HOURS

    def to_json(self) -> dict[str, Any]:
        """Returns plain JSON values. unknown: the pools that are not in the sums."""
        return {
            "usd_per_hour": _rounded(self.usd_per_hour),
            "usd_per_30_days": _rounded(self.usd_per_30_days),
            "unknown": list(self.unknown),
            "pools": [pool.to_json() for pool in self.pools],
            **({"volumes": [dict(volume) for volume in self.volumes]} if self.volumes else {}),
        }


def cost_of(pools: Iterable[Mapping[str, Any]], volumes: Iterable[Mapping[str, Any]] = ()) -> Cost:
    """Returns the cost of *pools* and *volumes*, the choices of a synthesized stack (`SynthesizedStack`)."""
    pools = list(pools)
    mounted = (volume for pool in pools for volume in pool.get("volumes", ()))
    return Cost(tuple(_pool(pool) for pool in pools), (*volumes, *mounted))


@dataclass(frozen=True, slots=True)
class RunningCost:
    """The cost of the machines in a Terraform state. machines: by type, region and purchase, with their counts."""

    machines: tuple[Machines, ...]

    @property
    def usd_per_hour(self) -> float:
        """The price of all machines whose price is known."""
        return sum(each.count * each.price.usd_per_hour for each in self.machines if each.price is not None)

    @property
    def estimated(self) -> bool:
        """Whether a price is an estimate, or that of another region."""
        return any(
            each.elsewhere or (each.price is not None and each.price.basis == "estimated") for each in self.machines
        )

    @property
    def unknown(self) -> tuple[str, ...]:
        """The machine types whose price is not known, which are not in the sum."""
        return tuple(each.machine_type for each in self.machines if each.price is None)

    def __str__(self) -> str:
        """Returns the machines and their price: ``2 p5.48xlarge in us-east-1, $196.64/h``; empty without machines."""
        if not self.machines:
            return ""
        parts = [f"{m.count} {m.machine_type}{' spot' if m.spot else ''} in {m.region}" for m in self.machines]
        about = "~" if self.estimated else ""
        known = f", {about}{usd(self.usd_per_hour)}/h" if len(self.unknown) < len(self.machines) else ""
        missing = f", the price of {', '.join(self.unknown)} is not known" if self.unknown else ""
        return f"{', '.join(parts)}{known}{missing}"

    def to_json(self) -> dict[str, Any]:
        """Returns plain JSON values. unknown: the machine types that are not in the sum."""
        return {
            "usd_per_hour": _rounded(self.usd_per_hour),
            "unknown": list(self.unknown),
            "machines": [asdict(each) for each in self.machines],
        }


def running_cost(resources: Iterable[Resource]) -> RunningCost:
    """Returns the cost of the machines among the *resources* of a Terraform state."""
    resources, counts = list(resources), Counter[Machines]()
    templates = {each.call: each.attributes for each in resources if each.type == _TEMPLATE}
    for resource in resources:
        if found := machines_of(resource.type, resource.attributes, templates.get(resource.call)):
            counts[replace(found, count=0)] += found.count
    return RunningCost(tuple(replace(each, count=count) for each, count in counts.items() if count))


def _pool(pool: Mapping[str, Any]) -> PoolCost:
    first, *others = pool["machine_types"]
    prices = {machine: Price(**price) for machine, price in pool.get("prices", {}).items()}
    price = prices.get(first)
    dearest = max(prices.items(), key=lambda item: item[1].usd_per_hour, default=None)
    more = dearest is not None and dearest[1].usd_per_hour > (price.usd_per_hour if price else 0.0)
    return PoolCost(
        pool=pool["name"],
        region=pool.get("region"),
        nodes=pool["nodes"],
        least=pool.get("min_nodes"),
        machine=first,
        others=len(others),
        price=price,
        dearest=dearest if more else None,
        note=pool.get("price_note", ""),
        free=pool["provider"] in FREE,
        head=pool.get("head"),
        head_price=Price(**pool["head_price"]) if pool.get("head_price") else None,
        preferences=tuple(pool.get("preferences", ())),
        moves=len(pool.get("places", ())) > 1,
        budget=pool.get("budget", {}).get("usd"),
    )


def _price(price: Price | None) -> dict[str, Any]:
    return {"price": asdict(price) if price else None}


def _rounded(usd: float | None) -> float | None:
    # As many places as the prices have.
    return usd if usd is None else round(usd, 6)
