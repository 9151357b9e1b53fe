"""The manifest: the fleet that a pool became. A Terraform output, one per fleet, that the client reads.

The modules build it in HCL; the fields here are its contract, version 1.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from skyinfra.errors import InvalidManifest
from skyinfra.protocol import _schema
from skyinfra.protocol._schema import Address, FilePath, Identity, Name, Place, Port, Target, User

VERSION = 1
# The Terraform output that holds the manifest of a pool is named so; the rest of the name is the pool's.
OUTPUT_PREFIX = "fleet_"
# A fleet secret has at least that many characters.
MIN_SECRET_LENGTH = 32

SlotKind = Literal["partition", "gpu", "chip", "cores", "host", "cpu"]

# The kind of slot that a whole accelerator of a vendor makes; of any other vendor it is a chip. One chip of AWS is a
# group of NeuronCores.
_KINDS: dict[str, SlotKind] = {"nvidia": "gpu", "amd": "gpu", "aws": "cores"}


def slot_kind(vendor: str) -> SlotKind:
    """Returns the kind of the slot that one whole accelerator of *vendor* makes."""
    return _KINDS.get(vendor, "chip")


@dataclass(frozen=True)
class Endpoint:
    """The address at which a scheduler listens. ``port`` is 0 while it is not known."""

    address: Address
    port: Port

    def __str__(self) -> str:
        host = f"[{self.address}]" if ":" in self.address else self.address
        return f"tls://{host}:{self.port}"


@dataclass(frozen=True)
class ManifestSlot:
    """One slot that the declaration gives every node; ``gpu`` is the index of the accelerator it stands on.

    A slot of the kind ``host`` has all chips of its node, which is one host of a TPU slice.
    """

    index: int
    kind: SlotKind
    accelerator: str | None = None
    profile: str | None = None
    gpu: int | None = None


@dataclass(frozen=True)
class Login:
    """The options of ``ssh`` for a node; None is what it takes by itself. via: ``USER@HOST:PORT`` to go through."""

    user: User | None = None
    port: Port | None = None
    key_file: FilePath | None = None
    via: Target | None = None

    @property
    def options(self) -> list[str]:
        """Options of ``ssh``."""
        given = {"-p": self.port, "-i": self.key_file, "-J": self.via}
        return [word for option, value in given.items() if value is not None for word in (option, str(value))]


@dataclass(frozen=True)
class ManifestNode:
    """One machine of the fleet. ``address`` is reachable by the other nodes, ``public_address`` by the client.

    ssh: how to log in; None where the provider says it, or there is no SSH server.
    """

    name: Name
    id: Identity
    address: Address
    public_address: Address | None = None
    zone: Place | None = None
    machine_type: str | None = None
    head: bool = False
    ssh: Login | None = None


@dataclass(frozen=True)
class Via:
    """The way of a client to a head whose address it cannot reach; see `skyinfra.port_forward`.

    kind: ``ssh``, by OpenSSH; ``ssm``, by AWS Session Manager; ``iap``, by Google Cloud's Identity-Aware Proxy.
    target: ``USER@HOST`` as ``ssh`` takes it, or the instance of the head. port: of ``ssh``. region, zone, project: of
    the instance.
    """

    kind: Literal["ssh", "ssm", "iap"]
    target: Target
    port: Port | None = None
    region: Name | None = None
    zone: Name | None = None
    project: Target | None = None

    def __str__(self) -> str:
        return f"{self.target} ({self.kind})"


@dataclass(frozen=True)
class Manifest(_schema.Document, error=InvalidManifest, source="manifest", version=VERSION):
    """One fleet. ``slots`` are those of each node, in slot order; ``secret`` is the fleet secret.

    ``group_nodes``: how many nodes there are to be besides ``nodes``, in a group of the provider's that replaces them
    without Terraform: the scheduler knows which. Where there are such, the head is a machine without slots. ``via``:
    how clients reach the head where they cannot reach its address. ``account``: of the provider, as it names them: an
    account, a project, a subscription; None where it is not known. ``max_nodes``: how many nodes there may be besides
    the head, where the number follows the work and is ``group_nodes`` at least; 0 where it is fixed.
    """

    version: int
    stack: Name
    pool: Name
    provider: Name
    head: Endpoint
    nodes: tuple[ManifestNode, ...]
    slots: tuple[ManifestSlot, ...]
    secret: str = field(repr=False)
    simulated: bool = False
    group_nodes: int = 0
    via: Via | None = None
    account: str | None = None
    max_nodes: int = field(default=0, metadata={"later": True})

    @property
    def fleet(self) -> str:
        """``STACK/POOL``, as the command line writes it."""
        return f"{self.stack}/{self.pool}"

    def slots_of(self, node: ManifestNode) -> tuple[ManifestSlot, ...]:
        """Returns the slots of one of ``nodes``: none on the head of a group, which is a machine besides the others."""
        return () if self.has_group and node.head else self.slots

    @property
    def has_group(self) -> bool:
        """Whether nodes come and go without Terraform; the head is then a machine without slots."""
        return bool(self.group_nodes or self.max_nodes)

    @property
    def node_count(self) -> int:
        """The declared number of nodes with slots, or the least."""
        return self.group_nodes if self.has_group else len(self.nodes)
