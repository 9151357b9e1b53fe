"""Nebius AI Cloud: GPU machines."""

from __future__ import annotations

from typing import Annotated, ClassVar

from pydantic import Field

from skyinfra.declared import OUTPUT
from skyinfra.errors import InvalidField
from skyinfra.providers.base import Request
from skyinfra.providers.over_ssh import MachineCloud
from skyinfra.providers.selected import SelectedMachines


class Nebius(MachineCloud):
    """Machines of Nebius AI Cloud, by Terraform's nebius/nebius and the service account of the environment.

    project_id: such as ``project-e00abc``, which is of one region. subnet_id: of that project. region: of the project,
    such as ``eu-north1``. instance_types: one ``PLATFORM/PRESET``; empty takes the cheapest that carries the
    accelerator. image: another family of images. infiniband_fabric: of a pool with ``rdma=True``, such as the one of
    your capacity block, ``fabric-6``; None takes the first that is known for the machine. ssh_public_key, key_file,
    allow_cidrs, wait_seconds: see `MachineCloud`. NB_SA_ID, NB_AUTHKEY_PUBLIC_ID and NB_AUTHKEY_PRIVATE_PATH name the
    service account.
    """

    kind: ClassVar[str] = "nebius"

    project_id: Annotated[str, Field(pattern=r"^project-[a-z0-9-]+$"), OUTPUT]
    subnet_id: Annotated[str, Field(pattern=r"^vpcsubnet-[a-z0-9-]+$"), OUTPUT]
    region: str = Field(default="eu-north1", pattern=r"^[a-z]+-[a-z]+\d$")
    infiniband_fabric: str | None = Field(default=None, pattern=r"^[a-z][a-z0-9-]*$")

    @property
    def names_fabric(self) -> bool:
        """Whether the declaration names the fabric that connects the nodes."""
        return self.infiniband_fabric is not None

    def check(self, request: Request) -> None:
        """Raises `InvalidField` for a fabric without RDMA, and as of every such cloud."""
        super().check(request)
        if self.infiniband_fabric and not request.rdma:
            raise InvalidField(
                "is of a pool whose nodes it connects",
                field="provider.infiniband_fabric",
                given=self.infiniband_fabric,
                hint="Declare the pool with rdma=True, or leave it out.",
            )

    def check_selection(self, selected: SelectedMachines) -> None:
        """Raises `InvalidField` for a fabric that is known to be of another region, or of other machines."""
        super().check_selection(selected)
        own = self.infiniband_fabric
        for row in self.data.fabrics if selected.fabric else ():
            for region in (region for region, names in row.names.items() if own in names):
                if (row, region) != (selected.fabric, self.region):
                    known = selected.fabric.names.get(self.region, ()) if selected.fabric else ()
                    raise InvalidField(
                        f"{own} connects other machines: {row.machines} of {region}",
                        field="provider.infiniband_fabric",
                        given=own,
                        hint=f"Of {selected.machine_types[0]} in {self.region}: {', '.join(known) or 'none is known'}.",
                    )

    def inputs(self, selected: SelectedMachines, head: str | None) -> dict[str, object]:
        """Returns the fields that the module takes as they are, and the fabric of a pool with RDMA."""
        own = super().inputs(selected, head)
        if selected.fabric is None:
            return own
        return own | {"infiniband_fabric": self.infiniband_fabric or selected.fabric.names[self.region][0]}
