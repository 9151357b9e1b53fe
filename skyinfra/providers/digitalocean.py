"""DigitalOcean: droplets."""

from __future__ import annotations

import base64
import hashlib
import re
from typing import ClassVar

from pydantic import Field

from skyinfra.errors import InvalidField, NotSupported
from skyinfra.providers.base import Request
from skyinfra.providers.over_ssh import MachineCloud
from skyinfra.providers.selected import SelectedMachines

# https://docs.digitalocean.com/products/droplets/how-to/tag/
_TAG = re.compile(r"[A-Za-z0-9_:-]{1,255}")


class DigitalOcean(MachineCloud):
    """Droplets of DigitalOcean, by Terraform's digitalocean/digitalocean and the token in DIGITALOCEAN_TOKEN.

    region: such as ``nyc2``. instance_types: one size, such as ``gpu-h100x1-80gb``; empty takes the cheapest that
    carries the accelerator. image: a slug or the id of an image of your own; it has Python 3.8 or later. vpc_id: a VPC
    of yours in the region; without, the pool has one of its own. registered_key: whether the account has ssh_public_key
    already, which DigitalOcean takes once. ssh_public_key, key_file, allow_cidrs, wait_seconds: see `MachineCloud`.
    GPUs of AMD are partitioned by DigitalOcean when it makes the droplet: ``partition="DPX"`` or ``"SPX"``.
    """

    kind: ClassVar[str] = "digitalocean"

    region: str = Field(default="nyc2", pattern=r"^[a-z]{3}\d$")
    vpc_id: str | None = None
    registered_key: bool = False

    def check(self, request: Request) -> None:
        """Raises a `DeclarationError` for labels that cannot be tags, and as of every such cloud."""
        super().check(request)
        for key, value in request.labels.items():
            if not _TAG.fullmatch(f"{key}:{value}"):
                why = "become tags KEY:VALUE of letters, digits and - _ :, at most 255 characters"
                raise InvalidField(why, field=f"labels[{key}]", given=value)

    def check_selection(self, selected: SelectedMachines) -> None:
        """Raises `NotSupported` for partitions of AMD that DigitalOcean does not make."""
        mode, modes = _mode(selected), self.data.machines["partition_modes"]
        if mode and mode not in modes:
            made = [
                f'partition="{part}", memory_mode="{memory}"' for part, memory in (each.split("_") for each in modes)
            ]
            raise NotSupported(
                "DigitalOcean does not partition GPUs so",
                field="accelerator",
                given=str(selected.accelerator),
                hint=f"It makes: {'; '.join(made)}.",
            )

    def inputs(self, selected: SelectedMachines, head: str | None) -> dict[str, object]:
        """Returns the inputs of modules/digitalocean besides those of every such cloud."""
        mode = _mode(selected)
        return {
            "vpc_id": self.vpc_id,
            "ssh_key_id": _fingerprint(self.ssh_public_key or "") if self.registered_key else None,
            "gpu_partition_mode": f"PARTITION_MODE_{mode}" if mode else None,
        }


def _mode(selected: SelectedMachines) -> str | None:
    """The partition mode of AMD's GPUs as DigitalOcean names it, such as DPX_NPS2; None where none is declared."""
    accelerator = selected.accelerator
    return f"{accelerator.partition}_{accelerator.memory_mode}" if accelerator and accelerator.partition else None


def _fingerprint(key: str) -> str:
    """Returns the MD5 of a public key, by which DigitalOcean knows it."""
    digest = hashlib.md5(base64.b64decode(key.split()[1]), usedforsecurity=False).hexdigest()
    return ":".join(digest[index : index + 2] for index in range(0, 32, 2))
