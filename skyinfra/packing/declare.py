"""Machines that are alike, and the pools that declare them, as objects and as source text."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from skyinfra import mig, offers, providers
from skyinfra.errors import InvalidField, NotSupported
from skyinfra.mig import Layout
from skyinfra.offers import Offer, Price
from skyinfra.pool import ComputePool
from skyinfra.providers import Provider


@dataclass(frozen=True, slots=True)
class Machines:
    """Machines that are alike, down to their layouts.

    offer: their type. nodes: how many. price: of one. region: where they are declared; None where the offer does not
    say where it is. layouts: of each GPU, as a declaration says it ("1g.10gb*7"); None is a whole GPU without MIG.
    """

    offer: Offer
    nodes: int
    price: Price
    region: str | None
    layouts: tuple[str | None, ...]

    @property
    def placements(self) -> tuple[Layout, ...]:
        """The placements of the partitions of each GPU; () for a whole GPU."""
        if self.offer.mig_model is None:
            return ((),) * len(self.layouts)
        geometry = mig.geometry(self.offer.mig_model)
        return tuple(mig.resolve(each, geometry, 1)[0] if each else () for each in self.layouts)

    @property
    def accelerator(self) -> str:
        """The accelerator string: "H100:8/1g.10gb*7"; with bars between the layouts where they differ."""
        written = [each for each in self.layouts if each is not None]
        if not written:
            return self.offer.carries
        return f"{self.offer.carries}/{written[0] if len(set(written)) == 1 else '|'.join(written)}"


def pools(machines: Sequence[Machines], given: Sequence[Provider], *, spot: bool) -> list[ComputePool]:
    """Returns a pool for each of *machines*. Raises NotSupported for a provider without a declaration.

    What a provider needs besides region and machine type (a key, a project) is that of the one of its kind in *given*.
    """
    declared = providers.deployable()
    own = {type(each): {name: getattr(each, name) for name in each.model_fields_set} for each in given}
    missing = {name: why for each in machines if (why := providers.undeployable(name := each.offer.provider))}
    if missing:
        raise NotSupported(
            "; ".join(f"{name}: {why}" for name, why in sorted(missing.items())),
            field="provider",
            hint=f"Pack for providers that it deploys to: {', '.join(sellers())}.",
        )
    return [
        ComputePool(
            name=name,
            nodes=each.nodes,
            provider=(cls := declared[each.offer.provider])(**(own.get(cls, {}) | _arguments(cls, each))),
            accelerator=each.accelerator,
            spot=spot,
        )
        for name, each in zip(_names(machines), machines, strict=True)
    ]


def source(machines: Sequence[Machines], *, spot: bool) -> str:
    """Python text that makes the same pools."""
    lines = ["import skyinfra as sky", "", "pools = ["]
    for name, each in zip(_names(machines), machines, strict=True):
        said = f"{each.nodes} x {each.offer.machine_type} at {each.price}"
        cls = providers.deployable().get(each.offer.provider)
        if cls is None:
            lines.append(f"    # {each.offer.provider} {said}: {each.accelerator}")
            lines.append(_comment(f"It cannot be declared: {providers.undeployable(each.offer.provider)}."))
            continue
        values = _arguments(cls, each)
        arguments = ", ".join(f"{key}={value!r}" for key, value in values.items()).replace("'", '"')
        lines += [
            f"    # {said}",
            *(_comment(f"To be added: {line}") for line in _lacking(cls, values)),
            "    sky.ComputePool(",
            f'        name="{name}",',
            f"        nodes={each.nodes},",
            f"        provider=sky.{cls.__name__}({arguments}),",
            *_accelerator(each.accelerator),
            *(["        spot=True,"] if spot else []),
            "    ),",
        ]
    return "\n".join([*lines, "]", ""])


def _comment(text: str) -> str:
    """Returns the text as lines of a comment, which a terminal of 80 columns does not break."""
    return textwrap.fill(text, 76, initial_indent="    # ", subsequent_indent="    # ", break_long_words=False)


def _accelerator(text: str) -> list[str]:
    """Returns the lines of the argument; each GPU's own layout on a line where they differ."""
    if "|" not in text:
        return [f'        accelerator="{text}",']
    head, _, layouts = text.partition("/")
    pieces = [f"{head}/", *(f"{layout}|" for layout in layouts.split("|")[:-1]), layouts.rpartition("|")[2]]
    return ["        accelerator=(", *(f'            "{piece}"' for piece in pieces), "        ),"]


def region_of(offer: Offer, price: Price) -> str | None:
    """Returns the region for the declaration: that of the price, if the machine is offered there."""
    if price.region != offers.EVERYWHERE and offer.in_region(price.region):
        return price.region
    return offer.regions[0] if offer.regions else None


def sellers() -> tuple[str, ...]:
    """Returns the providers that have offers and that this version deploys to, by name."""
    return tuple(sorted(set(providers.deployable()) & set(offers.providers())))


def _lacking(cls: type[Provider], values: dict[str, Any]) -> list[str]:
    """Returns the first value that a provider of this kind needs besides *values*, in the words that refuse it."""
    try:
        cls(**values)
    except InvalidField as error:
        return str(error).splitlines()[:1]
    return []


def _arguments(cls: type[Provider], machines: Machines) -> dict[str, Any]:
    """Returns the region of the price and the machine type; no region of a marketplace, which has none to declare."""
    anywhere = "region" in cls.model_fields and cls.model_fields["region"].default == offers.EVERYWHERE
    values = {"region": None if anywhere else machines.region, "instance_types": [machines.offer.machine_type]}
    return {name: value for name, value in values.items() if value is not None and name in cls.model_fields}


def _names(machines: Sequence[Machines]) -> list[str]:
    """Returns a name for each pool: the accelerator and a number."""
    slugs = [re.sub(r"[^a-z0-9]+", "-", each.offer.carries.rpartition(":")[0].lower()) for each in machines]
    return [f"{slug}-{index}" for index, slug in enumerate(slugs, start=1)]
