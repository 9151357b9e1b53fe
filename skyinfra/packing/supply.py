"""The supply: the GPUs of the offers, their partition kinds, and which kind serves which demand.

A partition serves a demand for memory if it has that memory. It serves a demand for a profile

- if it is that profile, by the name of any driver; else
- if it has the memory in the name, and as much compute as that profile has on one of the GPUs that have it: as many
  SMs where both numbers are known, else as many slices of a GPU that is divided into as many; and
- if it has the media engines or graphics that the name asks for.

A whole GPU has the nominal memory, all engines, and the compute of its largest profile; what the compute of a GPU
without MIG is worth in slices is not known, so that it serves demands for memory only.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache

from skyinfra import mig, providers
from skyinfra.accelerators import catalog
from skyinfra.mig import Geometry, Profile
from skyinfra.offers import Offer, Price
from skyinfra.packing.demand import Demand, having

# The attributes that a partition's attributes serve besides their own.
_ALSO = {"": {"-me"}, "+me": {"", "-me"}, "+me.all": {"+me", "", "-me"}, "+gfx": {"", "-me"}, "-me": set()}


@dataclass(frozen=True, slots=True)
class PartitionKind:
    """A kind of partition of one GPU model, or the whole GPU.

    gpu: the GPU. profile: None is the whole GPU without MIG. memory_gb: nominal where it is all of the GPU's.
    sm: None where unknown. slices, of_slices: of the GPU's compute; 0 of 0 where unknown.
    """

    gpu: Gpu
    profile: str | None
    memory_gb: int
    sm: int | None
    slices: int
    of_slices: int

    @property
    def all_of_it(self) -> bool:
        """Whether it is all of the GPU."""
        return self.profile is None or 0 < self.slices == self.of_slices

    @property
    def attributes(self) -> str:
        return "" if self.profile is None else self.profile.partition("gb")[2]

    @property
    def order(self) -> tuple[str, int, int, str]:
        """Sort key that is the same in every run."""
        return self.gpu.label, -self.memory_gb, -self.slices, self.profile or ""

    def serves(self, demand: Demand, *, exact: bool) -> bool:
        """Returns whether it may serve the demand; *exact*: only partitions asked for by name, and no whole GPUs."""
        if exact and self.profile is None:
            return False
        if not demand.named:
            return self.memory_gb >= demand.memory_gb
        if self._is(demand.wanted):
            return True
        return not exact and self.memory_gb >= demand.memory_gb and self._has_engines(demand) and self._computes(demand)

    def _is(self, name: str) -> bool:
        if self.profile is None:
            return False
        return any(
            geometry.model == self.gpu.model and profile.name == self.profile for geometry, profile in _named(name)
        )

    def _has_engines(self, demand: Demand) -> bool:
        if demand.attributes in (self.attributes, *_ALSO.get(self.attributes, ())):
            return True
        return self.all_of_it and demand.attributes in ("+me", "+me.all")

    def _computes(self, demand: Demand) -> bool:
        for geometry, profile in _named(demand.wanted):
            if self.sm is not None and profile.sm is not None:
                if self.sm >= profile.sm:
                    return True
            elif self.of_slices and self.of_slices == geometry.compute_slices and self.slices >= profile.compute_slices:
                return True
        return False


@dataclass(frozen=True, slots=True)
class Gpu:
    """GPUs that are alike for packing, whatever machine they are in.

    model: the key of the MIG geometry; None without. memory_gb: nominal. divisible: whether it can be partitioned.
    label: what it is called in results, such as "A100-40GB".
    """

    model: str | None
    memory_gb: int
    divisible: bool
    label: str

    @classmethod
    def of(cls, offer: Offer) -> Gpu:
        """Returns the GPU of a machine."""
        row = catalog.choose(offer.accelerator, offer.memory_gb, offer.form_factor)
        divisible = offer.mig_model is not None and _placeable(mig.geometry(offer.mig_model))
        divisible = divisible and providers.who_partitions(offer) != "nobody"
        return cls(row.mig_model, offer.memory_gb, divisible, offer.carries.rpartition(":")[0])

    def kinds(self, attributes: frozenset[str] = frozenset()) -> tuple[PartitionKind, ...]:
        """Returns the kinds of partitions without attributes and with the given ones, and the whole GPU."""
        if self.divided is None:
            return (self.whole,)
        profiles = (each for each in self.divided.profiles if not each.attributes or each.attributes in attributes)
        return tuple(self._kind(each, self.divided) for each in profiles)

    @property
    def whole(self) -> PartitionKind:
        """The GPU as one slot, without MIG."""
        profiles = mig.geometry(self.model).profiles if self.model else ()
        if not profiles:
            return PartitionKind(self, None, self.memory_gb, None, 0, 0)
        largest = max(profiles, key=lambda each: each.compute_slices)
        return PartitionKind(self, None, self.memory_gb, largest.sm, largest.compute_slices, largest.compute_slices)

    def layouts(self, attributes: frozenset[str] = frozenset()) -> tuple[tuple[str, ...], ...]:
        """Returns the maximal combinations of profiles; () where it is not divided."""
        return () if self.divided is None else _maximal(self.divided.model, attributes)

    @property
    def divided(self) -> Geometry | None:
        """The MIG geometry; None where the GPU is only sold whole."""
        return mig.geometry(self.model) if self.model is not None and self.divisible else None

    def _kind(self, profile: Profile, geometry: Geometry) -> PartitionKind:
        total = geometry.compute_slices or 0
        memory = profile.memory_gb
        if profile.compute_slices == total and profile.memory_slices == geometry.memory_slices:
            memory = max(memory, self.memory_gb)
        return PartitionKind(self, profile.name, memory, profile.sm, profile.compute_slices, total)


@dataclass(frozen=True)
class Supply:
    """The offers to choose from, and the number of others by reason."""

    prices: Mapping[Offer, Price]
    spot: bool
    left_out: Mapping[str, int]

    @classmethod
    def of(cls, offers: Iterable[Offer], *, spot: bool, sellers: Collection[str] | None = None) -> Supply:
        """Returns the supply from *offers*: whole NVIDIA GPUs with a known price, in a fixed order.

        sellers: the providers whose offers count; None is all.
        """
        kept: dict[Offer, Price] = {}
        reasons = (
            "a provider that cannot be deployed to",
            "not an NVIDIA GPU",
            "no longer sold to everybody",
            "a share of a GPU",
            "price not known",
        )
        counts = dict.fromkeys(reasons, 0)
        for offer in offers:
            price = offer.price(spot=spot)
            closed = sellers is not None and offer.provider not in sellers
            why = (closed, offer.vendor != "nvidia", offer.legacy, offer.fraction != 1, price is None)
            if price is not None and not any(why):
                kept[offer] = price
            else:
                counts[reasons[why.index(True)]] += 1
        order = sorted(kept, key=lambda offer: (offer.provider, offer.machine_type))
        return cls({offer: kept[offer] for offer in order}, spot, {name: n for name, n in counts.items() if n})

    @property
    def offers(self) -> tuple[Offer, ...]:
        """The offers in their order."""
        return tuple(self.prices)

    def price(self, offer: Offer) -> int:
        """Returns the price of one machine in micro-dollars per hour: whole numbers, so that sums are exact."""
        return round(self.prices[offer].usd_per_hour * 1_000_000)


def attributes(demands: Sequence[Demand]) -> frozenset[str]:
    """Returns the attributes that any of the demands names."""
    return frozenset(demand.attributes for demand in demands if demand.attributes)


@cache
def _named(name: str) -> tuple[tuple[Geometry, Profile], ...]:
    return having(name)


@cache
def _maximal(model: str, attributes: frozenset[str]) -> tuple[tuple[str, ...], ...]:
    geometry = mig.geometry(model)
    profiles = [each for each in geometry.profiles if not each.attributes or each.attributes in attributes]
    shapes = tuple((each.compute_slices, each.size, each.starts, each.max_count, each.attributes) for each in profiles)
    grid = (geometry.compute_slices, geometry.placement_units, shapes)
    if grid not in _PATTERNS:
        names = [each.name for each in profiles]
        _PATTERNS[grid] = tuple(tuple(map(names.index, one)) for one in mig.maximal_multisets(geometry, names))
    return tuple(tuple(profiles[index].name for index in pattern) for pattern in _PATTERNS[grid])


# Most GPUs differ by the memory in the names alone: the combinations, by the places of their profiles.
_PATTERNS: dict[object, tuple[tuple[int, ...], ...]] = {}


def _placeable(geometry: Geometry) -> bool:
    return bool(geometry.profiles) and all(each.starts is not None for each in geometry.profiles)
