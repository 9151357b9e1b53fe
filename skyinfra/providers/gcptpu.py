"""TPU slices on Google Cloud."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import ClassVar

from pydantic import Field

from skyinfra.errors import InvalidField, NotSupported
from skyinfra.providers.base import Request, Selection
from skyinfra.providers.data import TerraformProvider, read
from skyinfra.providers.gcp import GCP
from skyinfra.providers.selected import SelectedMachines


class GCPTPU(GCP):
    """TPU slices on Google Cloud, by Terraform's hashicorp/google-beta: what `GCP` becomes for a pool of TPUs.

    A slice on one host is a node with a slot for each chip. Of a larger slice, which is a pool of its own, each host is
    a node with one slot. The head is a small machine besides. runtime_version: of the slices; None takes that of their
    generation. The other fields are those of `GCP`.
    """

    kind: ClassVar[str] = "gcptpu"
    image_field: ClassVar[str] = "runtime_version"

    runtime_version: str | None = Field(default=None, pattern=r"^[a-z0-9-]+(\.[a-z0-9-]+)*$")

    def terraform(self) -> tuple[TerraformProvider, ...]:
        """Returns the provider of the slices, and that of the head and the network."""
        place = {"region": self.region, "project": self.project}
        return (read("gcp").terraform_provider(**place), self.data.terraform_provider(**place))

    def _check_provider(self, name: str) -> None:
        """Raises `NotSupported` for a block of the stack: the head, in the other account, would not see its slices."""
        if self.provider is not None:
            raise NotSupported(
                "the module of TPU slices has two providers, google-beta and google, and takes no block of the stack",
                field="GCP.provider",
                given=self.provider,
                hint="Leave it out and name the project: sky.GCP(project=...), with credentials of the environment.",
            )

    def check(self, request: Request) -> None:
        """Raises a `DeclarationError` for what a slice has not."""
        super().check(request)
        if any(each.vendor != "google" for each in request.accelerators):
            raise NotSupported(
                "TPUs and other accelerators are set up in different ways",
                field="accelerator",
                given=", ".join(map(str, request.accelerators)),
                hint="Declare a pool for each.",
            )

    def check_selection(self, selected: SelectedMachines) -> None:
        """Raises `NotSupported` for a generation that the Cloud TPU API has not."""
        for offer in selected.offers:
            if not self.data.deploys(offer.machine_type):
                raise NotSupported(
                    f"{offer.machine_type} is no {self.data.machines['deployed_as']}",
                    field="accelerator",
                    given=str(selected.accelerator),
                    hint="Declare TPUv6e or TPUv5p.",
                )

    def in_group(self, request: Request, selected: SelectedMachines) -> bool:
        """Returns the head is always a machine besides: a slice has no address that stays."""
        return True

    def plain_image(self, machine_types: tuple[str, ...]) -> str:
        """Returns the image of the head."""
        return read("gcp").image(machine_types, None, field="provider.image")

    def select(self, request: Request) -> Selection:
        """As of every cloud, with the runtime version of the generation. Raises `NotSupported` for several slices of
        several hosts."""
        found, machines = super().select(request), self.data.machines
        name = found.machine_types[0]
        version = next(version for pattern, version in machines["runtime_versions"] if re.match(pattern, name))
        hosts = 1 if re.match(machines["one_host"], name) else found.count // machines["chips_per_host"]
        if hosts > 1 and request.nodes > 1:
            raise NotSupported(
                f"{name} has {hosts} hosts, which run one program: a pool has one such slice",
                field="nodes",
                given=request.nodes,
                hint="Declare a pool for each slice, or one larger slice.",
            )
        inputs = found.inputs | ({"hosts": hosts} if hosts > 1 else {})
        return replace(found, image=self.runtime_version or version, hosts=hosts, inputs=inputs)

    def inputs(self, selected: SelectedMachines, head: str | None) -> dict[str, object]:
        """Returns the inputs of modules/gcptpu besides those of every cloud."""
        names = ("subnetwork", "network_tags", "service_account", "head_volume_gb")
        own = {name: value for name, value in super().inputs(selected, head).items() if name in names}
        return {"zones": list(self.zones) or self._zones(selected.machine_types[0]), **own}

    def _zones(self, machine_type: str) -> list[str]:
        """Returns the zones of the region that are known to have it."""
        generation = machine_type.partition("-")[0]
        known: list[str] = self.data.machines["zones"].get(generation, [])
        here = [zone for zone in known if zone.rpartition("-")[0] == self.region]
        if not here:
            raise InvalidField(
                f"no zone of {self.region} is known to have {generation}",
                field="provider.zones",
                hint="Name the zone: sky.GCP(zones=[...])"
                + (f", or take another region. Known are: {', '.join(known)}." if known else "."),
            )
        return here
