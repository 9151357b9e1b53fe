"""AWS: Amazon EC2."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

from pydantic import Field, model_validator

from skyinfra import offers
from skyinfra.accelerators import Accelerator
from skyinfra.declared import Declaration
from skyinfra.errors import InvalidField, NotOffered, NotSupported, did_you_mean
from skyinfra.mig.layout_tag import write_tag
from skyinfra.offers import Offer, Price
from skyinfra.providers.aws_data import data, general, image, plain_image, plain_price
from skyinfra.providers.aws_fields import MachineTypes, Networks, PublicKey, Strings, Zones, check_labels
from skyinfra.providers.base import Provider, Request, Selection, TerraformProvider

SCHEDULER_PORT = 8786
_RETRIES = 8
# A spot pool falls back to machines with the same accelerators at up to this multiple of the lowest price.
_FALLBACK_PRICE = 2.0

# Field names of the pool for the filters of an offer query.
_CALLED = {"max_price": "max_hourly_cost", "ram_gib": "memory_gb"}


class CapacityBlock(Declaration):
    """Capacity that is paid for in advance, by the id of its reservation, such as ``cr-0123456789abcdef0``."""

    id: str = Field(pattern=r"^cr-[0-9a-z]+$")


class CapacityReservation(Declaration):
    """An on-demand capacity reservation, by its id, such as ``cr-0123456789abcdef0``."""

    id: str = Field(pattern=r"^cr-[0-9a-z]+$")


class AWS(Provider):
    """Amazon EC2, by Terraform's hashicorp/aws and the credentials that it finds.

    region: such as ``us-east-1``. zones: to use, in order of preference; empty is all that offer the machine.
    profile: of the shared AWS configuration. instance_types: to take, in order of preference; empty takes the
    cheapest that carries the accelerator, and for a spot pool those besides that cost at most twice that.
    head_instance_type: of the head of a pool that is an Auto Scaling group (spot, or several types), which carries no
    slots. vpc_id, subnet_ids, security_group_ids: your own network; without them the pool has one of its own.
    head_public_ip: an Elastic IP for the head in your own subnets. allow_cidrs: networks that may reach the head; with
    none, nothing comes in. ssh_public_key: to log in with; Session Manager needs none. iam_instance_profile: yours
    instead of one that allows Session Manager and nothing else. ami: an image of your own, or the path of an SSM
    parameter that holds one. capacity: a capacity block or reservation to run in. spot_max_price: USD per hour.
    efa: Elastic Fabric Adapter on every network card. placement_group: close together in one zone; with efa it is on
    unless it says otherwise. group: nodes in an Auto Scaling group from the first one on, so that a spot pool of one
    node grows without being replaced. iam_path, permissions_boundary: of the role that the pool makes. kms_key_id: ARN
    of the key that encrypts the volumes and the pool's bucket. head_volume_gb: of the volume with the jobs of the head,
    which may only grow; 20 unless it says otherwise.
    """

    kind: ClassVar[str] = "aws"
    boots: ClassVar[str] = "cloud-init"

    region: str = Field(default="us-east-1", pattern=r"^[a-z]{2}(-[a-z]+)+-\d$")
    zones: Zones = ()
    profile: str | None = None
    instance_types: MachineTypes = ()
    head_instance_type: str | None = None
    vpc_id: str | None = Field(default=None, pattern=r"^vpc-[0-9a-z]+$")
    subnet_ids: Strings = ()
    security_group_ids: Strings = ()
    head_public_ip: bool = False
    allow_cidrs: Networks = ()
    ssh_public_key: PublicKey = None
    iam_instance_profile: str | None = None
    ami: str | None = Field(default=None, pattern=r"^(ami-[0-9a-z]+|/[A-Za-z0-9_./-]+)$")
    capacity: CapacityBlock | CapacityReservation | None = None
    spot_max_price: float | None = Field(default=None, gt=0)
    efa: bool = False
    placement_group: bool | None = None
    group: bool = False
    iam_path: str | None = Field(default=None, pattern=r"^/([!-~]+/)?$")
    permissions_boundary: str | None = Field(default=None, pattern=r"^arn:")
    kms_key_id: str | None = Field(default=None, pattern=r"^arn:")
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
                raise InvalidField("goes with subnet_ids", field=f"AWS.{name}", given=getattr(self, name))
        for zone in self.zones:
            if not zone.startswith(self.region):
                raise InvalidField(f"not a zone of {self.region}", field="AWS.zones", given=zone)
        return self

    def terraform(self) -> TerraformProvider:
        """The provider of the region, with the profile where one is declared."""
        config = {"region": self.region, **({"profile": self.profile} if self.profile else {})}
        return TerraformProvider(
            name="aws",
            source="registry.terraform.io/hashicorp/aws",
            version=">= 5.100.0, < 7.0.0",
            config=tuple(config.items()),
            # With 25 attempts, its default, it asks for capacity that is not there for more than a quarter of an hour.
            settings=(("max_retries", _RETRIES),),
        )

    def select(self, request: Request) -> Selection:
        """The machines for *request*, from shipped offers. Raises `NotOffered`, `NotSupported`, `InvalidField`."""
        self._check_purchase(request)
        check_labels(request.labels)
        chosen = self._accelerated(request) if request.accelerators else self._plain(request)
        group = self.group or len(chosen.machine_types) > 1 or (request.spot and request.nodes > 1)
        head = self.head_instance_type or data()["head_type"]
        return Selection(
            accelerator=chosen.accelerator,
            machine_types=chosen.machine_types,
            scheduler=f"0.0.0.0:{SCHEDULER_PORT}",
            # In a folder of root's; the runner's unit hands it over.
            secret_file="/etc/skyinfra/secret",  # noqa: S106 - the name of a file
            image=self.ami or chosen.image,
            inputs=self._inputs(chosen, head if group else None),
            prices=chosen.prices,
            price_note=chosen.price_note,
            share=chosen.share,
            head_machine=head if group else None,
            head_price=plain_price(head, self.region) if group else None,
        )

    # The purchase.

    def _check_purchase(self, request: Request) -> None:
        if request.spot and self.capacity is not None:
            raise InvalidField(
                "reserved capacity is not spot capacity",
                field="provider.capacity",
                given=type(self.capacity).__name__,
                hint="Leave out spot=True, or capacity.",
            )
        if self.spot_max_price is not None and not request.spot:
            raise InvalidField(
                "is the price of spot capacity",
                field="provider.spot_max_price",
                given=self.spot_max_price,
                hint="Declare the pool with spot=True, or limit its price with max_hourly_cost.",
            )

    def _accelerated(self, request: Request) -> _Chosen:
        found = self._of_types(request) if self.instance_types else self._found(request)
        first = found[0]
        accelerator = next(a for a in request.accelerators if offers.carries(first, a))
        same = [offer for offer in found if offers.carries(offer, accelerator) and offer.chips == first.chips]
        if not self.instance_types:
            same = _fallback(same, spot=request.spot)
        self._check_efa(same)
        if first.fraction < 1 and accelerator.mig:
            raise NotSupported(f"{first.machine_type} has a share of a GPU, which has no layout", field="accelerator")
        return _Chosen(
            accelerator.with_(count=first.chips if accelerator.vendor == "google" else first.count),
            tuple(offer.machine_type for offer in same),
            image="" if self.ami else image(accelerator, same),
            efa={o.machine_type: _interfaces(o) for o in same} if self.efa else {},
            share=first.fraction,
            **self._cost(
                {o.machine_type: price for o in same if (price := o.price(spot=request.spot)) is not None},
                first.machine_type,
                request,
            ),
        )

    def _here(self, offer: Offer, request: Request) -> Offer:
        """*offer* without prices where it is not known to be offered in the region."""
        if offer.in_region(self.region):
            return offer
        if request.max_hourly_cost is not None:
            raise NotSupported(
                f"the price of {offer.machine_type} in {self.region} is not known here", field="max_hourly_cost"
            )
        return replace(offer, on_demand=None, spot=None)

    def _query(self, request: Request, **changes: Any) -> offers.Query:
        return offers.ask(
            request.accelerators,
            provider=self.kind,
            spot=request.spot,
            vcpus=request.vcpus,
            # A machine of 64 GiB is what is meant by 64 GB.
            ram_gib=request.memory_gb,
            max_price=request.max_hourly_cost,
            **{"region": self.region, **changes},
        )

    def _found(self, request: Request) -> list[Offer]:
        try:
            query = self._query(request)
        except InvalidField as error:
            if error.field == "region":
                error.hint = f"{error.hint}\nOr name what AWS has there: instance_types=[...]"
            raise
        found = query.run(offers.load())
        if not found:
            raise offers.not_offered(query, called=_CALLED).at("accelerator")
        return list(found)

    def _of_types(self, request: Request) -> list[Offer]:
        """The offers of the declared instance types, in their order. All of them carry the same."""
        # Wherever they are: the shipped regions are not all there are, and AWS is asked before anything is made.
        query = self._query(request, fraction=0.001, region=None)
        by_type = {offer.machine_type: self._here(offer, request) for offer in query.run(offers.load())}
        known = {offer.machine_type: offer for offer in offers.load() if offer.provider == self.kind}
        for name in self.instance_types:
            if name not in known:
                hint = did_you_mean(name, known) or f"`skyinfra offers --provider {self.kind}` lists them."
                raise InvalidField(
                    "no machine with accelerators", field="provider.instance_types", given=name, hint=hint
                )
            if name not in by_type:
                raise NotOffered(
                    f"{offers.told(known[name], spot=request.spot)} is not what is declared",
                    field="provider.instance_types",
                    given=name,
                    hint=f"Declared: {' or '.join(map(str, request.accelerators))} in {self.region}, with the vCPUs, "
                    f"memory and price of the pool. It is offered in {', '.join(known[name].regions) or 'no region'}.",
                )
        chosen = [by_type[name] for name in self.instance_types]
        for offer in chosen:
            if (offer.accelerator, offer.memory_gb, offer.count, offer.fraction) != (
                chosen[0].accelerator,
                chosen[0].memory_gb,
                chosen[0].count,
                chosen[0].fraction,
            ):
                raise InvalidField(
                    f"carries {offer.carries}, and {chosen[0].machine_type} {chosen[0].carries}",
                    field="provider.instance_types",
                    given=offer.machine_type,
                    hint="The nodes of a pool are alike. Declare a pool for each.",
                )
        return chosen

    def _plain(self, request: Request) -> _Chosen:
        """Nodes without accelerators: the smallest general machine, or the declared types."""
        types = tuple(self.instance_types) or (general(request),)
        prices = {} if request.spot else {name: plain_price(name, self.region) for name in types}
        known = {name: price for name, price in prices.items() if price is not None}
        _check_cap(types, known, request)
        image = "" if self.ami else plain_image(types)
        return _Chosen(None, types, image, **self._cost(known, types[0], request))

    def _cost(self, known: dict[str, Price], first: str, request: Request) -> dict[str, Any]:
        if isinstance(self.capacity, CapacityBlock):
            return {"prices": {}, "price_note": "a capacity block, which was paid for when it was bought"}
        purchase = "spot" if request.spot else "on-demand"
        price = known.get(first)
        if price is None:
            return {"prices": known, "price_note": f"{purchase} price not known"}
        about = "about, " if price.basis == "estimated" else ""
        return {"prices": known, "price_note": f"{about}{purchase} in {price.region}, {price.date}"}

    # The inputs of the module.

    def _check_efa(self, chosen: list[Offer]) -> None:
        for offer in chosen if self.efa else ():
            if not offer.efa_interfaces:
                able = [o for o in offers.load() if o.provider == self.kind and o.accelerator == offer.accelerator]
                names = [o.machine_type for o in able if o.efa_interfaces]
                raise InvalidField(
                    f"{offer.machine_type} has no Elastic Fabric Adapter",
                    field="provider.efa",
                    hint=f"With {offer.accelerator}: {', '.join(names) or 'no machine type has one'}.",
                )

    def _inputs(self, chosen: _Chosen, head: str | None) -> dict[str, object]:
        block, reservation = isinstance(self.capacity, CapacityBlock), isinstance(self.capacity, CapacityReservation)
        reserved = self.capacity.id if self.capacity else None
        optional = {
            "vpc_id": self.vpc_id,
            "ssh_public_key": self.ssh_public_key,
            "iam_instance_profile": self.iam_instance_profile,
            "head_machine_type": head,
            "head_image": plain_image((head,)) if head else None,
            "spot_max_price": self.spot_max_price,
            "group": self.group or None,
            "iam_path": self.iam_path,
            "permissions_boundary": self.permissions_boundary,
            "kms_key_id": self.kms_key_id,
            "head_volume_gb": self.head_volume_gb,
            "capacity_block_id": reserved if block else None,
            "capacity_reservation_id": reserved if reservation else None,
            "efa_interfaces": chosen.efa or None,
            "layout": write_tag(layout.mig) if (layout := chosen.accelerator) and layout.mig_model else None,
        }
        return {
            "zones": list(self.zones),
            "subnet_ids": list(self.subnet_ids),
            "security_group_ids": list(self.security_group_ids),
            "head_public_ip": self.head_public_ip,
            "allow_cidrs": list(self.allow_cidrs),
            "placement_group": self.efa if self.placement_group is None else self.placement_group,
            "scheduler_port": SCHEDULER_PORT,
            **{name: value for name, value in optional.items() if value is not None},
        }


@dataclass(frozen=True)
class _Chosen:
    """The decisions of `select`; see `Selection`."""

    accelerator: Accelerator | None
    machine_types: tuple[str, ...]
    image: str
    prices: dict[str, Price]
    price_note: str
    efa: dict[str, list[dict[str, object]]] | None = None
    share: float = 1.0


def _fallback(found: list[Offer], *, spot: bool) -> list[Offer]:
    """Returns the machine types to try: the first, and for spot those at a similar price, cheapest first."""
    price = found[0].price(spot=spot)
    if not spot or price is None:
        return found[:1]
    limit = price.usd_per_hour * _FALLBACK_PRICE
    return [offer for offer in found if (p := offer.price(spot=True)) is not None and p.usd_per_hour <= limit]


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


def _check_cap(machine_types: tuple[str, ...], known: dict[str, Price], request: Request) -> None:
    cap = request.max_hourly_cost
    if cap is None:
        return
    for name in machine_types:
        if name not in known:
            purchase = "spot" if request.spot else "on-demand"
            raise NotSupported(f"the {purchase} price of {name} is not known here", field="max_hourly_cost")
        if known[name].usd_per_hour > cap:
            raise NotOffered(
                f"{name} costs {known[name]}",
                field="max_hourly_cost",
                given=cap,
                hint="Declare fewer vCPUs or less memory, or raise it.",
            )
