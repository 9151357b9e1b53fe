"""Verda: GPU instances, DataCrunch before."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from skyinfra.providers.over_ssh import MachineCloud


class Verda(MachineCloud):
    """Instances of Verda, by Terraform's verda-cloud/verda and VERDA_CLIENT_ID and VERDA_CLIENT_SECRET.

    region: a location, such as ``FIN-02``. instance_types: one type, such as ``1H100.80S.32V``; empty takes the
    cheapest that carries the accelerator. image: another one of Verda's, or the id of a volume of yours.
    ssh_public_key, key_file, wait_seconds: see `MachineCloud`. There is no firewall: every port of a node is open,
    and mutual TLS lets in who has the secret of the fleet.
    """

    kind: ClassVar[str] = "verda"

    region: str = Field(default="FIN-02", pattern=r"^[A-Z]{3}-\d{2}$")
