"""Vultr: Cloud GPU instances."""

from __future__ import annotations

import re
from typing import ClassVar

from pydantic import Field

from skyinfra.errors import NotSupported
from skyinfra.providers.cloud import Chosen
from skyinfra.providers.over_ssh import MachineCloud


class Vultr(MachineCloud):
    """Cloud GPU instances of Vultr, by Terraform's vultr/vultr and the key in VULTR_API_KEY.

    region: such as ``ewr``. instance_types: one plan, such as ``vcg-l40s-16c-180g-48vram``; empty takes the cheapest
    that carries the accelerator. image: the number of an operating system (os_id). ssh_public_key, key_file,
    allow_cidrs, wait_seconds: see `MachineCloud`. Cloud GPUs are vGPUs: nobody may partition them.
    """

    kind: ClassVar[str] = "vultr"
    sized_disk: ClassVar[bool] = False

    region: str = Field(default="ewr", pattern=r"^[a-z]{3}$")
    image: str | None = Field(default=None, pattern=r"^\d+$")

    def check_chosen(self, chosen: Chosen) -> None:
        """Raises `NotSupported` for what is sold otherwise than as an instance, or by a plan that is not known."""
        for offer in chosen.offers:
            if not re.match(self.data.machines["deployed"], offer.machine_type):
                raise NotSupported(
                    f"{offer.machine_type} is no Cloud GPU plan that this version knows",
                    field="accelerator",
                    hint="`skyinfra offers --provider vultr` lists the plans; bare metal is not deployed here.",
                )

    def inputs(self, chosen: Chosen, head: str | None) -> dict[str, object]:
        """No inputs besides those of every such cloud."""
        return {}
