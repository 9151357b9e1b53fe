"""Errors for a demand that cannot be packed: which part, why, and what would work."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from skyinfra.errors import DemandDoesNotFit, NotOffered
from skyinfra.offers import EVERYWHERE, Offer, described, load, usd
from skyinfra.packing.declare import sellers
from skyinfra.packing.demand import Demand, having
from skyinfra.packing.problem import Problem
from skyinfra.packing.solve import buy, fewest_machines
from skyinfra.packing.supply import Gpu, PartitionKind, Supply

_SHOWN = 3


def nothing_serves(problem: Problem, demands: Sequence[Demand], asked: str) -> NotOffered:
    """Returns the error for demands that no offer serves. asked: where was looked, such as "of aws in us-east-1"."""
    parts = ", ".join(each.wanted for each in demands)
    purchase = "spot" if problem.supply.spot else "on-demand"
    message = f"no offer {asked + ' ' if asked else ''}with a known {purchase} price can hold {parts}"
    return NotOffered(message, field="demand", hint="\n".join(_why(problem, each) for each in demands))


def _why(problem: Problem, demand: Demand) -> str:
    """Returns the GPUs that serve the demand, and their providers; or the largest partition that exists."""
    everywhere = Supply.of(load(), spot=problem.supply.spot, sellers=sellers())
    sentences = []
    if problem.exact and demand.named:
        loose = [kind for kind in _kinds(problem, problem.supply) if kind.serves(demand, exact=False)]
        if loose:
            least = min(loose, key=lambda kind: (kind.memory_gb, kind.order))
            sentences.append(f"Without exact, {least.profile or 'a whole GPU'} of {least.gpu.label} would serve.")
    able = [offer for offer in everywhere.offers if _serves(problem, offer, demand)]
    able.sort(key=lambda offer: (everywhere.price(offer) / offer.count, offer.provider, offer.machine_type))
    if able:
        cheapest: dict[str, Offer] = {}
        for offer in able:
            cheapest.setdefault(offer.provider, offer)
        shown = list(cheapest.values())[:_SHOWN]
        sentences.append(f"Offered: {'; '.join(described(offer, spot=problem.supply.spot) for offer in shown)}.")
    elif demand.named:
        models = ", ".join(geometry.model for geometry, _ in having(demand.wanted))
        whom = "nobody whom this version deploys to"
        sentences.append(f"It is a profile of {models}, which {whom} offers in partitions at a known price.")
    largest = max(_kinds(problem, problem.supply), key=lambda kind: (kind.memory_gb, kind.order), default=None)
    if largest is not None and largest.memory_gb < demand.memory_gb:
        what = f"{largest.profile} of {largest.gpu.label}" if largest.profile else largest.gpu.label
        sentences.append(f"The largest there is {what} with {largest.memory_gb} GB.")
    return f"{demand.wanted}: {' '.join(sentences) or 'nothing on offer is as large.'}"


def too_few_nodes(problem: Problem, *, seconds: float) -> DemandDoesNotFit:
    """The error for a limit of machines within which nothing holds the demand: the least that does, and its cost."""
    # A limit that limits nothing: without one, machines would be left out that are dearer than several smaller ones.
    least = fewest_machines(replace(problem, max_nodes=sum(each.count for each in problem.demands)), seconds=seconds)
    message = f"the demand does not fit on {problem.max_nodes} machine{'' if problem.max_nodes == 1 else 's'}"
    if least is None:
        return DemandDoesNotFit(message, field="max_nodes", given=problem.max_nodes)
    cheapest = buy(replace(problem, max_nodes=least), seconds=seconds)
    unlimited = buy(replace(problem, max_nodes=None), seconds=seconds)
    hint = f"At least {least} are needed"
    if cheapest is not None and unlimited is not None:
        machines = sum(unlimited.machines.values())
        hint += f", for {usd(cheapest.cost / 1e6)}/h"
        hint += f"; the cheapest set is {machines} machines for {usd(unlimited.cost / 1e6)}/h"
    return DemandDoesNotFit(message, field="max_nodes", given=problem.max_nodes, hint=f"{hint}.")


def where(providers: Sequence[str], region: str | None) -> str:
    """Returns the providers and region of the search: "of aws or azure in us-east-1"."""
    parts = [f"of {' or '.join(providers)}"] if providers else []
    return " ".join(parts + ([f"in {region}"] if region not in (None, EVERYWHERE) else []))


def _kinds(problem: Problem, supply: Supply) -> list[PartitionKind]:
    gpus = dict.fromkeys(Gpu.of(offer) for offer in supply.offers)
    return [kind for gpu in gpus for kind in gpu.kinds(problem.attributes)]


def _serves(problem: Problem, offer: Offer, demand: Demand) -> bool:
    return any(kind.serves(demand, exact=problem.exact) for kind in Gpu.of(offer).kinds(problem.attributes))
