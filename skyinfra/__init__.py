"""skyinfra: infrastructure as code for accelerator fleets.

The public names are imported on first use, so that ``import skyinfra`` costs milliseconds and starts no Node, no
Dask and no boto3.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from skyinfra._errors import (
    AcceleratorMissing,
    AppFailed,
    BootFailed,
    CapacityUnavailable,
    CloudCredentialsRefused,
    CloudPermissionDenied,
    CloudRefused,
    CloudThrottled,
    ConcurrencyMismatch,
    CredentialsRefused,
    DeclarationError,
    DemandDoesNotFit,
    DeployInterrupted,
    DriverTooOld,
    DuplicatePool,
    FleetError,
    FleetNotDeployed,
    FleetUnreachable,
    InvalidAccelerator,
    InvalidDemand,
    InvalidField,
    InvalidLayout,
    InvalidManifest,
    InvalidNodeConfig,
    InvalidPartition,
    LayoutDoesNotFit,
    LayoutError,
    MigNotSupported,
    MissingDependency,
    NodeError,
    NodeFailed,
    NodeRebooting,
    NotInTask,
    NotOffered,
    NotSupported,
    PackingFailed,
    PartitionBusy,
    PartitionFailed,
    PartitionNotSupported,
    PoolNotFound,
    PortTaken,
    ProjectError,
    ProjectNotFound,
    QuotaExceeded,
    SkyinfraError,
    SlotLost,
    SpotPriceTooLow,
    StackNotFound,
    StateDirectoryError,
    StateLocked,
    TaskAttemptsExceeded,
    TaskError,
    TaskFailed,
    TaskNotPicklable,
    TerraformError,
    TerraformFailed,
    TerraformNotFound,
    UnknownAccelerator,
    UnknownProfile,
    VersionMismatch,
)

if TYPE_CHECKING:  # what editors and type checkers see behind _LAZY
    from skyinfra import accelerators, mig, offers, plugins
    from skyinfra.accelerators import NVIDIA, Accelerator, AcceleratorSpec, is_amd, is_nvidia, is_tpu, is_trainium
    from skyinfra.backends import S3, HCPTerraform, LocalState
    from skyinfra.client import Future, Gather, Pool, Task, compute, connect, gather
    from skyinfra.pool import ComputePool, Image, Worker
    from skyinfra.protocol.checkpoints import SpotCheckpointer
    from skyinfra.protocol.instance import InstanceInfo, current_accelerator, instance_info
    from skyinfra.protocol.interruption import Interruption, interrupted, interruption, on_interrupt
    from skyinfra.protocol.manifest import Manifest
    from skyinfra.providers import AWS, CapacityBlock, CapacityReservation, Local, VastAI
    from skyinfra.stack import FleetStack

__version__ = "0.1.0"

# public name -> module that defines it, or None where the name is a module itself
_LAZY: dict[str, str | None] = {
    "AWS": "skyinfra.providers",
    "CapacityBlock": "skyinfra.providers",
    "CapacityReservation": "skyinfra.providers",
    "Accelerator": "skyinfra.accelerators",
    "AcceleratorSpec": "skyinfra.accelerators",
    "ComputePool": "skyinfra.pool",
    "FleetStack": "skyinfra.stack",
    "Future": "skyinfra.client",
    "Gather": "skyinfra.client",
    "HCPTerraform": "skyinfra.backends",
    "Image": "skyinfra.pool",
    "InstanceInfo": "skyinfra.protocol.instance",
    "Interruption": "skyinfra.protocol.interruption",
    "Local": "skyinfra.providers",
    "LocalState": "skyinfra.backends",
    "Manifest": "skyinfra.protocol.manifest",
    "NVIDIA": "skyinfra.accelerators",
    "Pool": "skyinfra.client",
    "S3": "skyinfra.backends",
    "SpotCheckpointer": "skyinfra.protocol.checkpoints",
    "Task": "skyinfra.client",
    "VastAI": "skyinfra.providers",
    "Worker": "skyinfra.pool",
    "accelerators": None,
    "compute": "skyinfra.client",
    "connect": "skyinfra.client",
    "current_accelerator": "skyinfra.protocol.instance",
    "gather": "skyinfra.client",
    "instance_info": "skyinfra.protocol.instance",
    "interrupted": "skyinfra.protocol.interruption",
    "interruption": "skyinfra.protocol.interruption",
    "is_amd": "skyinfra.accelerators",
    "is_nvidia": "skyinfra.accelerators",
    "is_tpu": "skyinfra.accelerators",
    "is_trainium": "skyinfra.accelerators",
    "mig": None,
    "offers": None,
    "on_interrupt": "skyinfra.protocol.interruption",
    "plugins": None,
}

__all__ = [
    "AWS",
    "CapacityBlock",
    "CapacityReservation",
    "Accelerator",
    "AcceleratorMissing",
    "AcceleratorSpec",
    "AppFailed",
    "BootFailed",
    "CapacityUnavailable",
    "CloudCredentialsRefused",
    "CloudPermissionDenied",
    "CloudRefused",
    "CloudThrottled",
    "ComputePool",
    "ConcurrencyMismatch",
    "CredentialsRefused",
    "DeclarationError",
    "DemandDoesNotFit",
    "DeployInterrupted",
    "DriverTooOld",
    "DuplicatePool",
    "FleetError",
    "FleetNotDeployed",
    "FleetStack",
    "FleetUnreachable",
    "Future",
    "Gather",
    "HCPTerraform",
    "Image",
    "InstanceInfo",
    "Interruption",
    "InvalidAccelerator",
    "InvalidDemand",
    "InvalidField",
    "InvalidLayout",
    "InvalidManifest",
    "InvalidNodeConfig",
    "InvalidPartition",
    "LayoutDoesNotFit",
    "LayoutError",
    "Local",
    "LocalState",
    "Manifest",
    "MigNotSupported",
    "MissingDependency",
    "NVIDIA",
    "NodeError",
    "NodeFailed",
    "NodeRebooting",
    "NotInTask",
    "NotOffered",
    "NotSupported",
    "PackingFailed",
    "PartitionBusy",
    "PartitionFailed",
    "PartitionNotSupported",
    "Pool",
    "PoolNotFound",
    "PortTaken",
    "ProjectError",
    "ProjectNotFound",
    "QuotaExceeded",
    "S3",
    "SkyinfraError",
    "SlotLost",
    "SpotCheckpointer",
    "SpotPriceTooLow",
    "StackNotFound",
    "StateDirectoryError",
    "StateLocked",
    "Task",
    "TaskAttemptsExceeded",
    "TaskError",
    "TaskFailed",
    "TaskNotPicklable",
    "TerraformError",
    "TerraformFailed",
    "TerraformNotFound",
    "UnknownAccelerator",
    "UnknownProfile",
    "VastAI",
    "VersionMismatch",
    "Worker",
    "__version__",
    "accelerators",
    "compute",
    "connect",
    "current_accelerator",
    "gather",
    "instance_info",
    "interrupted",
    "interruption",
    "is_amd",
    "is_nvidia",
    "is_tpu",
    "is_trainium",
    "mig",
    "offers",
    "on_interrupt",
    "plugins",
]


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'skyinfra' has no attribute {name!r}")
    module = _LAZY[name]
    if module is None:
        value: Any = importlib.import_module(f"skyinfra.{name}")
    else:
        value = getattr(importlib.import_module(module), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
