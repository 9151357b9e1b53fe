"""The differences between providers, as data: ``KIND.toml`` beside this file, read into one `Data` for each.

Tables of the file: about, terraform, boot, traits, lacks, labels, images, fabrics, machines, prices, quotas, preflight,
errors, idle; a provider leaves out what it has not. Every table carries its source and date, in fields or in a comment.
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

from skyinfra.accelerators import Accelerator, parse
from skyinfra.declared import OUTPUT, Declaration, Duration
from skyinfra.errors import InvalidField, NotOffered, NotSupported
from skyinfra.offers import Offer, Price
from skyinfra.providers.fabrics import Fabric, fabric_of
from skyinfra.providers.images import Image, image_of, no_image
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
    of local disks. head_volume: globs of the volume with the head's jobs, {} being its id. mounts: the scheme of the
    buckets that nodes mount, as the role of their machine lets them; None for none. ssh_user: of the images. host_keys:
    of machines that are set up over SSH: given with their user data, or trusted at the first contact and kept.
    key_kinds: of the SSH keys that it takes.
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
    mounts: Literal["s3", "gs"] | None = None
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


class VolumeData(Declaration):
    """The volumes of a place that outlive a fleet; see `skyinfra.providers.volumes`.

    resource: of Terraform. arguments: of it; {name}, {title}, {size_gb}, {kind}, {zone}, {stack}, {label} and the
    fields of the class stand for their values. ignored: those of which a change is none. called: what it is, for
    people. id: pattern of a whole id. zone: the field of the class that names the zone, with an example. several:
    whether several nodes mount it at once. gb: the smallest and largest. usd_per_gb: for a month, by kind, the default
    first; 0 where it is not known. machines: patterns of machine types, behind each one of the kinds that these take.
    mounted: whether it is a disk, a file system by its tag, or one that the place mounts itself. devices: where a node
    has it, or its tag, {} being its id, {letter} and {index} its place among those of the node.
    """

    resource: str
    arguments: Mapping[str, Any]
    ignored: Strings = ()
    called: str
    id: str
    zone: str | None = None
    example: str = ""
    several: bool = False
    gb: Sequence[int]
    usd_per_gb: Mapping[str, float]
    machines: Strings = ()
    devices: Strings = ()
    mounted: Literal["disk", "virtiofs", "by the place"] = "disk"
    region: str
    source: str
    date: str


class Idle(Declaration):
    """How a node ends itself, and with it what it costs.

    how: says what becomes of it, for people; empty where it cannot, and *why*. at_least: the shortest idle time, longer
    than a boot takes. grouped: whether nodes of a machine group can. inputs: of the module, where one is to end.
    keeps_jobs: whether the jobs of the head outlive it. stops: where it is there still, stopped, and
    a deploy starts it: the argument of its resource that is another one then.
    """

    how: str = ""
    why: str = ""
    at_least: Duration = "5m"
    grouped: bool = False
    keeps_jobs: bool = True
    stops: str = ""
    inputs: Mapping[str, Any] = Field(default_factory=dict)
    source: str
    date: str


class Elastic(Declaration):
    """How the number of nodes follows the work, without an apply.

    at_least: the shortest time without a task after which a node ends, longer than a boot takes. on_request: only where
    ``idle_seconds`` is declared, and an apply changes it elsewhere.
    """

    at_least: Duration
    on_request: bool = False
    source: str
    date: str


class About(Declaration):
    """For people: its name, what the nodes are, how nodes and clients find the head, and how far it was tried."""

    called: str
    nodes: str
    head: str
    tested: str


class Verified(Declaration):
    """Says what proves the facts of a place: the kind of source of images (with drivers) and of names; applied: the
    version of its Terraform provider that applied its module, against what, and when last. Empty: none did."""

    images: str = ""
    names: str = ""
    applied: str = ""
    against: str = ""
    date: str = ""


class Data(Declaration):
    """The data file of a provider. exports: its module and the public names there. offered_by: the provider whose
    offers and answers it has, where that is another. images: by machine type, vendor and architecture, with their
    driver; see `skyinfra.providers.images`. fabrics: the networks between the machines; see
    `skyinfra.providers.fabrics`. errors: of its API; `codes`, with the list that
    they are in as `source`, and `texts`, patterns, each found in one of the `quotes` (words, and where they stand).
    terraform: name, source and version of the provider, config, the arguments of its block, place, where a resource is
    by the state (see `skyinfra.deploy.places`), inputs, the fields of the class that its module takes as they are,
    credentials, the environment variables that it reads, attached, resources that are gone with a machine, and
    machines: by resource, the attributes that say the type, region and purchase of a machine.

    lacks: why the place has not what a field asks for, by the field of the pool, or of the class as `provider.FIELD`;
    the module has no such input.

    machines: `general` (name, vCPUs, GiB, and the regions where it is known, if not in all; smallest first), `head`,
    `disk_gb`, the smallest and largest disk (0: any), and patterns of types: `arm`, and `deployed`, where the offers
    have others too, which are called `deployed_as`. prices: of machines without accelerators, in `regions`, a pattern.
    volume: see `VolumeData`. quotas: see `skyinfra.providers.quotas`. preflight: see
    `skyinfra.providers.preflight_requests`. apart: by vendor of accelerators, the kind of the provider that has those
    of this place; its class is made of this one's. idle: see `Idle`; None where nobody has looked how.
    elastic: see `Elastic`; None where the number of nodes changes with an apply alone.
    """

    kind: str
    exports: str = ""
    offered_by: str = ""
    about: About
    verified: Verified = Field(default_factory=Verified)
    boot: Boot
    traits: Traits
    lacks: Mapping[str, str] = Field(default_factory=dict)
    labels: Labels | None = None
    volume: VolumeData | None = None
    terraform: Mapping[str, Any] = Field(default_factory=dict)
    images: Sequence[Image] = ()
    fabrics: Sequence[Fabric] = ()
    machines: Mapping[str, Any] = Field(default_factory=dict)
    prices: Mapping[str, Any] = Field(default_factory=dict)
    quotas: Mapping[str, Any] = Field(default_factory=dict)
    errors: Sequence[Mapping[str, Any]] = ()
    preflight: Asked | None = None
    apart: Mapping[str, str] = Field(default_factory=dict)
    idle: Idle | None = None
    elastic: Elastic | None = None

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

    def general(self, vcpus: int | None, memory_gb: float | None, region: str) -> str:
        """The smallest machine type without accelerators that has as much; one that is known to be offered in *region*,
        where there is any. Raises `NotOffered`."""
        rows = self.machines["general"]
        if not rows:
            hint = "Declare an accelerator, or name a machine type with instance_types."
            raise NotSupported(f"{self.about.called} has no machines without accelerators", field="provider", hint=hint)
        large = [name for name, cpus, gib, *_ in rows if cpus >= (vcpus or 0) and gib >= (memory_gb or 0)]
        if large:
            return str(next((name for name in large if self.offers_general(name, region)), large[0]))
        raise NotOffered(
            "no general machine has as many vCPUs and as much memory",
            field="vcpus",
            given=f"{vcpus} vCPUs, {memory_gb} GB",
            hint=f"The largest is {rows[-1][0]}; name another with instance_types.",
        )

    def offers_general(self, machine_type: str, region: str) -> bool:
        """Returns whether no source says that a machine without accelerators is offered elsewhere alone."""
        places = [row[3] for row in self.machines["general"] if row[0] == machine_type and row[3:]]
        return not places or region in places[0]

    def image(
        self, machine_types: tuple[str, ...], accelerator: Accelerator | None, *, field: str, share: float = 1.0
    ) -> str:
        """Returns the image for these machines, with the driver of *accelerator*, of which each machine has *share*.

        field: for an image of one's own. Raises `InvalidField` where the machines are of two architectures or take two
        images, `NotSupported` where no image is known.
        """
        if len({self.architecture(machine) for machine in machine_types}) > 1:
            raise InvalidField(
                "machines of two architectures cannot share one image",
                field="provider.instance_types",
                given=", ".join(machine_types),
                hint="Name types of one architecture.",
            )
        images = {}
        for machine in machine_types:
            row = image_of(self.images, machine, self.architecture(machine), accelerator, share=share)
            if isinstance(row, str):
                raise no_image(row, field=field)
            images[machine] = row.image
        if len(set(images.values())) > 1:
            raise InvalidField(
                "machines that start with two images cannot share one pool",
                field="provider.instance_types",
                given=", ".join(f"{machine}: {image}" for machine, image in images.items()),
                hint="Name types of one family, or give an image that serves all of them.",
            )
        return next(iter(images.values()))

    def fabric(self, offer: Offer) -> Fabric | None:
        """Returns the network between machines of *offer*, see `fabrics`; None where no row says what it is."""
        return fabric_of(self.fabrics, offer)

    def deploys(self, machine_type: str) -> bool:
        """Returns whether its module makes such machines, and not something else that the provider sells."""
        return re.match(self.machines.get("deployed", ""), machine_type) is not None

    def on_demand(self, machine_type: str) -> bool:
        """Returns whether such machines are sold on demand, and not by spot, flex starts or reservations alone."""
        return not any(re.match(self.machines.get(way, "(?!)"), machine_type) for way in ("scarce", "reserved"))

    def refuses(self, offer: Offer, *, own_image: bool = False) -> str | None:
        """The reason why it does not deploy the machine of *offer*: none of its images serves the accelerators, say.

        None where it does. own_image: whether the declaration brings an image.
        """
        name = offer.machine_type
        if not self.deploys(name):
            return f"{self.about.called} sells it otherwise than as an instance"
        if own_image:
            return None
        accelerator = parse(offer.accelerated)
        row = image_of(self.images, name, self.architecture(name), accelerator, share=offer.fraction)
        return row if isinstance(row, str) else None


@cache
def read(kind: str) -> Data:
    """Returns the data of the provider *kind*."""
    tables = tomllib.loads((_FOLDER / f"{kind}.toml").read_text(encoding="utf-8"))
    if "preflight" in tables:
        tables["preflight"].setdefault("credentials", _credentials(tables.get("terraform", {})))
    return Data(kind=kind, **tables)


def _credentials(terraform: Mapping[str, Any]) -> Sequence[Sequence[str]]:
    """The environment variables with the credentials that the compiled provider block reads, each list an alternative.

    A block that names variables reads those alone; else they are the provider's own.
    """
    blocks = (value for value in terraform.get("settings", {}).values() if isinstance(value, Mapping))
    named = [[str(name) for key, name in block.items() if key.endswith("_env")] for block in blocks]
    return [names for names in named if names] or terraform.get("credentials", ())


@cache
def kinds() -> tuple[str, ...]:
    """Returns the kinds of all providers that have a data file, in order."""
    return tuple(sorted(path.stem for path in _FOLDER.glob("*.toml")))


def sold_by(kind: str) -> str:
    """Returns the provider whose offers and answers those of *kind* are: mostly itself."""
    return (read(kind).offered_by if kind in kinds() else "") or kind
