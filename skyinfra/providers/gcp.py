"""Google Cloud: Compute Engine."""

from __future__ import annotations

import re
from typing import Annotated, ClassVar

from pydantic import AfterValidator, Field, model_validator

from skyinfra.declared import OUTPUT
from skyinfra.errors import InvalidField, NotSupported
from skyinfra.providers.base import Request, Selection
from skyinfra.providers.cloud import CloudProvider
from skyinfra.providers.data import OutputStrings, Strings, TerraformProvider
from skyinfra.providers.selected import SelectedMachines

_HOUR_S = 3600


def _zones(given: tuple[str, ...]) -> tuple[str, ...]:
    for zone in given:
        # us-central1-ai1a too: https://docs.cloud.google.com/compute/docs/regions-zones/ai-zones
        if not re.fullmatch(r"[a-z]+-[a-z]+\d+-[a-z][a-z0-9]*", zone):
            raise InvalidField("expected a zone such as us-central1-a", field="GCP.zones", given=zone)
    return given


class GCP(CloudProvider):
    """Google Cloud, by Terraform's hashicorp/google and the credentials that it finds.

    project: its id; None takes that of the environment (``GOOGLE_PROJECT``). region: such as ``us-central1``. zones: to
    use, in order of preference; empty is all that have the machine. instance_types: machine types to take, in order of
    preference; empty takes the cheapest that carries the accelerator, and for a spot pool those besides that cost at
    most twice that. head_instance_type: of the head of a pool that is a managed instance group (spot, or several
    types), which carries no slots. subnetwork: your own, by its self link; without it the pool has a network of its
    own, with Cloud NAT. network_tags: those of your firewall rules, instead of rules of the pool's own. allow_cidrs:
    IPv4 networks that may reach the head, which has a static external address then; with none, clients come through
    Identity-Aware Proxy. ssh_public_key: to log in with as ``ubuntu``; ``gcloud compute ssh`` needs none. image: your
    own, or a family, as ``projects/PROJECT/global/images/[family/]NAME``. service_account: e-mail address; none by
    default. flex_start_hours: nodes that are made when there is capacity and deleted after that many hours, at most
    168. reservation: its name, or ``projects/PROJECT/reservations/NAME``. reservation_bound: nodes are deleted when it
    ends, as capacity that was reserved for a time wants (calendar mode, AI Hypercomputer). gpudirect: the interfaces of
    GPUDirect RDMA, for A3 Ultra and A4, as ``rdma=True`` of the pool has them. compact_placement: close together in one
    zone. group: nodes in a managed instance group from the first one on, so that a spot pool of one node grows without
    being replaced. head_volume_gb: of the disk with the jobs of the head, which may only grow; 20 unless it says
    otherwise.
    """

    kind: ClassVar[str] = "gcp"

    project: str | None = Field(default=None, pattern=r"^[a-z0-9.:-]+$")
    region: str = Field(default="us-central1", pattern=r"^[a-z]+-[a-z]+\d+$")
    zones: Annotated[Strings, AfterValidator(_zones)] = ()
    subnetwork: Annotated[
        str | None,
        Field(pattern=r"^(https://www\.googleapis\.com/compute/v1/)?projects/[^/]+/regions/[^/]+/subnetworks/[^/]+$"),
        OUTPUT,
    ] = None
    network_tags: OutputStrings = ()
    image: str | None = Field(default=None, pattern=r"^projects/[a-z0-9.:-]+/global/images/(family/)?[a-z0-9-]+$")
    service_account: Annotated[str | None, Field(pattern=r"^[^@\s]+@[^@\s]+$"), OUTPUT] = None
    flex_start_hours: float | None = Field(default=None, ge=1 / 6, le=168)
    reservation: Annotated[
        str | None, Field(pattern=r"^(projects/[^/]+/reservations/)?[a-z]([a-z0-9-]*[a-z0-9])?$"), OUTPUT
    ] = None
    reservation_bound: bool = False
    gpudirect: bool = False
    compact_placement: bool = False
    group: bool = False
    head_volume_gb: int | None = Field(default=None, ge=10, le=65_536)

    @model_validator(mode="after")
    def _check_place(self) -> GCP:
        for zone in self.zones:
            if zone.rpartition("-")[0] != self.region:
                raise InvalidField(f"not a zone of {self.region}", field="GCP.zones", given=zone)
        for cidr in self.allow_cidrs:
            if ":" in cidr:
                hint = "Its network has IPv4 addresses alone."
                raise InvalidField("expected an IPv4 network", field="GCP.allow_cidrs", given=cidr, hint=hint)
        if self.reservation_bound and self.reservation is None:
            hint = "Name the reservation: reservation=..."
            raise InvalidField("nodes are bound to a reservation", field="GCP.reservation_bound", given=True, hint=hint)
        return self

    def terraform(self) -> tuple[TerraformProvider, ...]:
        """Returns the provider of the region, with the project where one is declared."""
        return (self.data.terraform_provider(region=self.region, project=self.project),)

    def check(self, request: Request) -> None:
        """Raises `InvalidField` for a purchase that contradicts itself."""
        asked = ["spot"] if request.spot else []
        asked += [f"provider.{name}" for name in ("flex_start_hours", "reservation") if getattr(self, name)]
        if len(asked) > 1:
            raise InvalidField(
                "spot, flex start and a reservation are three ways to get a machine",
                field=asked[1],
                hint=f"Leave out all but one of {', '.join(asked)}.",
            )
        own = ("flex_start_hours", "reservation_bound", "group")
        unfit = {"spot": request.spot, **{f"provider.{name}": getattr(self, name) for name in own}}
        field = next((name for name, given in unfit.items() if given), None)
        if request.elastic and field is not None:
            raise NotSupported(
                "nodes that follow the work are machines that stop and start again, and these do not",
                field=field,
                given=unfit[field],
                hint="Leave it out. Or leave out idle_seconds: then `skyinfra scale` changes the number of nodes.",
            )

    def check_selection(self, selected: SelectedMachines) -> None:
        """Raises `NotSupported` where a TPU was chosen from a list that does not begin with one, and for machines
        without GPUDirect where it is declared."""
        if selected.accelerator is not None and selected.accelerator.vendor == "google":
            raise NotSupported(
                "TPUs and other accelerators are set up in different ways",
                field="accelerator",
                given=str(selected.accelerator),
                hint="Declare a pool for each.",
            )
        row = self.data.fabric(selected.offers[0]) if selected.offers else self.data.fabrics[-1]
        if self.gpudirect and row is not None and row.network is None:
            hint = "Leave it out: nodes reach each other over their first interface all the same."
            why = f"not on {selected.machine_types[0]}: {row.why}"
            raise NotSupported(why, field="provider.gpudirect", given=True, hint=hint)

    def select(self, request: Request) -> Selection:
        """As of every cloud; raises besides for machines that are not sold on demand, and groups with GPUDirect."""
        found = super().select(request)
        scarce = [name for name in found.machine_types if re.match(self.data.machines.get("scarce", "(?!)"), name)]
        if scarce and not request.spot and self.flex_start_hours is None:
            raise NotSupported(
                f"{scarce[0]} is sold as a spot machine or by a flex start alone",
                field="provider",
                hint="Declare spot=True, sky.GCP(flex_start_hours=...), or more accelerators for each node.",
            )
        reserved = [name for name in found.machine_types if re.match(self.data.machines.get("reserved", "(?!)"), name)]
        if reserved and not (request.spot or self.flex_start_hours or self.reservation):
            hint = (
                "Declare sky.GCP(reservation=..., reservation_bound=True), sky.GCP(flex_start_hours=...), or spot=True."
            )
            raise NotSupported(f"{reserved[0]} is not sold on demand", field="provider", hint=hint)
        alone = {
            "provider.flex_start_hours": self.flex_start_hours,
            "provider.gpudirect": self.gpudirect,
            "rdma": request.rdma,
        }
        field = next((name for name, given in alone.items() if given), None)
        if field and found.separate_head:
            hint = "Leave out group, idle_seconds, all machine types but one, and spot for several nodes."
            why = "for machines of one type, which are no group"
            raise InvalidField(why, field=field, given=alone[field], hint=hint)
        return found

    def in_group(self, request: Request, selected: SelectedMachines) -> bool:
        """Returns whether the nodes are a managed instance group."""
        return self.group or super().in_group(request, selected)

    def _gpu_zones(self, machine_type: str) -> list[str]:
        """Returns the zones of the region that are known to have the GPUs that are added to *machine_type*, if some are
        and no zones are declared."""
        gpu = machine_type.partition("+")[2].partition(":")[0]
        known: list[str] = [] if self.zones else self.data.machines["zones"].get(gpu, [])
        return [zone for zone in known if zone.rpartition("-")[0] == self.region]

    def inputs(self, selected: SelectedMachines, head: str | None) -> dict[str, object]:
        """Returns the inputs of modules/gcp besides those of every cloud."""
        return {
            "zones": list(self.zones),
            "gpu_zones": self._gpu_zones(selected.machine_types[0]) or None,
            "subnetwork": self.subnetwork,
            "network_tags": list(self.network_tags),
            "service_account": self.service_account,
            "flex_start_seconds": round(self.flex_start_hours * _HOUR_S) if self.flex_start_hours else None,
            "reservation": self.reservation,
            "reservation_bound": self.reservation_bound or None,
            "gpudirect": self.gpudirect or selected.fabric is not None or None,
            "compact_placement": self.compact_placement,
            "group": self.group or None,
            "head_volume_gb": self.head_volume_gb,
        }
