"""skyinfra: infrastructure as code for accelerator fleets.

The public names are imported on first use, so that ``import skyinfra`` costs milliseconds and starts no Node, no
Dask and no boto3.
"""

from __future__ import annotations

import contextlib
import importlib
import os
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
    GangFailed,
    InvalidAccelerator,
    InvalidDemand,
    InvalidField,
    InvalidInclude,
    InvalidLayout,
    InvalidManifest,
    InvalidNodeConfig,
    InvalidPartition,
    JobCancelled,
    JobNameTaken,
    JobNotFound,
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
    NotSynced,
    PackingFailed,
    PartitionBusy,
    PartitionFailed,
    PartitionNotSupported,
    PoolNotFound,
    PortTaken,
    ProjectError,
    ProjectNotFound,
    QuotaExceeded,
    RunsElsewhere,
    ScriptFailed,
    SkyinfraError,
    SlotLost,
    SpotPriceTooLow,
    StackNotFound,
    StateDirectoryError,
    StateLocked,
    TaskAttemptsExceeded,
    TaskError,
    TaskFailed,
    TaskInputsLost,
    TaskNotPicklable,
    TaskTimeout,
    TaskTooLarge,
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
    from skyinfra.client import (
        AsyncJob,
        AsyncPool,
        Future,
        GangWarning,
        Gather,
        Job,
        Pool,
        Task,
        cls,
        compute,
        connect,
        connect_async,
        gather,
    )
    from skyinfra.pool import ComputePool, Image, Worker
    from skyinfra.protocol.checkpoints import SpotCheckpointer
    from skyinfra.protocol.gang import Gang, gang
    from skyinfra.protocol.instance import InstanceInfo, current_accelerator, instance_info
    from skyinfra.protocol.interruption import Interruption, interrupted, interruption, on_interrupt
    from skyinfra.protocol.jobs import JobInfo
    from skyinfra.protocol.manifest import Manifest
    from skyinfra.protocol.stateful import enter, exit
    from skyinfra.protocol.telling import progress
    from skyinfra.protocol.views import files, synced
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
    "Gang": "skyinfra.protocol.gang",
    "GangWarning": "skyinfra.client",
    "Gather": "skyinfra.client",
    "HCPTerraform": "skyinfra.backends",
    "Image": "skyinfra.pool",
    "InstanceInfo": "skyinfra.protocol.instance",
    "Interruption": "skyinfra.protocol.interruption",
    "Job": "skyinfra.client",
    "JobInfo": "skyinfra.protocol.jobs",
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
    "AsyncJob": "skyinfra.client",
    "AsyncPool": "skyinfra.client",
    "accelerators": None,
    "cls": "skyinfra.client",
    "connect_async": "skyinfra.client",
    "enter": "skyinfra.protocol.stateful",
    "exit": "skyinfra.protocol.stateful",
    "progress": "skyinfra.protocol.telling",
    "compute": "skyinfra.client",
    "connect": "skyinfra.client",
    "current_accelerator": "skyinfra.protocol.instance",
    "files": "skyinfra.protocol.views",
    "gang": "skyinfra.protocol.gang",
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
    "synced": "skyinfra.protocol.views",
}

__all__ = [
    "AWS",
    "Accelerator",
    "AcceleratorMissing",
    "AcceleratorSpec",
    "AppFailed",
    "AsyncJob",
    "AsyncPool",
    "BootFailed",
    "CapacityBlock",
    "CapacityReservation",
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
    "GangFailed",
    "Gather",
    "HCPTerraform",
    "Image",
    "InstanceInfo",
    "Interruption",
    "InvalidAccelerator",
    "InvalidDemand",
    "InvalidField",
    "InvalidInclude",
    "InvalidLayout",
    "InvalidManifest",
    "InvalidNodeConfig",
    "InvalidPartition",
    "Job",
    "JobCancelled",
    "JobInfo",
    "JobNameTaken",
    "JobNotFound",
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
    "NotSynced",
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
    "RunsElsewhere",
    "S3",
    "ScriptFailed",
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
    "TaskInputsLost",
    "TaskNotPicklable",
    "TaskTimeout",
    "TaskTooLarge",
    "TerraformError",
    "TerraformFailed",
    "TerraformNotFound",
    "UnknownAccelerator",
    "UnknownProfile",
    "VastAI",
    "VersionMismatch",
    "Worker",
    "Gang",
    "GangWarning",
    "__version__",
    "accelerators",
    "cls",
    "compute",
    "connect",
    "connect_async",
    "current_accelerator",
    "enter",
    "exit",
    "files",
    "gang",
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
    "progress",
    "synced",
]


_ahead: Any = None
# cdktf, cdktn and `skyinfra synth` set it for the programs that they run.
if "CDKTF_CONTEXT_JSON" in os.environ:
    with contextlib.suppress(ModuleNotFoundError):  # no node has it
        _ahead = importlib.import_module("skyinfra._ahead")
        _ahead.start()


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'skyinfra' has no attribute {name!r}")
    module = _LAZY[name]
    if _ahead is not None:
        _ahead.wait()
    if module is None:
        value: Any = importlib.import_module(f"skyinfra.{name}")
    else:
        value = getattr(importlib.import_module(module), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
