"""Lambda: on-demand GPU machines."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field, model_validator

from skyinfra.errors import NotSupported
from skyinfra.providers.cloud import Chosen
from skyinfra.providers.over_ssh import MachineCloud


class Lambda(MachineCloud):
    """Machines of Lambda, by Terraform's elct9620/lambdalabs and the key in LAMBDALABS_API_KEY.

    region: such as ``us-east-1``. instance_types: one type, such as ``gpu_1x_h100_pcie``; empty takes the cheapest that
    carries the accelerator. ssh_public_key, key_file, wait_seconds: see `MachineCloud`. The image is Lambda Stack.
    Who reaches the scheduler, the firewall of the account says: it must let clients and nodes reach TCP port 8786.
    """

    kind: ClassVar[str] = "lambda"
    sized_disk: ClassVar[bool] = False

    region: str = Field(default="us-east-1", pattern=r"^[a-z]+(-[a-z]+)*-\d$")

    @model_validator(mode="after")
    def _check_image(self) -> Lambda:
        if self.image is not None:
            raise NotSupported(
                "Terraform's provider launches Lambda Stack alone",
                field="Lambda.image",
                given=self.image,
                hint="Leave it out. Packages come with sky.Image(apt=[...], pip=[...]).",
            )
        return self

    def inputs(self, chosen: Chosen, head: str | None) -> dict[str, object]:
        """No inputs besides those of every such cloud."""
        return {}
