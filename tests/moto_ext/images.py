"""The Deep Learning images: AMIs that EC2 lists, and the SSM parameters that name them.

The paths are those of facts on AWS's own images; the ids are made up, one for each path and the same in every region.
"""

from __future__ import annotations

import hashlib
from typing import Any

from moto.core.utils import utcnow
from moto.ec2.models.amis import Ami, AmiBackend
from moto.ssm.models import Parameter, ParameterDict

ROOT_GB = 75
_BASE = "/aws/service/deeplearning/ami/{arch}/base-oss-nvidia-driver-gpu-{system}/latest/ami-id"
_NEURON = "/aws/service/neuron/dlami/{kind}/ubuntu-24.04/latest/image_id"
_UBUNTU = "/aws/service/canonical/ubuntu/server/24.04/stable/current/{arch}/hvm/ebs-gp3/ami-id"

# Path of the SSM parameter, architecture, name of the root volume.
IMAGES = [
    *((_BASE.format(arch="x86_64", system=s), "x86_64", "/dev/sda1") for s in ("ubuntu-22.04", "ubuntu-24.04")),
    (_BASE.format(arch="x86_64", system="amazon-linux-2023"), "x86_64", "/dev/xvda"),
    (_BASE.format(arch="arm64", system="ubuntu-24.04"), "arm64", "/dev/sda1"),
    *((_NEURON.format(kind=k), "x86_64", "/dev/sda1") for k in ("base", "multi-framework")),
    (_UBUNTU.format(arch="amd64"), "x86_64", "/dev/sda1"),
    (_UBUNTU.format(arch="arm64"), "arm64", "/dev/sda1"),
]


def image_id(path: str, release: str = "") -> str:
    """The id of the image that the parameter *path* names; another one for each *release*."""
    return f"ami-{hashlib.sha256((path + release).encode()).hexdigest()[:17]}"


def _add_image(backend: Any, path: str, architecture: str, root: str, release: str = "") -> str:
    ami = image_id(path, release)
    backend.amis[ami] = Ami(
        backend,
        ami,
        name=f"{path}{release}",
        owner_id="898082745236",
        owner_alias="amazon",
        public=True,
        virtualization_type="hvm",
        hypervisor="xen",
        architecture=architecture,
        root_device_name=root,
        root_device_type="ebs",
        creation_date=utcnow(),
        region_name=f"{backend.region_name}a",
    )
    return ami


def install() -> None:
    load_amis, check_loading = AmiBackend._load_amis, ParameterDict._check_loading_status

    def _load_amis(self: Any) -> None:
        load_amis(self)
        for path, architecture, root in IMAGES:
            _add_image(self, path, architecture, root)

    def _check_loading_status(self: Any, key: str) -> None:
        check_loading(self, key)
        if getattr(self, "images_loaded", False):
            return
        self.images_loaded = True
        for path, _, _ in IMAGES:
            dict.__setitem__(self, path, [_parameter(self, path)])

    AmiBackend._load_amis = _load_amis
    ParameterDict._check_loading_status = _check_loading_status


def _parameter(parameters: Any, path: str) -> Parameter:
    return Parameter(
        account_id=parameters.account_id,
        name=path,
        value=image_id(path),
        parameter_type="String",
        description=None,
        allowed_pattern=None,
        keyid=None,
        last_modified_date=utcnow(),
        version=1,
        data_type="aws:ec2:image",
    )
