"""Nebius AI Cloud: GPU machines."""

from __future__ import annotations

from typing import Annotated, ClassVar

from pydantic import Field

from skyinfra.declared import OUTPUT
from skyinfra.providers.over_ssh import MachineCloud


class Nebius(MachineCloud):
    """Machines of Nebius AI Cloud, by Terraform's nebius/nebius and the service account of the environment.

    project_id: such as ``project-e00abc``, which is of one region. subnet_id: of that project. region: of the project,
    such as ``eu-north1``. instance_types: one ``PLATFORM/PRESET``; empty takes the cheapest that carries the
    accelerator. image: another family of images. ssh_public_key, key_file, allow_cidrs, wait_seconds: see
    `MachineCloud`. NB_SA_ID, NB_AUTHKEY_PUBLIC_ID and NB_AUTHKEY_PRIVATE_PATH name the service account.
    """

    kind: ClassVar[str] = "nebius"

    project_id: Annotated[str, Field(pattern=r"^project-[a-z0-9-]+$"), OUTPUT]
    subnet_id: Annotated[str, Field(pattern=r"^vpcsubnet-[a-z0-9-]+$"), OUTPUT]
    region: str = Field(default="eu-north1", pattern=r"^[a-z]+-[a-z]+\d$")
