"""The problem as numbers: the partitions of each GPU's layouts for the demands, and the offers that can be best.

Partitions are alike if they serve the same demands, so a layout is a vector: how many partitions it has for each set of
demands. A layout that another one covers is not needed, nor an offer for which others give at least as much for less.
Both leave the least cost as it is, and make thousands of columns dozens.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeAlias

from skyinfra.offers import Offer
from skyinfra.packing.demand import Demand
from skyinfra.packing.supply import Gpu, PartitionKind, Supply, attributes

# A set of demands, as bits, and how many partitions serve just that set; as a tuple, so that it can be compared.
Vector: TypeAlias = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Problem:
    """The demands and the offers that may hold them.

    max_nodes: of machines; None is any number. exact: profiles that are asked for by name are served by no others.
    """

    demands: tuple[Demand, ...]
    supply: Supply
    max_nodes: int | None = None
    exact: bool = False

    @cached_property
    def attributes(self) -> frozenset[str]:
        return attributes(self.demands)

    def serving(self, kind: PartitionKind) -> int:
        """Returns the demands that the partition serves, as bits."""
        return sum(1 << i for i, each in enumerate(self.demands) if kind.serves(each, exact=self.exact))

    @cached_property
    def gpus(self) -> dict[Offer, Gpu]:
        """The GPUs of each offer."""
        return {offer: Gpu.of(offer) for offer in self.supply.offers}

    @cached_property
    def kinds(self) -> dict[Gpu, dict[str | None, PartitionKind]]:
        """The partition kinds of each GPU of the offers, by profile; None is the whole GPU."""
        every = dict.fromkeys(self.gpus.values())
        return {gpu: {kind.profile: kind for kind in gpu.kinds(self.attributes)} for gpu in every}

    @cached_property
    def vectors(self) -> dict[Gpu, dict[Vector, tuple[str, ...]]]:
        """The partition counts of the layouts of each GPU, each with a layout; GPUs that serve nothing are left out.

        () is the GPU as a whole. Of layouts that give the same the first is taken.
        """
        found = {gpu: self._layout_vectors(gpu, kinds) for gpu, kinds in self.kinds.items()}
        return {gpu: kept for gpu, vectors in found.items() if (kept := _without_covered(vectors))}

    def _layout_vectors(self, gpu: Gpu, kinds: Mapping[str | None, PartitionKind]) -> dict[Vector, tuple[str, ...]]:
        bits = {profile: self.serving(kind) for profile, kind in kinds.items()}
        if gpu.divided is None:
            return {((bits[None], 1),): ()} if bits[None] else {}
        found: dict[Vector, tuple[str, ...]] = {}
        for names in gpu.layouts(self.attributes):
            counts = Counter(bits[name] for name in names if bits[name])
            if counts:
                found.setdefault(tuple(sorted(counts.items())), names)
        return found

    @cached_property
    def offers(self) -> tuple[Offer, ...]:
        """The offers of which a best packing can be made."""
        able = [_Able(offer, gpu, self.supply.price(offer)) for offer, gpu in self.gpus.items() if gpu in self.vectors]
        return tuple(each.offer for each in able if not any(self._replaces(other, each) for other in able))

    def _replaces(self, better: _Able, able: _Able) -> bool:
        """Returns whether machines of the *better* offer can always stand in for one of the other, for less money.

        For the same money too where it is one machine for one; then the one with more GPUs stays, or the first by name.
        """
        machines = -(-able.offer.count // better.offer.count)
        cost = machines * better.price
        if better is able or cost > able.price or (machines > 1 and (cost == able.price or self.max_nodes is not None)):
            return False
        if not self._covers(better.gpu, able.gpu):
            return False
        mutual = able.offer.count == better.offer.count and self._covers(able.gpu, better.gpu)
        return cost < able.price or not mutual or better.name < able.name

    def _covers(self, better: Gpu, gpu: Gpu) -> bool:
        known = self._covering.get((better, gpu))
        if known is None:
            known = all(any(covers(w, v) for w in self.vectors[better]) for v in self.vectors[gpu])
            self._covering[better, gpu] = known
        return known

    @cached_property
    def _covering(self) -> dict[tuple[Gpu, Gpu], bool]:
        return {}


@dataclass(frozen=True)
class _Able:
    """An offer that serves a demand, with its figures at hand."""

    offer: Offer
    gpu: Gpu
    price: int

    @property
    def name(self) -> tuple[str, str]:
        return self.offer.provider, self.offer.machine_type


def covers(vector: Vector, other: Vector) -> bool:
    """Returns whether each partition of *other* has a substitute in *vector*, which serves the same demands."""
    if vector == other:
        return True
    wanted = [bits for bits, count in other for _ in range(count)]
    given = [bits for bits, count in vector for _ in range(count)]
    if len(wanted) > len(given):
        return False
    taken: dict[int, int] = {}

    def find(index: int, seen: set[int]) -> bool:
        for place, bits in enumerate(given):
            if place not in seen and wanted[index] & ~bits == 0:
                seen.add(place)
                if place not in taken or find(taken[place], seen):
                    taken[place] = index
                    return True
        return False

    return all(find(index, set()) for index in range(len(wanted)))


def _without_covered(vectors: Mapping[Vector, tuple[str, ...]]) -> dict[Vector, tuple[str, ...]]:
    order = sorted(vectors)
    kept = [
        vector
        for index, vector in enumerate(order)
        if not any(
            covers(other, vector) and (place < index or not covers(vector, other))
            for place, other in enumerate(order)
            if place != index
        )
    ]
    return {vector: vectors[vector] for vector in kept}


def unserved(problem: Problem) -> Sequence[Demand]:
    """Returns the demands that nothing on offer serves."""
    bits = 0
    for vectors in problem.vectors.values():
        for vector in vectors:
            for each, _ in vector:
                bits |= each
    return [demand for index, demand in enumerate(problem.demands) if not bits >> index & 1]
