"""RunPod: pods."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from skyinfra.errors import NotOffered, NotSupported
from skyinfra.offers import Offer, Query
from skyinfra.providers.base import Request
from skyinfra.providers.cloud import CloudProvider
from skyinfra.providers.data import Strings, TerraformProvider
from skyinfra.providers.selected import SelectedMachines


class RunPod(CloudProvider):
    """Pods of RunPod, by Terraform's runpod/runpod and the API key in RUNPOD_API_KEY.

    cloud: of RunPod's own data centers ("secure"), or of its hosts ("community"), whose public addresses may change.
    data_centers: to take, such as ``EU-RO-1``; empty is all. instance_types: to take, such as
    ``NVIDIA H100 80GB HBM3 (secure)`` or ``cpu3c-8-16``; empty takes the cheapest. image: one of your own, with
    python3. registry: id of the credential in RunPod for a private image. min_cuda: the oldest CUDA that the driver of
    the host has to serve, such as ``12.8``. wait_seconds: how long the head may take until its port is open.
    """

    kind: ClassVar[str] = "runpod"

    region: Literal["all regions"] = "all regions"
    cloud: Literal["secure", "community"] = "secure"
    data_centers: Strings = ()
    image: str | None = Field(default=None, pattern=r"^[A-Za-z0-9][A-Za-z0-9._:/@-]*$")
    registry: str | None = Field(default=None, min_length=1)
    min_cuda: str | None = Field(default=None, pattern=r"^\d+\.\d+$")
    wait_seconds: int = Field(default=1200, ge=1)

    def terraform(self) -> tuple[TerraformProvider, ...]:
        """Returns the provider; its key comes from the environment."""
        return (self.data.terraform_provider(),)

    def check_selection(self, selected: SelectedMachines) -> None:
        """Raises `NotSupported` for `min_cuda` of machines without NVIDIA GPUs."""
        if self.min_cuda and (selected.accelerator is None or selected.accelerator.vendor != "nvidia"):
            raise NotSupported("needs NVIDIA GPUs", field="provider.min_cuda", given=self.min_cuda)

    def _query(self, request: Request, **changes: object) -> Query:
        # The list has one price for all data centers.
        return super()._query(request, **{**changes, "region": None})

    def _found(self, request: Request) -> list[Offer]:
        found = super()._found(request)
        mine = [offer for offer in found if offer.machine_type.endswith(f"({self.cloud})")]
        if not mine:
            other = found[0].machine_type.rpartition("(")[2].rstrip(")")
            raise NotOffered(
                f'not in RunPod\'s list of its cloud "{self.cloud}"',
                field="accelerator",
                given=" or ".join(map(str, request.accelerators)),
                hint=f"It has {found[0].machine_type}: declare sky.RunPod(cloud={other!r}).",
            )
        return mine

    def inputs(self, selected: SelectedMachines, head: str | None) -> dict[str, object]:
        """Returns the inputs of modules/runpod besides those of every cloud."""
        return {
            "data_centers": list(self.data_centers),
            "registry": self.registry,
            "min_cuda": self.min_cuda,
            "wait_seconds": self.wait_seconds,
        }
