"""Clouds whose machines are set up over SSH, by the one who applies: no bucket, and no user data with the runner."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

from pydantic import Field, model_validator

from skyinfra.errors import InvalidField, NotSupported
from skyinfra.providers.base import Request, Selection
from skyinfra.providers.cloud import CloudProvider
from skyinfra.providers.data import TLS, TerraformProvider


class MachineCloud(CloudProvider):
    """A cloud whose machines are set up over SSH.

    ssh_public_key: of who deploys, registered at the cloud; `ssh` or its agent finds its private half, or it stands in
    key_file. allow_cidrs: networks that may reach port 22 of the nodes and the head's scheduler; whoever deploys stands
    in one of them. wait_seconds: how long a node may take until every slot is ready.
    """

    # Whether the size of the disk can be declared.
    sized_disk: ClassVar[bool] = True

    image: str | None = None
    key_file: str | None = None
    wait_seconds: int = Field(default=1800, ge=1)

    @model_validator(mode="after")
    def _check_access(self) -> MachineCloud:
        name, traits = type(self).__name__, self.data.traits
        if self.ssh_public_key is None:
            raise InvalidField(
                f"is needed: the nodes of {self.called} are set up over SSH",
                field=f"{name}.ssh_public_key",
                hint='Such as ssh_public_key=pathlib.Path("~/.ssh/id_ed25519.pub").expanduser().read_text(); make one '
                "with: ssh-keygen -t ed25519",
            )
        if traits.firewall and not self.allow_cidrs:
            raise InvalidField(
                f"is needed: the nodes of {self.called} are set up over SSH, and their firewall lets nobody else in",
                field=f"{name}.allow_cidrs",
                hint='The network of the machine that deploys, and of the clients: allow_cidrs=["203.0.113.7/32"].',
            )
        if not traits.firewall and self.allow_cidrs:
            raise NotSupported(
                f"{self.called} has no firewall that a deploy can set",
                field=f"{name}.allow_cidrs",
                hint="Leave it out. The scheduler lets in who has the secret of the fleet, by mutual TLS.",
            )
        return self

    def terraform(self) -> tuple[TerraformProvider, ...]:
        """The provider, with what stands in its block, and that of the host keys where the machines are given them."""
        config = {name: getattr(self, name) for name in self.data.terraform["config"]}
        own = self.data.terraform_provider(**config)
        return (own, TLS) if self.data.traits.host_keys == "given" else (own,)

    def check(self, request: Request) -> None:
        """Raises a `DeclarationError` for several machine types and for a disk that cannot be chosen."""
        if len(self.instance_types) > 1 and not self.data.traits.groups:
            raise NotSupported(
                f"{self.called} has no machine groups, which try one type after the other",
                field="provider.instance_types",
                given=", ".join(self.instance_types),
                hint="Name the first of them alone.",
            )
        if not self.sized_disk:
            why = f"the disk of a machine of {self.called} comes with its type"
            request.refuse("disk_gb", why=why, place=f"sky.{type(self).__name__}()")

    def select(self, request: Request) -> Selection:
        """The machines for *request*, as of every cloud, and how they are reached."""
        found = super().select(request)
        own = {"region": self.region, "key_file": self.key_file, "wait_seconds": self.wait_seconds}
        found.inputs.update({name: value for name, value in own.items() if value is not None})
        kept = {"known_hosts": ".skyinfra/known_hosts"} if self.data.traits.host_keys == "first contact" else {}
        return replace(found, project_paths=kept)
