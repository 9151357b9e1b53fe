"""AWS: Amazon EC2."""

from __future__ import annotations

from typing import Annotated, ClassVar

from pydantic import Field, model_validator

from skyinfra import offers
from skyinfra.declared import OUTPUT, Declaration
from skyinfra.errors import InvalidField
from skyinfra.offers import Offer
from skyinfra.providers.aws_fields import MachineTypes, Zones, check_labels
from skyinfra.providers.base import Request
from skyinfra.providers.cloud import CloudProvider
from skyinfra.providers.data import Output, OutputStrings, TerraformProvider
from skyinfra.providers.selected import SelectedMachines


class CapacityBlock(Declaration):
    """Capacity that is paid for in advance, by the id of its reservation, such as ``cr-0123456789abcdef0``."""

    id: Annotated[str, Field(pattern=r"^cr-[0-9a-z]+$"), OUTPUT]


class CapacityReservation(Declaration):
    """An on-demand capacity reservation, by its id, such as ``cr-0123456789abcdef0``."""

    id: Annotated[str, Field(pattern=r"^cr-[0-9a-z]+$"), OUTPUT]


class AWS(CloudProvider):
    """Amazon EC2, by Terraform's hashicorp/aws and the credentials that it finds.

    region: such as ``us-east-1``. zones: to use, in order of preference; empty is all that offer the machine. profile:
    of the shared AWS configuration. account_id: of 12 digits: credentials of another account are refused, by Terraform
    itself. instance_types: to take, in order of preference; empty takes the cheapest that carries the accelerator, and
    for a spot pool those besides that cost at most twice that. head_instance_type: of the head of a pool that is an
    Auto Scaling group (spot, or several types), which carries no slots. vpc_id, subnet_ids, security_group_ids: your
    own network; without them the pool has one of its own. head_public_ip: an Elastic IP for the head in your own
    subnets. allow_cidrs: networks that may reach the head; with none, nothing comes in. ssh_public_key: to log in with;
    Session Manager needs none. iam_instance_profile: yours instead of one that allows Session Manager and nothing else.
    ami: an image of your own, or the path of an SSM parameter that holds one. capacity: a capacity block or reservation
    to run in. spot_max_price: USD per hour. efa: Elastic Fabric Adapter on every network card, as ``rdma=True`` of the
    pool has it. placement_group: close together in one zone; with efa, and without capacity, it is on unless it says
    otherwise. group: nodes in an Auto Scaling group from the first one on, so that a spot pool of one node grows
    without being replaced; not with capacity. iam_path, permissions_boundary: of the role that the pool makes.
    kms_key_id: ARN of the key that encrypts the volumes and the pool's bucket. head_volume_gb: of the volume with the
    jobs of the head, which may only grow; 20 unless it says otherwise.
    """

    kind: ClassVar[str] = "aws"
    image_field: ClassVar[str] = "ami"

    region: str = Field(default="us-east-1", pattern=r"^[a-z]{2,4}(-[a-z]+)+-\d$")
    instance_types: MachineTypes = ()
    zones: Zones = ()
    profile: str | None = None
    account_id: str | None = Field(default=None, pattern=r"^\d{12}$")
    vpc_id: Annotated[str | None, Field(pattern=r"^vpc-[0-9a-z]+$"), OUTPUT] = None
    subnet_ids: OutputStrings = ()
    security_group_ids: OutputStrings = ()
    head_public_ip: bool = False
    iam_instance_profile: Output = None
    ami: Annotated[str | None, Field(pattern=r"^(ami-[0-9a-z]+|/[A-Za-z0-9_./-]+)$"), OUTPUT] = None
    capacity: CapacityBlock | CapacityReservation | None = None
    spot_max_price: float | None = Field(default=None, gt=0)
    efa: bool = False
    placement_group: bool | None = None
    group: bool = False
    iam_path: str | None = Field(default=None, pattern=r"^/([!-~]+/)?$")
    permissions_boundary: Annotated[str | None, Field(pattern=r"^arn:"), OUTPUT] = None
    kms_key_id: Annotated[str | None, Field(pattern=r"^arn:"), OUTPUT] = None
    head_volume_gb: int | None = Field(default=None, ge=1, le=16_384)

    @model_validator(mode="after")
    def _check_network(self) -> AWS:
        if self.vpc_id and not self.subnet_ids:
            raise InvalidField(
                "a VPC of your own needs the subnets to stand in",
                field="AWS.subnet_ids",
                hint=f"Give subnet_ids of {self.vpc_id}, or leave vpc_id out: the pool makes a network of its own.",
            )
        for name in ("security_group_ids", "head_public_ip"):
            if getattr(self, name) and not self.subnet_ids:
                raise InvalidField("needs subnet_ids", field=f"AWS.{name}", given=getattr(self, name))
        for zone in self.zones:
            if not zone.startswith(self.region):
                raise InvalidField(f"not a zone of {self.region}", field="AWS.zones", given=zone)
        return self

    def terraform(self) -> tuple[TerraformProvider, ...]:
        """Returns the provider of the region, with the profile and the account where they are declared."""
        made = self.data.terraform_provider(region=self.region, profile=self.profile)
        return (made.having("allowed_account_ids", [self.account_id]) if self.account_id else made,)

    def check(self, request: Request) -> None:
        """Raises `InvalidField` for a purchase that contradicts itself, and labels that cannot be tags."""
        if request.spot and self.capacity is not None:
            raise InvalidField(
                "reserved capacity is not spot capacity",
                field="provider.capacity",
                given=type(self.capacity).__name__,
                hint="Leave out spot=True, or capacity.",
            )
        several = len(self.instance_types) > 1
        if self.capacity is not None and (self.group or request.elastic or several):
            raise InvalidField(
                "nodes in reserved capacity are instances, and no group",
                field="nodes" if request.elastic else "provider.group" if self.group else "provider.instance_types",
                given=type(self.capacity).__name__,
                hint="Declare a fixed number of nodes of one machine type without group, or leave out capacity.",
            )
        if self.spot_max_price is not None and not request.spot:
            raise InvalidField(
                "is the price of spot capacity",
                field="provider.spot_max_price",
                given=self.spot_max_price,
                hint="Declare the pool with spot=True, or limit its price with max_hourly_cost.",
            )
        check_labels(request.labels, role=self.iam_instance_profile is None)

    def check_selection(self, selected: SelectedMachines) -> None:
        """Raises `InvalidField` where one of the machines has no Elastic Fabric Adapter that is asked for."""
        for offer in selected.offers if self.efa else ():
            if not offer.efa_interfaces:
                able = [o for o in offers.load() if o.provider == self.kind and o.accelerator == offer.accelerator]
                names = [o.machine_type for o in able if o.efa_interfaces]
                raise InvalidField(
                    f"{offer.machine_type} has no Elastic Fabric Adapter",
                    field="provider.efa",
                    hint=f"With {offer.accelerator}: {', '.join(names) or 'no machine type has one'}.",
                )

    def in_group(self, request: Request, selected: SelectedMachines) -> bool:
        """Returns whether the nodes are an Auto Scaling group."""
        return self.group or request.elastic or super().in_group(request, selected)

    @property
    def paid_ahead(self) -> str | None:
        """Said of a capacity block."""
        block = isinstance(self.capacity, CapacityBlock)
        return "a capacity block, which was paid for when it was bought" if block else None

    def inputs(self, selected: SelectedMachines, head: str | None) -> dict[str, object]:
        """Returns the inputs of modules/aws besides those of every cloud."""
        block, reservation = isinstance(self.capacity, CapacityBlock), isinstance(self.capacity, CapacityReservation)
        reserved = self.capacity.id if self.capacity else None
        efa = self.efa or selected.fabric is not None
        # A block stands close together already, and a reservation is in a group of its own or in none: EC2 may find no
        # room for it in another one.
        close = efa and self.capacity is None
        return {
            "zones": list(self.zones),
            "subnet_ids": list(self.subnet_ids),
            "security_group_ids": list(self.security_group_ids),
            "head_public_ip": self.head_public_ip,
            "placement_group": close if self.placement_group is None else self.placement_group,
            "vpc_id": self.vpc_id,
            "iam_instance_profile": self.iam_instance_profile,
            "spot_max_price": self.spot_max_price,
            "group": self.group or None,
            "iam_path": self.iam_path,
            "permissions_boundary": self.permissions_boundary,
            "kms_key_id": self.kms_key_id,
            "head_volume_gb": self.head_volume_gb,
            "capacity_block_id": reserved if block else None,
            "capacity_reservation_id": reserved if reservation else None,
            "efa_interfaces": ({o.machine_type: _interfaces(o) for o in selected.offers} if efa else None) or None,
        }


def _interfaces(offer: Offer) -> list[dict[str, object]]:
    """Returns a network interface for each card. With one card more than adapters, the first interface is plain."""
    cards = offer.network_cards or offer.efa_interfaces
    plain = cards - offer.efa_interfaces
    return [
        {
            "network_card": card,
            "device_index": 0 if card == 0 else 1,
            "interface_type": "interface" if card < plain else "efa",
        }
        for card in range(cards)
    ]
