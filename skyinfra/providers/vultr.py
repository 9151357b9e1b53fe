"""Vultr: Cloud GPU instances."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from skyinfra.providers.over_ssh import MachineCloud


class Vultr(MachineCloud):
    """Cloud GPU instances of Vultr, by Terraform's vultr/vultr and the key in VULTR_API_KEY.

    region: such as ``ewr``. instance_types: one plan, such as ``vcg-l40s-16c-180g-48vram``; empty takes the cheapest
    that carries the accelerator. image: the number of an operating system (os_id). ssh_public_key, key_file,
    allow_cidrs, wait_seconds: see `MachineCloud`. Cloud GPUs are vGPUs: nobody may partition them.
    """

    kind: ClassVar[str] = "vultr"

    region: str = Field(default="ewr", pattern=r"^[a-z]{3}$")
    image: str | None = Field(default=None, pattern=r"^\d+$")
