"""Verda: GPU instances, DataCrunch before."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from skyinfra.errors import InvalidField
from skyinfra.providers.base import Request
from skyinfra.providers.cloud import Chosen
from skyinfra.providers.over_ssh import MachineCloud

# The least that a disk with an image of CUDA has.
_SMALLEST_DISK = 50


class Verda(MachineCloud):
    """Instances of Verda, by Terraform's verda-cloud/verda and VERDA_CLIENT_ID and VERDA_CLIENT_SECRET.

    region: a location, such as ``FIN-02``. instance_types: one type, such as ``1H100.80S.32V``; empty takes the
    cheapest that carries the accelerator. image: another one of Verda's, or the id of a volume of yours.
    ssh_public_key, key_file, wait_seconds: see `MachineCloud`. There is no firewall: every port of a node is open,
    and mutual TLS lets in who has the secret of the fleet.
    """

    kind: ClassVar[str] = "verda"
    key_kinds: ClassVar[tuple[str, ...]] = ("ssh-ed25519", "ssh-rsa", "ecdsa-sha2-nistp256")

    region: str = Field(default="FIN-02", pattern=r"^[A-Z]{3}-\d{2}$")

    def check(self, request: Request) -> None:
        """Raises `InvalidField` for a disk that is too small, and as of every such cloud."""
        super().check(request)
        if request.disk_gb is not None and request.disk_gb < _SMALLEST_DISK:
            raise InvalidField(f"at least {_SMALLEST_DISK}", field="disk_gb", given=request.disk_gb)

    def inputs(self, chosen: Chosen, head: str | None) -> dict[str, object]:
        """No inputs besides those of every such cloud."""
        return {}
