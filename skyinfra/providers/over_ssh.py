"""Clouds whose machines are set up over SSH, by the one who applies: no bucket, and no user data with the runner."""

from __future__ import annotations

from dataclasses import replace

from pydantic import Field, model_validator

from skyinfra.errors import InvalidField, NotSupported
from skyinfra.providers.base import Request, Selection
from skyinfra.providers.cloud import CloudProvider
from skyinfra.providers.data import TLS, Output, TerraformProvider
from skyinfra.providers.selected import SelectedMachines


class MachineCloud(CloudProvider):
    """A cloud whose machines are set up over SSH. What one adds is its fields; the rest stands in its data file.

    ssh_public_key: of who deploys, registered at the cloud; `ssh` or its agent finds its private half, or it stands in
    key_file. allow_cidrs: networks that may reach port 22 of the nodes and the head's scheduler; whoever deploys stands
    in one of them. wait_seconds: how long a node may take until every slot is ready.
    """

    image: Output = None
    key_file: str | None = None
    wait_seconds: int = Field(default=1800, ge=1)

    @model_validator(mode="after")
    def _check_access(self) -> MachineCloud:
        name = type(self).__name__
        if self.ssh_public_key is None:
            raise InvalidField(
                f"is needed: the nodes of {self.called} are set up over SSH",
                field=f"{name}.ssh_public_key",
                hint='Such as ssh_public_key=pathlib.Path("~/.ssh/id_ed25519.pub").expanduser().read_text(); make one '
                "with: ssh-keygen -t ed25519",
            )
        if self.data.takes("allow_cidrs") and not self.allow_cidrs:
            raise InvalidField(
                f"is needed: the nodes of {self.called} are set up over SSH, and their firewall lets nobody else in",
                field=f"{name}.allow_cidrs",
                hint='The network of the machine that deploys, and of the clients: allow_cidrs=["203.0.113.7/32"].',
            )
        return self

    def terraform(self) -> tuple[TerraformProvider, ...]:
        """The provider, with what stands in its block, and that of the host keys where the machines are given them."""
        config = {name: getattr(self, name) for name in self.data.terraform["config"]}
        own = self.data.terraform_provider(**config)
        return (own, TLS) if self.data.traits.host_keys == "given" else (own,)

    def check(self, request: Request) -> None:
        """Raises a `DeclarationError` for several machine types, and for a disk that is too small or too large."""
        if len(self.instance_types) > 1 and not self.data.traits.groups:
            raise NotSupported(
                f"{self.called} has no machine groups, which try one type after the other",
                field="provider.instance_types",
                given=", ".join(self.instance_types),
                hint="Name the first of them alone.",
            )
        least, most = self.data.machines.get("disk_gb", (0, 0))
        if request.disk_gb is not None and not least <= request.disk_gb <= (most or request.disk_gb):
            says = f"{least} to {most}" if most else f"at least {least}"
            raise InvalidField(says, field="disk_gb", given=request.disk_gb)

    def check_selection(self, selected: SelectedMachines) -> None:
        """Raises `NotSupported` for what is sold otherwise than as an instance, or by a name that is not known."""
        for offer in selected.offers:
            if not self.data.deploys(offer.machine_type):
                raise NotSupported(
                    f"{offer.machine_type} is no {self.data.machines['deployed_as']} that this version knows",
                    field="accelerator",
                    hint=f"`skyinfra offers --provider {self.seller}` lists them.",
                )

    def inputs(self, selected: SelectedMachines, head: str | None) -> dict[str, object]:
        """Returns the fields that the module takes as they are, but those that are not given."""
        return {name: getattr(self, name) or None for name in self.data.terraform.get("inputs", ())}

    def select(self, request: Request) -> Selection:
        """Returns the machines for *request*, as of every cloud, and how they are reached."""
        found = super().select(request)
        own = {"region": self.region, "key_file": self.key_file, "wait_seconds": self.wait_seconds}
        found.inputs.update({name: value for name, value in own.items() if value is not None})
        kept = {"known_hosts": ".skyinfra/known_hosts"} if self.data.traits.host_keys == "first contact" else {}
        return replace(found, project_paths=kept)
