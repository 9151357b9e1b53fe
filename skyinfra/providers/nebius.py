"""Nebius AI Cloud: GPU machines."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from skyinfra.errors import InvalidField
from skyinfra.providers.base import Request
from skyinfra.providers.cloud import Chosen
from skyinfra.providers.over_ssh import MachineCloud

# The least that a disk with an image of CUDA has.
_SMALLEST_DISK = 50


class Nebius(MachineCloud):
    """Machines of Nebius AI Cloud, by Terraform's nebius/nebius and the service account of the environment.

    project_id: such as ``project-e00abc``, which is of one region. subnet_id: of that project. region: of the project,
    such as ``eu-north1``. instance_types: one ``PLATFORM/PRESET``; empty takes the cheapest that carries the
    accelerator. image: another family of images. ssh_public_key, key_file, allow_cidrs, wait_seconds: see
    `MachineCloud`. NB_SA_ID, NB_AUTHKEY_PUBLIC_ID and NB_AUTHKEY_PRIVATE_PATH name the service account.
    """

    kind: ClassVar[str] = "nebius"

    project_id: str = Field(pattern=r"^project-[a-z0-9-]+$")
    subnet_id: str = Field(pattern=r"^vpcsubnet-[a-z0-9-]+$")
    region: str = Field(default="eu-north1", pattern=r"^[a-z]+-[a-z]+\d$")

    def check(self, request: Request) -> None:
        """Raises `InvalidField` for a disk that is too small, and as of every such cloud."""
        super().check(request)
        if request.disk_gb is not None and request.disk_gb < _SMALLEST_DISK:
            raise InvalidField(f"at least {_SMALLEST_DISK}", field="disk_gb", given=request.disk_gb)

    def inputs(self, chosen: Chosen, head: str | None) -> dict[str, object]:
        """The inputs of modules/nebius besides those of every such cloud."""
        return {"project_id": self.project_id, "subnet_id": self.subnet_id}
