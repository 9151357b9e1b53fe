"""Scaleway: GPU instances."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from skyinfra.providers.over_ssh import MachineCloud


class Scaleway(MachineCloud):
    """Instances of Scaleway, by Terraform's scaleway/scaleway and the key in SCW_ACCESS_KEY and SCW_SECRET_KEY.

    region: a zone, such as ``fr-par-2``. instance_types: one type, such as ``H100-1-80G``; empty takes the cheapest
    that carries the accelerator. image: another label, or the id of your own. ssh_public_key, key_file,
    allow_cidrs, wait_seconds: see `MachineCloud`. Every machine of the project lets the key in.
    """

    kind: ClassVar[str] = "scaleway"

    region: str = Field(default="fr-par-2", pattern=r"^[a-z]{2}-[a-z]{3}-\d$")
