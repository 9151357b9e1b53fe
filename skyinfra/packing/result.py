"""The result of packing: machines, layouts, cost and waste."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Literal

from skyinfra import mig
from skyinfra.offers import Offer
from skyinfra.packing import declare
from skyinfra.packing.declare import Machines
from skyinfra.packing.demand import Demand
from skyinfra.packing.problem import Problem
from skyinfra.packing.solve import Arrangement, Purchase
from skyinfra.packing.supply import Gpu, PartitionKind
from skyinfra.pool import ComputePool
from skyinfra.providers import Provider


@dataclass(frozen=True, slots=True)
class Given:
    """Partitions of one kind that are handed out for one part of the demand, or are spare (wanted None).

    gpu: such as "A100-40GB". profile: None is the whole GPU. memory_gb: of one.
    """

    wanted: str | None
    gpu: str
    profile: str | None
    count: int
    memory_gb: int


@dataclass(frozen=True, slots=True)
class Waste:
    """Memory of the GPUs beyond the demand, in nominal GB.

    bought: of all GPUs. asked: by the demand. oversize: given beyond the demand. spare: in partitions that
    nothing asked for. lost: in no partition, because the layouts have no room for it; names of profiles round.
    """

    bought: int
    asked: int
    oversize: int
    spare: int
    lost: int

    @property
    def share(self) -> float:
        """The share of the memory of all GPUs, from 0 to 1."""
        return 1 - self.asked / self.bought


@dataclass(frozen=True, slots=True)
class Packing:
    """The cheapest machines and layouts that hold a demand.

    demand: what was asked for, largest first. machines: what to buy. spot: at which price.
    cost_per_hour: of all machines, in USD. bound: below which no packing costs, in USD per hour.
    status: "optimal" where nothing cheaper exists; "feasible" where the time was over before that was proven.
    given: which partitions are handed out for what. spare: the partitions that are left over.
    considered: how many offers were looked at. left_out: how many others were not, by reason.
    """

    demand: tuple[Demand, ...]
    machines: tuple[Machines, ...]
    spot: bool
    cost_per_hour: float
    bound: float
    status: Literal["optimal", "feasible"]
    given: tuple[Given, ...]
    spare: tuple[Given, ...]
    waste: Waste
    considered: int
    left_out: Mapping[str, int]

    @property
    def gap(self) -> float:
        """The most that a cheaper packing could save, as a share of the cost; 0 where it is optimal."""
        return 0.0 if self.status == "optimal" else max(0.0, 1 - self.bound / self.cost_per_hour)

    @property
    def nodes(self) -> int:
        """The number of machines."""
        return sum(each.nodes for each in self.machines)

    def pools(self, *given: Provider) -> list[ComputePool]:
        """Returns the pools that declare it. Raises NotSupported where there is no declaration of a provider yet.

        given: providers with what theirs need besides region and machine type: `sky.GCP(project="p")`.
        """
        return declare.pools(self.machines, given, spot=self.spot)

    def source(self) -> str:
        """Returns Python that declares the pools; a provider without a declaration becomes a comment."""
        return declare.source(self.machines, spot=self.spot)


def packing(problem: Problem, purchase: Purchase, arrangement: Arrangement, region: str | None) -> Packing:
    """Returns the result from the solved problem."""
    gpus = Counter[Gpu]()
    for offer, count in purchase.machines.items():
        gpus[problem.gpus[offer]] += offer.count * count
    left = {gpu: iter(_in_order(layouts)) for gpu, layouts in arrangement.layouts.items()}
    machines = [
        each
        for offer, count in purchase.machines.items()
        for each in _machines(problem, offer, count, left[problem.gpus[offer]], region)
    ]
    given, spare = _given(problem, arrangement), _spare(problem, arrangement)
    return Packing(
        demand=problem.demands,
        machines=tuple(machines),
        spot=problem.supply.spot,
        cost_per_hour=purchase.cost / 1_000_000,
        bound=purchase.cost / 1_000_000 if purchase.proven else purchase.bound / 1_000_000,
        status="optimal" if purchase.proven else "feasible",
        given=given,
        spare=spare,
        waste=_waste(problem, gpus, given, spare),
        considered=len(problem.supply.offers),
        left_out=problem.supply.left_out,
    )


def _in_order(layouts: Mapping[tuple[str, ...], int]) -> list[tuple[str, ...]]:
    """Returns a layout for each GPU, equal ones together, the most frequent first, so that most machines are alike."""
    return [
        names for names, count in sorted(layouts.items(), key=lambda each: (-each[1], each[0])) for _ in range(count)
    ]


def _machines(
    problem: Problem, offer: Offer, count: int, left: Iterator[tuple[str, ...]], region: str | None
) -> list[Machines]:
    """Takes the layouts of *count* machines from *left*; machines with the same ones are put together."""
    price = problem.supply.prices[offer]
    alike: Counter[tuple[tuple[str, ...], ...]] = Counter()
    for _ in range(count):
        alike[tuple(islice(left, offer.count))] += 1
    where = region or declare.region_of(offer, price)
    return [
        Machines(offer, nodes, price, where, tuple(mig.text(names) if names else None for names in layouts))
        for layouts, nodes in alike.items()
    ]


def _given(problem: Problem, arrangement: Arrangement) -> tuple[Given, ...]:
    order = sorted(arrangement.given.items(), key=lambda each: (each[0][1], each[0][0].order))
    return tuple(_one(problem.demands[index].wanted, kind, count) for (kind, index), count in order)


def _spare(problem: Problem, arrangement: Arrangement) -> tuple[Given, ...]:
    there: Counter[PartitionKind] = Counter()
    for gpu, layouts in arrangement.layouts.items():
        kinds = {kind.profile: kind for kind in gpu.kinds(problem.attributes)}
        for names, count in layouts.items():
            for name in names or (None,):
                there[kinds[name]] += count
    for (kind, _), count in arrangement.given.items():
        there[kind] -= count
    order = sorted(there.items(), key=lambda each: each[0].order)
    return tuple(_one(None, kind, count) for kind, count in order if count)


def _one(wanted: str | None, kind: PartitionKind, count: int) -> Given:
    return Given(wanted, kind.gpu.label, kind.profile, count, kind.memory_gb)


def _waste(problem: Problem, gpus: Mapping[Gpu, int], given: tuple[Given, ...], spare: tuple[Given, ...]) -> Waste:
    whole = sum(gpu.memory_gb * count for gpu, count in gpus.items())
    asked = sum(demand.memory_gb * demand.count for demand in problem.demands)
    handed = sum(each.memory_gb * each.count for each in given)
    rest = sum(each.memory_gb * each.count for each in spare)
    return Waste(bought=whole, asked=asked, oversize=handed - asked, spare=rest, lost=max(0, whole - handed - rest))
