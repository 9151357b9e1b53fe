"""Oracle Cloud: virtual and bare machines with GPUs."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from skyinfra.declared import OUTPUT
from skyinfra.errors import InvalidField, NotSupported
from skyinfra.providers.base import Request
from skyinfra.providers.over_ssh import MachineCloud
from skyinfra.providers.selected import SelectedMachines


class OCI(MachineCloud):
    """Machines of Oracle Cloud Infrastructure, by Terraform's oracle/oci and the credentials that it finds.

    region: such as ``us-phoenix-1``. compartment_id: its OCID. availability_domain: such as ``Uocm:PHX-AD-1``.
    image: the OCID of an image in the region; for an accelerator, one with its driver. ssh_user: the user of the image,
    ``ubuntu`` or ``opc``. instance_types: one shape, such as ``VM.GPU.A10.1``; of one with sizes
    ``VM.Standard.E5.Flex/OCPUS/GB``. ssh_public_key, key_file, allow_cidrs, wait_seconds: see `MachineCloud`.
    """

    kind: ClassVar[str] = "oci"

    region: str = Field(default="us-phoenix-1", pattern=r"^[a-z]+(-[a-z]+)+-\d$")
    compartment_id: Annotated[str, Field(pattern=r"^ocid1\.(compartment|tenancy)\."), OUTPUT]
    availability_domain: str = Field(pattern=r"^\S+-AD-\d$")
    image: Annotated[str | None, Field(pattern=r"^ocid1\.image\."), OUTPUT] = None
    ssh_user: Literal["ubuntu", "opc"] = "ubuntu"

    def check(self, request: Request) -> None:
        """Raises a `DeclarationError` for no image, and as of every such cloud."""
        super().check(request)
        if self.image is None:
            raise InvalidField(
                "is needed: images of Oracle Cloud have another OCID in each region",
                field="provider.image",
                hint="Ubuntu's: oci compute image list --operating-system 'Canonical Ubuntu'; for GPUs one with their "
                "driver.",
            )

    def check_selection(self, selected: SelectedMachines) -> None:
        """Raises `NotSupported` for a bare machine that is to be preemptible."""
        if selected.price_note.startswith("spot") and selected.machine_types[0].startswith("BM."):
            raise NotSupported(
                "Oracle Cloud has no preemptible bare machines",
                field="spot",
                given=selected.machine_types[0],
                hint="Leave spot out, or declare an accelerator of a virtual machine (VM.GPU.A10.1).",
            )

    def inputs(self, selected: SelectedMachines, head: str | None) -> dict[str, object]:
        """Returns the fields that the module takes as they are, and whether it makes a compute cluster."""
        return super().inputs(selected, head) | {"rdma": selected.fabric is not None or None}
