"""Solving: first the least cost, then the fewest machines for it, then the layouts that suit the demand best.

Each step fixes what the one before has found, so that of several cheapest packings always the same one is taken.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from skyinfra.errors import PackingFailed
from skyinfra.offers import Offer
from skyinfra.packing.problem import Problem
from skyinfra.packing.programme import NODES, Answer, Programme
from skyinfra.packing.supply import Gpu, PartitionKind

# Costs are minimised in thousandths of a dollar: prices have six decimals, and the solver is exact to a millionth.
_MICRO_PER_UNIT = 1000
_HALF_A_MICRO = 0.5 / _MICRO_PER_UNIT
# The solver's integers are integers within this.
_ROUNDING = 1e-6


@dataclass(frozen=True)
class Purchase:
    """The machines to buy. cost: micro-dollars per hour. bound: below which no purchase costs; proven: none does.

    layouts: how many GPUs of each kind get which layout, in one way that holds the demand.
    """

    machines: Mapping[Offer, int]
    cost: int
    bound: float
    proven: bool
    layouts: Mapping[Gpu, Mapping[tuple[str, ...], int]]


@dataclass(frozen=True)
class Arrangement:
    """The layouts of the GPUs of a purchase, and the partitions that each demand gets.

    layouts: how many GPUs of each kind have which layout; () is a whole GPU. given: how many partitions of which kind
    go to which demand, by its index.
    """

    layouts: Mapping[Gpu, Mapping[tuple[str, ...], int]]
    given: Mapping[tuple[PartitionKind, int], int]


class _Buying:
    """The programme of the purchase: machines, layouts as vectors, and the partitions that go to the demands."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.programme = Programme()
        self.machines = {offer: self.programme.column() for offer in problem.offers}
        self.gpus: dict[Gpu, list[Offer]] = {}
        for offer in problem.offers:
            self.gpus.setdefault(problem.gpus[offer], []).append(offer)
        self.layouts = {(gpu, vector): self.programme.column() for gpu in self.gpus for vector in problem.vectors[gpu]}
        self.cost = {column: problem.supply.price(offer) / _MICRO_PER_UNIT for offer, column in self.machines.items()}
        self._limit_layouts()
        self._give()
        if problem.max_nodes is not None:
            self.programme.row(dict.fromkeys(self.machines.values(), 1), at_most=problem.max_nodes)

    def _limit_layouts(self) -> None:
        """No more GPUs get a layout than the machines have."""
        for gpu, offers in self.gpus.items():
            used: dict[int, float] = {self.layouts[gpu, vector]: 1 for vector in self.problem.vectors[gpu]}
            self.programme.row(used | {self.machines[offer]: -offer.count for offer in offers}, at_most=0)

    def _give(self) -> None:
        """No more partitions are handed out than there are, and each demand is met."""
        demands = self.problem.demands
        sets = sorted({bits for _, vector in self.layouts for bits, _ in vector})
        columns = {
            (bits, index): self.programme.column(integer=False)
            for bits in sets
            for index in range(len(demands))
            if bits >> index & 1
        }
        for bits in sets:
            row: dict[int, float] = {column: 1 for (each, _), column in columns.items() if each == bits}
            row |= {column: -n for (_, vector), column in self.layouts.items() if (n := dict(vector).get(bits))}
            self.programme.row(row, at_most=0)
        for index, demand in enumerate(demands):
            self.programme.row({c: 1 for (_, each), c in columns.items() if each == index}, at_least=demand.count)

    def cheapest(self, seconds: float) -> Answer:
        """The least cost. A rounded solution of the relaxed programme bounds it, which saves most of the work."""
        relaxed = self.programme.minimise(self.cost, relaxed=True)
        if relaxed.values is None:
            return relaxed
        known = self._rounded(relaxed.values)
        if known is None:
            return self.programme.minimise(self.cost, seconds=seconds)
        limit = (self.cost, relaxed.objective - _HALF_A_MICRO, known + _HALF_A_MICRO)
        return self.programme.minimise(self.cost, seconds=seconds, more=[limit], upper=self._most(known))

    def _rounded(self, values: tuple[float, ...]) -> float | None:
        """Returns the cost of the machines for the layouts, rounded up; None with too many machines."""
        cost, nodes = 0.0, 0
        for gpu, offers in self.gpus.items():
            needed = sum(math.ceil(values[self.layouts[gpu, v]] - _ROUNDING) for v in self.problem.vectors[gpu])
            for offer in offers:
                count = math.floor(values[self.machines[offer]] + _ROUNDING)
                needed, nodes = needed - count * offer.count, nodes + count
                cost += count * self.cost[self.machines[offer]]
            if needed > 0:
                last = min(offers, key=lambda each: -(-needed // each.count) * self.cost[self.machines[each]])
                cost += -(-needed // last.count) * self.cost[self.machines[last]]
                nodes += -(-needed // last.count)
        return None if nodes > (self.problem.max_nodes or nodes) else cost

    def _most(self, cost: float) -> dict[int, float]:
        """Returns the number of machines of each type, and of GPUs, that the cost buys."""
        most = {column: math.floor(cost / self.cost[column] + _ROUNDING) for column in self.machines.values()}
        for gpu, offers in self.gpus.items():
            gpus = sum(most[self.machines[offer]] * offer.count for offer in offers)
            most |= {self.layouts[gpu, vector]: gpus for vector in self.problem.vectors[gpu]}
        return dict(most)

    def settled(self, cost: int) -> Answer:
        """Returns a purchase at no higher cost with the fewest machines, of the first offers."""
        limit: list[tuple[Mapping[int, float], float, float]] = [
            (self.cost, -math.inf, cost / _MICRO_PER_UNIT + _HALF_A_MICRO)
        ]
        upper = self._most(cost / _MICRO_PER_UNIT)
        ones: dict[int, float] = dict.fromkeys(self.machines.values(), 1)
        fewest = self.programme.minimise(ones, nodes=NODES, more=limit, upper=upper)
        if fewest.values is None:
            return fewest
        limit.append((ones, -math.inf, round(fewest.objective)))
        ranks: dict[int, float] = {column: rank for rank, column in enumerate(self.machines.values())}
        first = self.programme.minimise(ranks, nodes=NODES, more=limit, upper=upper)
        return fewest if first.values is None else first


def buy(problem: Problem, *, seconds: float) -> Purchase | None:
    """Returns the cheapest machines that hold the demand; None where no number of machines within the limit does.

    seconds: after which the best so far is taken. Raises PackingFailed where there is none by then.
    """
    buying = _Buying(problem)
    best = buying.cheapest(seconds)
    if best.values is None:
        if best.proven:
            return None
        raise PackingFailed(f"the solver found no packing within {seconds:g} s", hint="Ask for less at once.")
    cost = _cost(problem, buying, best.whole())
    settled = buying.settled(cost)
    values = best.whole() if settled.values is None else settled.whole()
    layouts: dict[Gpu, dict[tuple[str, ...], int]] = {}
    for (gpu, vector), column in buying.layouts.items():
        if values[column]:
            layouts.setdefault(gpu, {})[problem.vectors[gpu][vector]] = values[column]
    return Purchase(
        machines={offer: values[column] for offer, column in buying.machines.items() if values[column]},
        cost=_cost(problem, buying, values),
        bound=best.bound * _MICRO_PER_UNIT,
        proven=best.proven,
        layouts=layouts,
    )


def fewest_machines(problem: Problem, *, seconds: float) -> int | None:
    """Returns the least number of machines for the demand at any cost; None where the time ran out."""
    buying = _Buying(problem)
    ones: dict[int, float] = dict.fromkeys(buying.machines.values(), 1)
    found = buying.programme.minimise(ones, seconds=seconds)
    return None if found.values is None else round(found.objective)


def _cost(problem: Problem, buying: _Buying, values: tuple[int, ...]) -> int:
    return sum(problem.supply.price(offer) * values[column] for offer, column in buying.machines.items())


class _Arranging:
    """The programme of the layouts: each GPU of the purchase gets one, each partition goes to a demand or is spare."""

    def __init__(self, problem: Problem, purchase: Purchase) -> None:
        self.problem = problem
        self.programme = Programme()
        self.gpus = Counter[Gpu]()
        for offer, machines in purchase.machines.items():
            self.gpus[problem.gpus[offer]] += offer.count * machines
        self.layouts: dict[tuple[Gpu, tuple[str, ...]], int] = {}
        self.given: dict[tuple[PartitionKind, int], int] = {}
        for gpu, count in self.gpus.items():
            for names in gpu.layouts(problem.attributes) or ((),):
                self.layouts[gpu, names] = self.programme.column(upper=count)
            self._rows(gpu, count)
        for index, demand in enumerate(problem.demands):
            row: dict[int, float] = {column: 1 for (_, each), column in self.given.items() if each == index}
            self.programme.row(row, at_least=demand.count, at_most=demand.count)

    def _rows(self, gpu: Gpu, count: int) -> None:
        """Every GPU has a layout, and of each kind no more is handed out than there are."""
        mine = {names: column for (each, names), column in self.layouts.items() if each == gpu}
        self.programme.row(dict.fromkeys(mine.values(), 1), at_least=count, at_most=count)
        for kind in gpu.kinds(self.problem.attributes):
            row: dict[int, float] = {
                column: -(names.count(kind.profile) if kind.profile else 1) for names, column in mine.items()
            }
            bits = self.problem.serving(kind)
            for index, demand in enumerate(self.problem.demands):
                if bits >> index & 1:
                    self.given[kind, index] = self.programme.column(upper=demand.count)
                    row[self.given[kind, index]] = 1
            self.programme.row(row, at_most=0)

    def oversize(self) -> dict[int, float]:
        """Returns the memory that is given beyond the demand, in GB."""
        demands = self.problem.demands
        return {column: kind.memory_gb - demands[i].memory_gb for (kind, i), column in self.given.items()}

    def untidiness(self) -> dict[int, float]:
        """Returns the compute slices that no partition has, and then the number of partitions."""
        weight = 1 + 8 * self.gpus.total()
        costs: dict[int, float] = {}
        for (gpu, names), column in self.layouts.items():
            kinds = {kind.profile: kind for kind in gpu.kinds(self.problem.attributes)}
            used = sum(kinds[name].slices for name in names)
            total = max((kind.of_slices for kind in kinds.values()), default=0) if names else 0
            costs[column] = weight * (total - used) + len(names)
        return costs

    def fixed(self, layouts: Mapping[Gpu, Mapping[tuple[str, ...], int]]) -> Answer:
        """Hands out with these layouts; GPUs without one get the first."""
        left = Counter(self.gpus)
        for column in self.layouts.values():
            self.programme.upper[column] = 0
        for (gpu, names), column in self.layouts.items():
            count = layouts.get(gpu, {}).get(names, 0)
            self.programme.upper[column] += count
            left[gpu] -= count
        for (gpu, _), column in self.layouts.items():
            self.programme.upper[column] += left.pop(gpu, 0)
        return self.programme.minimise(self.oversize())


def arrange(problem: Problem, purchase: Purchase) -> Arrangement:
    """Returns the layouts for the machines of the purchase.

    With the least memory handed out beyond what was asked for, then with the fewest compute slices that belong to no
    partition, then with the fewest partitions. All layouts are maximal: a spare partition costs nothing, and a GPU with
    free room would have to be divided anew to use it.
    """
    arranging = _Arranging(problem, purchase)
    oversize = arranging.oversize()
    best = arranging.programme.minimise(oversize, nodes=NODES)
    if best.values is None:
        best = arranging.fixed(purchase.layouts)
    else:
        limit = (oversize, -math.inf, round(best.objective) + 0.5)
        tidy = arranging.programme.minimise(arranging.untidiness(), nodes=NODES, more=[limit])
        best = best if tidy.values is None else tidy
    if best.values is None:
        raise PackingFailed("the solver found no layouts for the machines of the purchase")
    values = best.whole()
    layouts: dict[Gpu, dict[tuple[str, ...], int]] = {}
    for (gpu, names), column in arranging.layouts.items():
        if values[column]:
            layouts.setdefault(gpu, {})[names] = values[column]
    return Arrangement(layouts, {key: values[column] for key, column in arranging.given.items() if values[column]})
