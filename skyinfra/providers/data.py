"""The differences between providers, as data: ``KIND.toml`` beside this file, read into one `Data` for each.

Tables of the file: about, terraform, boot, traits, lacks, labels, images, no_image, machines, prices, quotas,
preflight, errors; a provider leaves out what it has not. Every table carries its source and date, in fields or in a
comment.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from skyinfra.accelerators import Accelerator
from skyinfra.declared import OUTPUT, Declaration
from skyinfra.errors import InvalidField, NotOffered, NotSupported
from skyinfra.offers import Price
from skyinfra.providers.preflight_requests import Asked

Form = Literal["node.json", "cloud-config", "script", "container"]
# How the runner's wheel reaches a node.
Delivery = Literal["bucket", "metadata", "ssh", "index", "mount"]

# Inputs of the module that are fields of the class, under one name.
_ACCESS = ("allow_cidrs", "ssh_public_key")
_FOLDER = Path(__file__).parent
# The alias of a Terraform provider without a configuration.
NO_CONFIGURATION = "this"


def strings(value: object) -> object:
    """Returns a list of strings as a tuple; a single string, of which each letter would be one, is refused."""
    if isinstance(value, str):
        raise ValueError(f"expected a list of strings: [{value!r}]")
    return tuple(value) if isinstance(value, list) else value


Strings = Annotated[tuple[str, ...] | list[str], BeforeValidator(strings)]
# That may be outputs of other constructs.
OutputStrings = Annotated[Strings, OUTPUT]
Output = Annotated[str | None, OUTPUT]


class Boot(Declaration):
    """How a node is set up at its first boot.

    form: of the user data; "node.json" is the configuration itself. limit: bytes of user data that the provider takes,
    as it counts them; None for no limit. gzip: whether they are sent compressed. delivery: of the runner's wheel.
    """

    form: Form
    limit: int | None = None
    gzip: bool = False
    delivery: Delivery
    source: str
    date: str


class Traits(Declaration):
    """The abilities of a provider's place.

    preemption_notice: whose notices a machine gets before it is taken back; None for none. layout_channel: the way of
    a changed layout to the head: the machine's metadata, or the apply itself. partitioned_by: who makes MIG
    partitions: the tenant, as root on the node; the provider, when it makes the machine; nobody. node_to_node:
    whether nodes can connect to each other, which gangs over nodes need. groups: whether there are machine groups.
    spot: how interruptible capacity is asked for. metadata_hosts: addresses that tasks must not reach. scratch: glob
    of local disks. head_volume: globs of the volume with the head's jobs, {} being its id. ssh_user: of the images.
    host_keys: of machines that are set up over SSH: given with their user data, or trusted at the first contact and
    kept. key_kinds: of the SSH keys that it takes.
    """

    preemption_notice: Literal["aws", "gcp", "azure"] | None = None
    layout_channel: Literal["metadata", "client"]
    partitioned_by: Literal["tenant", "provider", "nobody"]
    node_to_node: bool
    groups: bool
    spot: Literal["no", "flag", "bid"]
    metadata_hosts: Strings = ()
    scratch: str | None = None
    head_volume: Strings = ()
    ssh_user: str
    host_keys: Literal["given", "first contact"] | None = None
    key_kinds: Strings = ("ssh-ed25519", "ssh-rsa")
    source: str
    date: str


@dataclass(frozen=True)
class TerraformProvider:
    """A Terraform provider as a module needs it: its name there, where it comes from, and its configuration.

    Pools whose configurations differ get one each, told apart by `alias`. settings: of every configuration. Both hold
    JSON values.
    """

    name: str
    source: str
    version: str
    config: tuple[tuple[str, Any], ...] = ()
    settings: tuple[tuple[str, Any], ...] = ()

    @property
    def alias(self) -> str:
        """Made of the values of the configuration: ``us-east-1_research``; ``this`` where there are none."""
        return "_".join(re.sub(r"[^A-Za-z0-9_-]", "-", str(value)) for _, value in self.config) or NO_CONFIGURATION

    def having(self, name: str, value: Any) -> TerraformProvider:
        """Returns the same provider with one more setting, which is no part of its alias."""
        return replace(self, settings=(*self.settings, (name, value)))

    def configuration(self) -> dict[str, Any]:
        """Returns the arguments of Terraform's provider block."""
        return {"alias": self.alias, **dict(self.config), **dict(self.settings)}


# Makes the host keys of machines whose user data bring them.
TLS = TerraformProvider("tls", "registry.terraform.io/hashicorp/tls", ">= 4.0.0, < 5.0.0")


class Labels(Declaration):
    """The labels that a provider takes: patterns of a whole name and value, at most how many, and the rule in words."""

    name: str
    value: str
    limit: int
    says: str


class About(Declaration):
    """For people: its name, what the nodes are, how nodes and clients find the head, and how far it was tried."""

    called: str
    nodes: str
    head: str
    tested: str


class Data(Declaration):
    """The data file of a provider. exports: its module and the public names there. images: by vendor ("cpu" for none;
    "nvidia:8" where eight have one of their own) and architecture. errors: of its API. terraform: name, source and
    version of the provider, config, the arguments of its block, place, where a resource
    is, by the state (see `skyinfra.deploy.places`), inputs, the fields of the class that its module takes as they
    are, and machines: by resource, the attributes that say the type, region and purchase of a machine.

    lacks: why the place has not what a field asks for, by the field of the pool, or of the class as `provider.FIELD`;
    the module has no such input.

    machines: `general` (name, vCPUs, GiB; smallest first), `head`, `disk_gb`, the smallest and largest disk (0: any),
    `images`, of one's own by patterns of types, and patterns of types: `arm`, and `deployed`, where the offers have
    others too, which are called `deployed_as`. prices: of machines without accelerators, in `regions`, a pattern.
    quotas: see `skyinfra.providers.quotas`. preflight: see `skyinfra.providers.preflight_requests`. apart: by vendor of
    accelerators, the kind of the provider that has those of this place; its class is made of this one's.
    """

    kind: str
    exports: str = ""
    about: About
    boot: Boot
    traits: Traits
    lacks: Mapping[str, str] = Field(default_factory=dict)
    labels: Labels | None = None
    terraform: Mapping[str, Any] = Field(default_factory=dict)
    images: Mapping[str, dict[str, str]] = Field(default_factory=dict)
    no_image: Mapping[str, str] = Field(default_factory=dict)
    machines: Mapping[str, Any] = Field(default_factory=dict)
    prices: Mapping[str, Any] = Field(default_factory=dict)
    quotas: Mapping[str, Any] = Field(default_factory=dict)
    errors: Sequence[Mapping[str, Any]] = ()
    preflight: Asked | None = None
    apart: Mapping[str, str] = Field(default_factory=dict)

    def takes(self, name: str) -> bool:
        """Returns whether its module has the input *name*, one of those that modules have in common."""
        if name == "spot":
            return self.traits.spot != "no"
        return not {name, f"provider.{name}" if name in _ACCESS else name} & self.lacks.keys()

    def terraform_provider(self, **config: Any) -> TerraformProvider:
        """Returns the Terraform provider with *config*, of which None is left out."""
        given = tuple((name, value) for name, value in config.items() if value is not None)
        table = self.terraform
        settings = tuple(table.get("settings", {}).items())
        return TerraformProvider(table["name"], table["source"], table["version"], given, settings)

    def configuration_of(self, alias: str) -> dict[str, str]:
        """Returns the configuration that an *alias* was made of, see `TerraformProvider.alias`, as far as it says."""
        names = [] if alias == NO_CONFIGURATION else self.terraform["config"]
        return dict(zip(names, alias.split("_", len(names) - 1), strict=False))

    def architecture(self, machine_type: str) -> str:
        """``arm64`` or ``x86_64``."""
        arm = self.machines.get("arm")
        return "arm64" if arm and re.match(arm, machine_type) else "x86_64"

    def price(self, machine_type: str, region: str) -> Price | None:
        """Returns the on-demand price of a machine without accelerators; None where it is not known for *region*."""
        if not self.prices or not re.search(self.prices.get("regions", ""), region):
            return None
        usd = self.prices["usd_per_hour"].get(machine_type)
        return None if usd is None else Price(usd, self.prices["region"], self.prices["date"])

    def general(self, vcpus: int | None, memory_gb: float | None) -> str:
        """Returns the smallest machine type without accelerators that has as much. Raises `NotOffered`."""
        rows = self.machines["general"]
        if not rows:
            hint = "Declare an accelerator, or name a machine type with instance_types."
            raise NotSupported(f"{self.about.called} has no machines without accelerators", field="provider", hint=hint)
        for name, has_vcpus, has_memory in rows:
            if has_vcpus >= (vcpus or 0) and has_memory >= (memory_gb or 0):
                return str(name)
        raise NotOffered(
            "no general machine has as many vCPUs and as much memory",
            field="vcpus",
            given=f"{vcpus} vCPUs, {memory_gb} GB",
            hint=f"The largest is {rows[-1][0]}; name another with instance_types.",
        )

    def image(self, machine_types: tuple[str, ...], accelerator: Accelerator | None, *, field: str) -> str:
        """Returns the image for these machines, with the driver of *accelerator*. field: for an image of one's own.

        Raises `InvalidField` where the machines are of two architectures, `NotSupported` where no image is known.
        """
        architectures = {self.architecture(machine) for machine in machine_types}
        if len(architectures) > 1:
            raise InvalidField(
                "machines of two architectures cannot share one image",
                field="provider.instance_types",
                given=", ".join(machine_types),
                hint="Name types of one architecture.",
            )
        for pattern, image in self.machines.get("images", ()):
            if re.match(pattern, machine_types[0]):
                return str(image)
        vendor, name = (accelerator.vendor, accelerator.name) if accelerator else ("cpu", "")
        # Some have an image of its own for machines with so many.
        of_count = f"{vendor}:{accelerator.count}" if accelerator else vendor
        found = self.images.get(of_count, self.images.get(vendor, {})).get(architectures.pop())
        if (why := self.no_image.get(name)) or found is None:
            why = why or f"no image with the driver of {name} is known"
            hint = f"Give an image that has it: {field.rpartition('.')[2]}=..."
            raise NotSupported(why, field=field, hint=hint)
        return found


@cache
def read(kind: str) -> Data:
    """Returns the data of the provider *kind*."""
    return Data(kind=kind, **tomllib.loads((_FOLDER / f"{kind}.toml").read_text(encoding="utf-8")))


@cache
def kinds() -> tuple[str, ...]:
    """Returns the kinds of all providers that have a data file, in order."""
    return tuple(sorted(path.stem for path in _FOLDER.glob("*.toml")))
