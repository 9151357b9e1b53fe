"""Azure: virtual machines."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from skyinfra.declared import OUTPUT
from skyinfra.errors import InvalidField, NotSupported
from skyinfra.providers.base import Request
from skyinfra.providers.over_ssh import MachineCloud
from skyinfra.providers.selected import SelectedMachines


class Azure(MachineCloud):
    """Virtual machines of Azure, by Terraform's hashicorp/azurerm and the credentials that it finds.

    subscription_id: None takes that of the environment (``ARM_SUBSCRIPTION_ID``). region: such as ``eastus``. zone: 1,
    2 or 3; None leaves it to Azure. resource_group: one of yours; without, the pool has one of its own. image:
    ``PUBLISHER:OFFER:SKU:VERSION``, or the id of an image of your own; with the driver for an accelerator.
    instance_types: one size, such as ``Standard_NC40ads_H100_v5``. infiniband: between nodes of the ND series, in an
    availability set, as ``rdma=True`` of the pool has it. ssh_public_key, key_file, allow_cidrs, wait_seconds: see
    `MachineCloud`. Log in with `az login`.
    """

    kind: ClassVar[str] = "azure"

    subscription_id: str | None = Field(default=None, pattern=r"^[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}$")
    region: str = Field(default="eastus", pattern=r"^[a-z]+\d?$")
    zone: Literal["1", "2", "3"] | None = None
    resource_group: Annotated[str | None, Field(pattern=r"^[\w.()-]{1,89}[\w()-]$"), OUTPUT] = None
    infiniband: bool = False
    image: Annotated[str | None, Field(pattern=r"^([\w.-]+:[\w.-]+:[\w.-]+:[\w.-]+|/subscriptions/\S+)$"), OUTPUT] = (
        None
    )

    def check(self, request: Request) -> None:
        """Raises `InvalidField` for what an availability set has not, and as of every such cloud."""
        super().check(request)
        if (self.infiniband or request.rdma) and (request.spot or self.zone):
            field, given = ("spot", True) if request.spot else ("provider.zone", self.zone)
            why = "nodes with InfiniBand stand in an availability set, which takes no spot machines and is in no zone"
            hint = f"Leave it out, or {'infiniband' if self.infiniband else 'rdma'}."
            raise InvalidField(why, field=field, given=given, hint=hint)

    def check_selection(self, selected: SelectedMachines) -> None:
        """Raises `NotSupported` for machines without InfiniBand where it is declared."""
        name = selected.machine_types[0]
        row = self.data.fabric(selected.offers[0]) if selected.offers else None
        if self.infiniband and (row is None or row.network is None):
            hint = "Sizes of the ND series with an r have it: Standard_ND96isr_H100_v5. Or leave infiniband out."
            raise NotSupported(f"{name} has no InfiniBand", field="provider.infiniband", given=True, hint=hint)

    def inputs(self, selected: SelectedMachines, head: str | None) -> dict[str, object]:
        """Returns the fields that the module takes as they are, with InfiniBand where the pool asks for RDMA."""
        return super().inputs(selected, head) | {"infiniband": self.infiniband or selected.fabric is not None or None}
