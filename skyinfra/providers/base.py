"""The base of providers: the request of a pool, and the selected machines and module inputs."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from pydantic import InstanceOf

from skyinfra.accelerators import Accelerator
from skyinfra.declared import Declaration
from skyinfra.errors import InvalidField, NotSupported
from skyinfra.offers import Price
from skyinfra.providers.data import Data, TerraformProvider, kinds, read


@dataclass(frozen=True)
class Request:
    """The request of a pool to its provider.

    accelerators: in order of preference; empty for CPU nodes. vcpus, memory_gb, disk_gb: minima of one node, None where
    nothing is asked. max_hourly_cost: USD per hour and node. python, runner, apt: what the image needs beyond Python
    packages. labels: of everything that is made. rdma: whether the nodes reach each other's memory. elastic:
    whether the number of nodes follows the work, *nodes* at most. most: of the nodes that later applies may ask for, 0
    where there are always as many. volumes: by the paths where nodes mount them. mounts: folders of buckets that they
    mount. replace_sick: whether nodes are to be replaced that are sick.
    """

    accelerators: tuple[Accelerator, ...]
    nodes: int
    spot: bool = False
    vcpus: int | None = None
    memory_gb: float | None = None
    disk_gb: int | None = None
    max_hourly_cost: float | None = None
    python: str | None = None
    runner: str | None = None
    apt: tuple[str, ...] = ()
    labels: Mapping[str, str] = field(default_factory=dict)
    rdma: bool = False
    elastic: bool = False
    most: int = 0
    volumes: Mapping[str, Declaration] = field(default_factory=dict)
    mounts: Sequence[Declaration] = ()
    replace_sick: bool = False

    @property
    def first(self) -> Accelerator | None:
        """The accelerator of machines that stand already: the first that is declared, one where no count is given."""
        return self.accelerators[0].with_(count=self.accelerators[0].count or 1) if self.accelerators else None

    def refuse(self, lacks: Mapping[str, str], *, place: str) -> None:
        """Raises `NotSupported` where a field is asked for that *place* lacks. lacks: why, by field; see `Data`."""
        for name, why in lacks.items():
            if not name.startswith("provider.") and (value := getattr(self, name.removeprefix("image."))):
                raise NotSupported(
                    why,
                    field=name,
                    given=", ".join(value) if name == "volumes" else value,
                    hint=f"Leave {name} out for {place}, or declare a provider of cloud nodes.",
                )


@dataclass(frozen=True)
class Selection:
    """The machines and module inputs that a provider chose for a pool.

    accelerator: the one that was chosen, with its count on one machine; None for CPU nodes. machine_types: in order of
    preference. image: the module's `image`. inputs: the module inputs that only this provider has; project_paths: those
    of them that are paths, counted from the project folder. prices: of one node, by machine type; those that are not
    known, or that nobody pays, are left out. price_note: what to know of the first one, such as its region and date.
    scheduler: where the head's scheduler listens. secret_file: where the module puts the fleet secret, counted from the
    folder of the node configuration. simulated: whether the accelerators are simulated. share: of each accelerator that
    a node has, less than 1 for fractional machines. hosts: how many nodes one machine is, each with a slot: the hosts
    of a TPU slice. head_machine: machine type of the head where it is a machine besides the nodes, without slots;
    head_price: of that, None where it is not known. grouped: whether the nodes are a machine group, which names them.
    env: variables of the workers, for the network between the nodes.
    """

    accelerator: Accelerator | None
    machine_types: tuple[str, ...]
    scheduler: str
    secret_file: str
    image: str = ""
    inputs: dict[str, object] = field(default_factory=dict)
    project_paths: dict[str, str] = field(default_factory=dict)
    prices: dict[str, Price] = field(default_factory=dict)
    price_note: str = ""
    simulated: bool = False
    share: float = 1.0
    hosts: int = 1
    head_machine: str | None = None
    head_price: Price | None = None
    grouped: bool = False
    env: Mapping[str, str] = field(default_factory=dict)

    @property
    def count(self) -> int:
        """Accelerators on one node."""
        return (self.accelerator.count or 1) // self.hosts if self.accelerator else 0

    @property
    def separate_head(self) -> bool:
        """Whether the head is a machine besides the nodes."""
        return self.head_machine is not None

    @property
    def hourly_cost(self) -> float | None:
        """USD per hour and node of the first machine type; None where it is not known, or for local nodes."""
        price = self.prices.get(self.machine_types[0])
        return price.usd_per_hour if price else None


class Provider(Declaration):
    """The provider of the nodes of a pool. ``kind`` names the provider and its folder below modules/."""

    kind: ClassVar[str]
    words: ClassVar[str] = "provider"

    @property
    def data(self) -> Data:
        """Returns the data file of this provider."""
        return read(self.kind)

    def refuse_lacking(self, request: Request) -> None:
        """Raises `NotSupported` where *request* asks for what this place has not."""
        request.refuse(self.data.lacks, place=f"sky.{type(self).__name__}()")

    def of(self, accelerators: tuple[Accelerator, ...]) -> Provider:
        """Returns the provider of a pool of *accelerators*: this one, or one made of it, with a module of its own."""
        known = accelerators and self.kind in kinds()
        kind = self.data.apart.get(accelerators[0].vendor) if known else None
        if kind is None:
            return self
        other = next(each for each in type(self).__subclasses__() if each.kind == kind)
        return other(**self.model_dump(exclude_unset=True))

    def terraform(self) -> tuple[TerraformProvider, ...]:
        """Returns the Terraform providers that its module needs."""
        return ()

    @abstractmethod
    def select(self, request: Request) -> Selection:
        """Returns the machines for *request*. Pure: looks at nothing but its arguments and shipped data.

        Raises `NotOffered` or `NotSupported`.
        """


class Places(Declaration):
    """Several providers for the nodes of a pool, of which one has them.

    each: in order. by_price: the one that costs least, by the shipped offers, comes first.
    """

    each: tuple[InstanceOf[Provider], ...]
    by_price: bool = False


def cheapest(places: Sequence[Provider]) -> Places:
    """Returns *places* for ``ComputePool(provider=...)``: the one that costs least, by the shipped offers, comes first.

    Raises `InvalidField`.
    """
    if not isinstance(places, list | tuple) or not places:
        given = type(places).__name__
        raise InvalidField("expected a list of providers", field="cheapest", given=given, hint="[sky.AWS(), sky.GCP()]")
    return Places(each=tuple(places), by_price=True)
