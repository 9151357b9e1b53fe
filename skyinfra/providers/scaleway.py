"""Scaleway: GPU instances."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from skyinfra.errors import InvalidField
from skyinfra.providers.base import Request
from skyinfra.providers.cloud import Chosen
from skyinfra.providers.over_ssh import MachineCloud

# The least that a disk with an image of drivers has.
_SMALLEST_DISK = 50


class Scaleway(MachineCloud):
    """Instances of Scaleway, by Terraform's scaleway/scaleway and the key in SCW_ACCESS_KEY and SCW_SECRET_KEY.

    region: a zone, such as ``fr-par-2``. instance_types: one type, such as ``H100-1-80G``; empty takes the cheapest
    that carries the accelerator. image: another label, or the id of your own. ssh_public_key, key_file,
    allow_cidrs, wait_seconds: see `MachineCloud`. Every machine of the project lets the key in.
    """

    kind: ClassVar[str] = "scaleway"

    region: str = Field(default="fr-par-2", pattern=r"^[a-z]{2}-[a-z]{3}-\d$")

    def check(self, request: Request) -> None:
        """Raises `InvalidField` for a disk that is too small, and as of every such cloud."""
        super().check(request)
        if request.disk_gb is not None and request.disk_gb < _SMALLEST_DISK:
            raise InvalidField(f"at least {_SMALLEST_DISK}", field="disk_gb", given=request.disk_gb)

    def inputs(self, chosen: Chosen, head: str | None) -> dict[str, object]:
        """No inputs besides those of every such cloud."""
        return {}
