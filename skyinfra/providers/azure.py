"""Azure: virtual machines."""

from __future__ import annotations

import re
from typing import ClassVar, Literal

from pydantic import Field

from skyinfra.errors import InvalidField
from skyinfra.providers.base import Request
from skyinfra.providers.cloud import Chosen
from skyinfra.providers.over_ssh import MachineCloud

# The least that the disk of an image with drivers has.
_SMALLEST_DISK = 64
# https://learn.microsoft.com/en-us/azure/azure-resource-manager/management/tag-resources
_LABEL = re.compile(r"[^<>%&\\?/]{1,512}")
_LABELS = 48


class Azure(MachineCloud):
    """Virtual machines of Azure, by Terraform's hashicorp/azurerm and the subscription of the environment.

    region: such as ``eastus``. zone: 1, 2 or 3; None leaves it to Azure. resource_group: one of yours; without, the
    pool has one of its own. image: ``PUBLISHER:OFFER:SKU:VERSION``, or the id of an image of your own; with the driver
    for an accelerator. instance_types: one size, such as ``Standard_NC40ads_H100_v5``. ssh_public_key, key_file,
    allow_cidrs, wait_seconds: see `MachineCloud`. Log in with `az login`, and set ARM_SUBSCRIPTION_ID.
    """

    kind: ClassVar[str] = "azure"

    region: str = Field(default="eastus", pattern=r"^[a-z]+\d?$")
    zone: Literal["1", "2", "3"] | None = None
    resource_group: str | None = Field(default=None, pattern=r"^[\w.()-]{1,89}[\w()-]$")
    image: str | None = Field(default=None, pattern=r"^([\w.-]+:[\w.-]+:[\w.-]+:[\w.-]+|/subscriptions/\S+)$")

    def check(self, request: Request) -> None:
        """Raises `InvalidField` for a disk that is too small, and labels that cannot be tags."""
        super().check(request)
        if request.disk_gb is not None and request.disk_gb < _SMALLEST_DISK:
            raise InvalidField(f"at least {_SMALLEST_DISK}", field="disk_gb", given=request.disk_gb)
        for key, value in request.labels.items():
            if not _LABEL.fullmatch(key) or len(value) > 256 or key.lower().startswith("skyinfra-"):
                why = r"a name without < > % & \ ? /, which does not begin with skyinfra-, and a value of at most 256"
                raise InvalidField(f"expected {why}", field=f"labels[{key}]", given=value)
        if len(request.labels) > _LABELS:
            raise InvalidField(f"at most {_LABELS}", field="labels", given=len(request.labels))

    def inputs(self, chosen: Chosen, head: str | None) -> dict[str, object]:
        """The inputs of modules/azure besides those of every such cloud."""
        return {"zone": self.zone, "resource_group": self.resource_group}
