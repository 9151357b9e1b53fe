"""Lambda: on-demand GPU machines."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from skyinfra.providers.over_ssh import MachineCloud


class Lambda(MachineCloud):
    """Machines of Lambda, by Terraform's elct9620/lambdalabs and the key in LAMBDALABS_API_KEY.

    region: such as ``us-east-1``. instance_types: one type, such as ``gpu_1x_h100_pcie``; empty takes the cheapest that
    carries the accelerator. ssh_public_key, key_file, wait_seconds: see `MachineCloud`. The image is Lambda Stack.
    Who reaches the scheduler, the firewall of the account says: it must let clients and nodes reach TCP port 8786.
    """

    kind: ClassVar[str] = "lambda"

    region: str = Field(default="us-east-1", pattern=r"^[a-z]+(-[a-z]+)*-\d$")
