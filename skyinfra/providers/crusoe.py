"""Crusoe Cloud: virtual machines with GPUs."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from skyinfra.errors import InvalidField
from skyinfra.providers.base import Request
from skyinfra.providers.over_ssh import MachineCloud
from skyinfra.providers.selected import SelectedMachines


class Crusoe(MachineCloud):
    """Virtual machines of Crusoe Cloud, by Terraform's crusoecloud/crusoe and the key of the environment.

    region: a location, such as ``us-east1-a``. project: by its name or id; None takes that of the environment.
    instance_types: one type, such as ``l40s-48gb.1x``; empty takes the cheapest that carries the accelerator. image:
    another one. ib_network_id: of the InfiniBand network of a pool with ``rdma=True``; None takes one of the location
    that has machines of the type, when they are made. ssh_public_key, key_file, allow_cidrs, wait_seconds: see
    `MachineCloud`. CRUSOE_ACCESS_KEY_ID and CRUSOE_SECRET_KEY, or ``~/.crusoe/config``, hold the key.
    """

    kind: ClassVar[str] = "crusoe"

    region: str = Field(default="us-east1-a", pattern=r"^[a-z]+-[a-z]+\d-[a-z]$")
    project: str | None = None
    ib_network_id: str | None = Field(default=None, pattern=r"^[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}$")

    def check(self, request: Request) -> None:
        """Raises `InvalidField` for a network without RDMA, and as of every such cloud."""
        super().check(request)
        if self.ib_network_id and not request.rdma:
            raise InvalidField(
                "is of a pool whose nodes it connects",
                field="provider.ib_network_id",
                given=self.ib_network_id,
                hint="Declare the pool with rdma=True, or leave it out.",
            )

    def inputs(self, selected: SelectedMachines, head: str | None) -> dict[str, object]:
        """Returns the fields that the module takes as they are, and whether it joins the nodes in a partition."""
        return super().inputs(selected, head) | {"rdma": selected.fabric is not None or None}
