"""Packing: the cheapest machines and MIG layouts that hold a demand for partitions. Also reached as mig.pack().

An integer programme over all offers and over every layout of their GPUs that has no room left: exact, not a heuristic.
It needs scipy, which comes with the extra `pack`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from skyinfra.errors import InvalidField
from skyinfra.offers import Offer, Query, ask, load
from skyinfra.packing.declare import Machines, sellers
from skyinfra.packing.demand import Demand, DemandInput, read, text
from skyinfra.packing.problem import Problem, unserved
from skyinfra.packing.programme import solver
from skyinfra.packing.refusals import nothing_serves, too_few_nodes, where
from skyinfra.packing.result import Given, Packing, Waste, packing
from skyinfra.packing.solve import arrange, buy
from skyinfra.packing.supply import Supply
from skyinfra.providers import on_demand, refuses

__all__ = ["DemandInput", "Demand", "Given", "Machines", "Packing", "Waste", "pack", "read", "text"]


def pack(
    demand: DemandInput,
    *,
    provider: str | Sequence[str] | None = None,
    region: str | None = None,
    spot: bool = False,
    max_nodes: int | None = None,
    exact: bool = False,
    offers: Iterable[Offer] | None = None,
    seconds: float = 60,
) -> Packing:
    """Returns the cheapest set of machines and layouts that holds a demand for partitions.

    demand: "1g.10gb*20, 3g.40gb*4, >=18GB*6", or a mapping of profiles and sizes to counts. A profile is served by any
    partition that is at least as large: the memory in its name, and as many SMs as it has on one of the GPUs that have
    it (compute slices where SMs are not known). A size is served by any partition or whole GPU with that memory.
    exact: a profile is served by itself alone, on whatever GPU has it, and a size by partitions alone.
    provider, region, spot: which offers, at which price. Without a provider those machines are chosen that this version
    deploys without an image of one's own. The region of a price may be another one; it says which.
    max_nodes: how many machines at most. offers: to choose among, in place of those that are shipped.
    seconds: how long to look for the proof that nothing is cheaper; then the best so far is returned, as "feasible".

    Of several cheapest packings one with the fewest machines is taken, and the same in every run. As many machines of
    each offer as needed are taken to be there: quotas and stock are not known here.

    Raises InvalidDemand and UnknownProfile for what cannot be read; InvalidField for a provider or region without
    offers, or a limit below 1; NotOffered where a part of the demand cannot be served, DemandDoesNotFit where max_nodes
    is too small, both with what would work; MissingDependency without scipy; PackingFailed where the time is over
    before anything was found.
    """
    solver()
    demands = read(demand)
    if max_nodes is not None and (isinstance(max_nodes, bool) or max_nodes < 1):
        raise InvalidField("a number of machines from 1", field="max_nodes", given=max_nodes)
    names = (provider,) if isinstance(provider, str) else tuple(provider or ())
    open_to_all = names or offers is not None
    among = _among(offers, names, region)
    if not open_to_all:
        among = tuple(each for each in among if refuses(each) is None)
    if not spot:
        among = tuple(each for each in among if on_demand(each))
    supply = Supply.of(among, spot=spot, sellers=None if open_to_all else sellers())
    problem = Problem(demands, supply, max_nodes=max_nodes, exact=exact)
    missing = unserved(problem)
    if missing:
        raise nothing_serves(problem, missing, where(names, region))
    purchase = buy(problem, seconds=seconds)
    if purchase is None:
        raise too_few_nodes(problem, seconds=seconds)
    return packing(problem, purchase, arrange(problem, purchase), region)


# Shares of GPUs are looked at, so that they can be counted among what is left out.
_ANY_SHARE = 0.001


def _among(offers: Iterable[Offer] | None, providers: tuple[str, ...], region: str | None) -> tuple[Offer, ...]:
    """Returns the offers to choose among. Names are only checked in the shipped offers."""
    if offers is None:
        return ask(provider=providers, region=region, fraction=_ANY_SHARE, legacy=True).run(load())
    return Query(providers=providers, region=region, fraction=_ANY_SHARE, legacy=True).run(offers)
