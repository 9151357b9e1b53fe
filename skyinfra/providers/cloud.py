"""Clouds: the part of `select` that is the same for every provider that sells machines by the hour."""

from __future__ import annotations

import ipaddress
import re
from abc import abstractmethod
from collections.abc import Iterable
from dataclasses import replace
from typing import Annotated, Any, ClassVar

from pydantic import BeforeValidator, model_validator

from skyinfra import offers
from skyinfra.accelerators import Accelerator
from skyinfra.declared import is_output
from skyinfra.errors import InvalidField, NotOffered, NotSupported, did_you_mean
from skyinfra.mig.layout_tag import write_tag
from skyinfra.offers import Offer, Price
from skyinfra.providers.base import Provider, Request, Selection
from skyinfra.providers.data import Data, Output, OutputStrings, Strings, kinds, read, sold_by
from skyinfra.providers.fabrics import connected, unconnected
from skyinfra.providers.images import no_image
from skyinfra.providers.mounts import Mount
from skyinfra.providers.selected import SelectedMachines, check_alike, check_cap, fallback, price_note
from skyinfra.providers.volumes import Volume

SCHEDULER_PORT = 8786

# Field names of the pool for the filters of an offer query.
_CALLED = {"max_price": "max_hourly_cost", "ram_gib": "memory_gb"}


def _reference(given: object) -> object:
    """Returns the name of a provider block, where *given* is its construct."""
    name = getattr(given, "terraform_resource_type", None)
    return given if name is None else ".".join(filter(None, (name, given.alias)))  # type: ignore[attr-defined]


class CloudProvider(Provider):
    """A cloud. A subclass has its data in ``KIND.toml``, adds its fields, and says what its module takes (`inputs`).

    region: where the nodes stand; of a list one after the other, where a deploy is refused. regions: that list.
    instance_types: to take, in order of preference; empty takes the cheapest that
    carries the accelerator. head_instance_type: of the head of a pool that is a machine group, which carries no slots.
    allow_cidrs: networks that may reach the head; with none, nothing comes in. Outputs may be given; on AWS, Crusoe,
    OCI and Vultr not those of what the same apply makes. ssh_public_key: to log in with.
    provider: a provider block of the stack's own, as a construct of cdktf or cdktn or by its name such as ``aws.east``;
    it looks in the region that is declared here. None makes one.
    """

    # The field that holds an image of one's own.
    image_field: ClassVar[str] = "image"

    region: str
    regions: Strings = ()
    instance_types: Strings = ()
    head_instance_type: str | None = None
    allow_cidrs: OutputStrings = ()
    ssh_public_key: Output = None
    provider: Annotated[str | None, BeforeValidator(_reference)] = None

    @model_validator(mode="before")
    @classmethod
    def _split_regions(cls, values: Any) -> Any:
        given = values.get("region") if isinstance(values, dict) else None
        given = given if isinstance(given, list | tuple) else (values or {}).get("regions")
        if not isinstance(given, list | tuple):
            return values
        if not given or len(set(map(str, given))) < len(given):
            why = "expected at least one region" if not given else "names a region twice"
            raise InvalidField(why, field=f"{cls.__name__}.region", given=", ".join(map(str, given)) or "[]")
        return {**values, "region": given[0], "regions": tuple(given) if len(given) > 1 else ()}

    @model_validator(mode="after")
    def _check_common(self) -> CloudProvider:
        name, kinds = type(self).__name__, self.data.traits.key_kinds
        own = {field.removeprefix("provider."): why for field, why in self.data.lacks.items() if "provider." in field}
        for field, why in own.items():
            if value := getattr(self, field):
                raise NotSupported(why, field=f"{name}.{field}", given=value, hint=f"Leave {field} out.")
        self._check_provider(name)
        for cidr in self.allow_cidrs:
            if not is_output(cidr):
                check_network(cidr, field=f"{name}.allow_cidrs")
        key = self.ssh_public_key
        if (
            key is not None
            and not is_output(key)
            and not re.fullmatch(rf"({'|'.join(kinds)}) [A-Za-z0-9+/=]+( [^\n]*)?", key.strip())
        ):
            raise InvalidField(
                f"expected one line that begins with {' or '.join(kinds)}, the kinds that {self.called} takes",
                field=f"{name}.ssh_public_key",
                given=key.partition(" ")[0][:40],
                hint="Make one with: ssh-keygen -t ed25519",
            )
        return self

    def _check_provider(self, name: str) -> None:
        """Raises `InvalidField` where *provider* is that of another cloud, or other fields say what its block has."""
        if self.provider is None:
            return
        called = self.data.terraform["name"]
        if not re.fullmatch(rf"{called}(\.[A-Za-z_][\w-]*)?", self.provider):
            hint = f"Such as provider={called + '.east'!r}, or the construct itself."
            raise InvalidField(
                f"expected a provider {called}", field=f"{name}.provider", given=self.provider, hint=hint
            )
        rows = self.data.terraform.get("place", ())
        fields = {row.get("declared", row["field"]) for row in rows}
        for field in {*self.data.terraform["config"], *fields} - {"region"}:
            if getattr(self, field) is not None:
                hint = "Leave it out here, and write it in that block."
                raise InvalidField(
                    "is part of the provider block", field=f"{name}.{field}", given=getattr(self, field), hint=hint
                )

    # What a subclass says.

    @property
    def called(self) -> str:
        """The provider as people name it."""
        return self.data.about.called

    @abstractmethod
    def inputs(self, selected: SelectedMachines, head: str | None) -> dict[str, object]:
        """The module inputs that only this provider has; None is left out. head: machine type of a head apart."""

    def check(self, request: Request) -> None:
        """Raises a `DeclarationError` for what this provider has not, whatever machine is chosen."""

    def check_selection(self, selected: SelectedMachines) -> None:
        """Raises a `DeclarationError` for what the chosen machines have not."""

    def in_group(self, request: Request, selected: SelectedMachines) -> bool:
        """Returns whether the nodes are a machine group, with a head apart."""
        several = len(selected.machine_types) > 1 or (request.spot and request.nodes > 1)
        return self.data.traits.groups and several

    @property
    def paid_ahead(self) -> str | None:
        """Why nothing is paid by the hour; None where it is."""
        return None

    # What all of them do.

    @property
    def seller(self) -> str:
        """The name of the provider in the offers."""
        return sold_by(self.kind)

    @property
    def own_image(self) -> str | None:
        """The image of one's own."""
        own: str | None = getattr(self, self.image_field, None)
        return own

    def plain_image(self, machine_types: tuple[str, ...]) -> str:
        """Returns the image for machines without accelerators."""
        return self.data.image(machine_types, None, field=f"provider.{self.image_field}")

    def refuse_lacking(self, request: Request) -> None:
        """As of every provider; names those that connect their machines."""
        if request.rdma and "rdma" in self.data.lacks:
            having = _having(lambda data: any(row.network for row in data.fabrics))
            raise NotSupported(self.data.lacks["rdma"], field="rdma", given=True, hint=having)
        super().refuse_lacking(request)

    def select(self, request: Request) -> Selection:
        """The machines for *request*, from shipped offers. Raises `NotOffered`, `NotSupported`, `InvalidField`."""
        self._check_traits(request)
        self.refuse_lacking(request)
        self.check(request)
        self._check_labels(request)
        selected = self._accelerated(request) if request.accelerators else self._plain(request)
        self.check_selection(selected)
        grouped = self.in_group(request, selected)
        head = (self.head_instance_type or self.data.machines["head"]) if grouped or request.elastic else None
        accelerator, field = selected.accelerator, f"provider.{self.image_field}"
        own = {
            "head_machine_type": head,
            "head_image": self.plain_image((head,)) if head else None,
            "ssh_public_key": self.ssh_public_key,
            "layout": self._layout(accelerator),
            "volumes": self._volumes(request, selected, head),
            "buckets": _buckets(request),
            **self.inputs(selected, head),
        }
        return Selection(
            accelerator=accelerator,
            machine_types=selected.machine_types,
            scheduler=f"0.0.0.0:{SCHEDULER_PORT}",
            # In a folder of root's; the runner's unit hands it over.
            secret_file="/etc/skyinfra/secret",  # noqa: S106 - the name of a file
            image=self.own_image
            or self.data.image(selected.machine_types, accelerator, field=field, share=selected.share),
            inputs={
                "allow_cidrs": list(self.allow_cidrs),
                "scheduler_port": SCHEDULER_PORT,
                **{name: value for name, value in own.items() if value is not None},
            },
            prices=selected.prices,
            price_note=selected.price_note,
            share=selected.share,
            head_machine=head,
            head_price=self.data.price(head, self.region) if head else None,
            grouped=grouped,
            env=selected.fabric.env if selected.fabric else {},
        )

    def _layout(self, accelerator: Accelerator | None) -> str | None:
        """Returns the layout as the machine's metadata hold it; None where they do not."""
        if accelerator is None or not accelerator.mig_model or self.data.traits.layout_channel != "metadata":
            return None
        return write_tag(accelerator.mig)

    def _volumes(
        self, request: Request, selected: SelectedMachines, head: str | None
    ) -> list[dict[str, object]] | None:
        """Returns the volumes as the module takes them; None for none. Raises `NotSupported`, `InvalidField`."""
        volumes = {path: each for path, each in request.volumes.items() if isinstance(each, Volume)}
        for path, volume in volumes.items():
            field, data = f"volumes[{path!r}]", volume.data
            if head is not None:
                hint = "Declare spot=False or one machine type, and group=False."
                raise NotSupported(f"no node of a machine group has {data.called} of its own", field=field, hint=hint)
            machine = selected.machine_types[0]
            for of, takes in zip(data.machines[::2], data.machines[1::2], strict=True):
                if re.match(of, machine) and not re.match(takes, volume.sold_as):
                    hint = f"Kinds: {', '.join(kind for kind in data.usd_per_gb if re.match(takes, kind))}."
                    raise InvalidField(f"{machine} takes no {volume.sold_as}", field=f"{field}.kind", hint=hint)
        return [{"name": v.name, "id": v.id, "path": path} for path, v in volumes.items()] or None

    def _check_traits(self, request: Request) -> None:
        traits = self.data.traits
        if request.spot and traits.spot == "no":
            having = _having(lambda data: data.traits.spot != "no")
            raise NotSupported(f"{self.called} has no spot machines", field="spot", given=True, hint=having)
        wanted = next((a for a in request.accelerators if a.mig or a.partition), None)
        if wanted is not None and traits.partitioned_by == "nobody":
            having = _having(lambda data: data.traits.partitioned_by == "tenant")
            raise NotSupported(
                f"nobody may partition a GPU on {self.called}", field="accelerator", given=str(wanted), hint=having
            )

    def _check_labels(self, request: Request) -> None:
        rule = self.data.labels
        if rule is None:
            return
        for key, value in request.labels.items():
            if not re.fullmatch(rule.name, key) or not re.fullmatch(rule.value, value):
                raise InvalidField(f"expected {rule.says}", field="labels", given=f"{key}={value}")
        if len(request.labels) > rule.limit:
            why = f"{self.called} takes at most {rule.limit} besides those of skyinfra"
            raise InvalidField(why, field="labels", given=len(request.labels))

    def _accelerated(self, request: Request) -> SelectedMachines:
        found = self._of_types(request) if self.instance_types else self._found(request)
        first = found[0]
        accelerator = next(a for a in request.accelerators if offers.carries(first, a))
        same = [offer for offer in found if offers.carries(offer, accelerator) and offer.chips == first.chips]
        if not self.instance_types:
            # A group, which tries several types, has no volumes.
            same = fallback(same, spot=request.spot and self.data.traits.groups and not request.volumes)
        if first.fraction < 1 and accelerator.mig:
            raise NotSupported(f"{first.machine_type} has a share of a GPU, which has no layout", field="accelerator")
        prices = {o.machine_type: price for o in same if (price := o.price(spot=request.spot)) is not None}
        return self._selected(
            accelerator.with_(count=first.chips if accelerator.vendor == "google" else first.count),
            tuple(offer.machine_type for offer in same),
            tuple(same),
            prices,
            request,
        )

    @property
    def names_fabric(self) -> bool:
        """Whether the declaration names the fabric that connects the nodes."""
        return False

    def _connected(self, every: Iterable[Offer]) -> list[Offer]:
        """Returns the offers of *every* whose machines have a network for RDMA."""
        return connected(self.data.fabrics, every, None if self.names_fabric else self.region)

    def _unconnected(self, found: Iterable[Offer], field: str) -> NotSupported:
        sold = [each for each in offers.load() if each.provider == self.seller and not self.data.refuses(each)]
        return unconnected(self.data.fabrics, found, sold, None if self.names_fabric else self.region, field=field)

    def _plain(self, request: Request) -> SelectedMachines:
        """Nodes without accelerators: the smallest general machine, or the declared types."""
        if request.rdma:
            raise NotSupported("is between machines with accelerators", field="rdma", given=True, hint="Leave it out.")
        for name in self.instance_types:
            self._check_plain(name, request)
        types = tuple(self.instance_types) or (self.data.general(request.vcpus, request.memory_gb, self.region),)
        known = {name: self.data.price(name, self.region) for name in types if not request.spot}
        prices = {name: price for name, price in known.items() if price is not None}
        check_cap(types, prices, request)
        return self._selected(None, types, (), prices, request)

    def _check_plain(self, name: str, request: Request) -> None:
        """Raises `InvalidField` for a machine type with accelerators, or known to be smaller than is declared."""
        why = hint = ""
        if (offer := offers.named(self.seller, name)) is not None:
            why = f"it carries {offer.carries}, and the pool declares no accelerator"
            hint = f'Declare accelerator="{offer.accelerated}", or name a machine without.'
        for row, vcpus, gib, *_ in self.data.machines["general"]:
            if row == name and (vcpus < (request.vcpus or 0) or gib < (request.memory_gb or 0)):
                why, hint = f"it has {vcpus} vCPUs and {gib} GB", "Name a larger one, or declare less."
        if why:
            raise InvalidField(why, field="provider.instance_types", given=name, hint=hint)

    def _selected(
        self,
        accelerator: Accelerator | None,
        types: tuple[str, ...],
        found: tuple[Offer, ...],
        prices: dict[str, Price],
        request: Request,
    ) -> SelectedMachines:
        note = price_note(prices.get(types[0]), spot=request.spot)
        if self.paid_ahead is not None:
            note, prices = self.paid_ahead, {}
        notes = [note, self._place_note(types[0], found), self._smaller_note(found, request)]
        fabric = self.data.fabric(found[0]) if request.rdma and found else None
        return SelectedMachines(accelerator, types, found, prices, "; ".join(filter(None, notes)), fabric)

    def _place_note(self, machine_type: str, found: tuple[Offer, ...]) -> str:
        """Says where no source knows that the machine is offered in the region; else empty."""
        if found:
            known = self._listed_region is None or found[0].in_region(self.region)
        else:
            known = self.data.offers_general(machine_type, self.region)
        return "" if known else f"no source here says that {self.region} has {machine_type}"

    def _smaller_note(self, found: tuple[Offer, ...], request: Request) -> str:
        """Names the cheapest machine with fewer accelerators of the name, of another memory or form factor.

        Empty where there is none, and where a number is declared.
        """
        if not found or found[0].count == 1 or self.instance_types:
            return ""
        wanted = next((each for each in request.accelerators if offers.carries(found[0], each)), None)
        if wanted is None or wanted.count is not None or wanted.vendor == "google" or request.rdma:
            return ""
        query = replace(self._query(request), accelerators=())
        near = [
            offer
            for offer in query.run(offers.load())
            if offer.accelerator == wanted.name
            and offer.count < found[0].count
            and self.data.refuses(offer, own_image=self.own_image is not None) is None
        ]
        if not near:
            return ""
        price = near[0].price(spot=request.spot)
        cost = f" at {price.marked('/h')}" if price else ""
        return f"a smaller one is {near[0].machine_type} ({near[0].carries}){cost}"

    def _query(self, request: Request, **changes: Any) -> offers.Query:
        return offers.ask(
            request.accelerators,
            provider=self.seller,
            spot=request.spot,
            vcpus=request.vcpus,
            # A machine of 64 GiB is what is meant by 64 GB.
            ram_gib=request.memory_gb,
            max_price=request.max_hourly_cost,
            **{"region": self._listed_region, **changes},
        )

    @property
    def _listed_region(self) -> str | None:
        """The region; None where the offers of the provider do not say what is offered where."""
        return self.region if offers.regions(self.seller) else None

    def _found(self, request: Request) -> list[Offer]:
        try:
            query = self._query(request)
        except InvalidField as error:
            if error.field == "region":
                error.hint = f"{error.hint}\nOr name what {self.called} has there: instance_types=[...]"
            raise
        found = query.run(self._connected(offers.load()) if request.rdma else offers.load())
        if not found:
            if request.rdma and (others := query.run(offers.load())):
                raise self._unconnected(others, "rdma")
            raise offers.not_offered(query, called=_CALLED).at("accelerator")
        reasons = {offer: self.data.refuses(offer, own_image=self.own_image is not None) for offer in found}
        served = [offer for offer, why in reasons.items() if why is None]
        first = found[0]
        if not served and self.data.deploys(first.machine_type) and first.vendor not in self.data.apart:
            raise no_image(f"{first.machine_type}: {reasons[first]}", field=f"provider.{self.image_field}")
        # `check_selection` speaks of what is sold, or set up, otherwise.
        return served or list(found)

    def _of_types(self, request: Request) -> list[Offer]:
        """Returns the offers of the declared instance types, in their order. All of them carry the same."""
        # Wherever they are: the shipped regions are not all there are, and the cloud is asked before anything is made.
        # What is no longer sold to everybody, too: who names it may have it.
        query = self._query(request, fraction=0.001, region=None, legacy=True)
        by_type = {offer.machine_type: self._here(offer, request) for offer in query.run(offers.load())}
        known = {offer.machine_type: offer for offer in offers.load() if offer.provider == self.seller}
        for name in self.instance_types:
            if name not in known:
                hint = did_you_mean(name, known) or f"`skyinfra offers --provider {self.seller}` lists them."
                raise InvalidField(
                    "no machine with accelerators", field="provider.instance_types", given=name, hint=hint
                )
            if name not in by_type:
                raise NotOffered(
                    f"{offers.described(known[name], spot=request.spot)} is not what is declared",
                    field="provider.instance_types",
                    given=name,
                    hint=f"Declared: {' or '.join(map(str, request.accelerators))} in {self.region}, with the vCPUs, "
                    f"memory and price of the pool. Its regions: {', '.join(known[name].regions) or 'not known here'}.",
                )
        selected = [by_type[name] for name in self.instance_types]
        check_alike(selected)
        if request.rdma and (apart := [each for each in selected if not self._connected([each])]):
            raise self._unconnected(apart, "provider.instance_types")
        return selected

    def _here(self, offer: Offer, request: Request) -> Offer:
        """*offer* without prices where it is not known to be offered in the region."""
        if self._listed_region is None or offer.in_region(self.region):
            return offer
        if request.max_hourly_cost is not None:
            raise NotSupported(
                f"the price of {offer.machine_type} in {self.region} is not known here", field="max_hourly_cost"
            )
        return replace(offer, on_demand=None, spot=None)


def check_network(cidr: str, *, field: str) -> None:
    """Raises `InvalidField` where *cidr* is no network, or has host bits."""
    try:
        network = ipaddress.ip_network(cidr, strict=False)
    except ValueError:
        raise InvalidField("expected a network such as 203.0.113.7/32", field=field, given=cidr) from None
    if "/" not in cidr or ipaddress.ip_interface(cidr).ip != network.network_address:
        raise InvalidField(
            "expected the first address of a network, with its length",
            field=field,
            given=cidr,
            hint=f"For that address alone: {cidr.partition('/')[0]}/{network.max_prefixlen}"
            + (f"; for its network: {network}" if "/" in cidr else ""),
        )


def _buckets(request: Request) -> list[dict[str, object]] | None:
    """Returns what the role of the nodes may reach of buckets, as the module takes it; None for nothing."""
    mounts = [each for each in request.mounts if isinstance(each, Mount)]
    found = [(*each.source.partition("/")[::2], each.mode != "read") for each in mounts]
    return [{"bucket": name, "prefix": prefix, "write": write} for name, prefix, write in found] or None


def _having(has: Any) -> str:
    """Says which providers have it. has: takes a provider's `Data`."""
    every: Iterable[Data] = map(read, kinds())
    return f"Providers that do: {', '.join(data.kind for data in every if has(data)) or 'none'}."
