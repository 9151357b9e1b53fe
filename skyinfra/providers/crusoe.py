"""Crusoe Cloud: virtual machines with GPUs."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from skyinfra.providers.over_ssh import MachineCloud


class Crusoe(MachineCloud):
    """Virtual machines of Crusoe Cloud, by Terraform's crusoecloud/crusoe and the key of the environment.

    region: a location, such as ``us-east1-a``. project: by its name or id; None takes that of the environment.
    instance_types: one type, such as ``l40s-48gb.1x``; empty takes the cheapest that carries the accelerator. image:
    another one. ssh_public_key, key_file, allow_cidrs, wait_seconds: see `MachineCloud`. CRUSOE_ACCESS_KEY_ID and
    CRUSOE_SECRET_KEY, or ``~/.crusoe/config``, hold the key.
    """

    kind: ClassVar[str] = "crusoe"

    region: str = Field(default="us-east1-a", pattern=r"^[a-z]+-[a-z]+\d-[a-z]$")
    project: str | None = None
