"""Every exception of skyinfra: one class per cause, one tree.

    SkyinfraError
    ├── DeclarationError              what was declared cannot be (exit code 2)
    │   ├── InvalidField              a field is unknown, missing or of the wrong kind
    │   ├── UnknownAccelerator        no accelerator of that name
    │   ├── InvalidAccelerator        a name that exists with a memory, form factor or count that does not
    │   ├── LayoutError
    │   │   ├── InvalidLayout         the layout cannot be read
    │   │   ├── UnknownProfile        the GPU has no such profile
    │   │   ├── LayoutDoesNotFit      the profiles exist but have no placement together
    │   │   ├── DriverTooOld          the driver does not offer the layout
    │   │   └── MigNotSupported       the accelerator cannot be partitioned
    │   ├── InvalidDemand             the demand for partitions cannot be read
    │   ├── DemandDoesNotFit          the partitions are on offer, but not on as few machines
    │   ├── InvalidPartition          no such AMD partition or memory mode, or two that do not go together
    │   ├── PartitionNotSupported     the accelerator has no AMD partition modes
    │   ├── ConcurrencyMismatch       Worker.concurrency against the layout
    │   ├── DuplicatePool             two pools of one name in one stack
    │   ├── NotOffered                the provider has no machine for the declaration
    │   ├── InvalidInclude            what is to be synced is not there, is too large, holds a secret or leads elsewhere
    │   └── NotSupported              the provider cannot do what is declared
    ├── ProjectError
    │   ├── ProjectNotFound           no cdktf.json here
    │   ├── AppFailed                 the program that declares the stacks failed
    │   ├── StackNotFound             no stack of that name
    │   └── PoolNotFound              no pool of that name in the stack
    ├── MissingDependency             an extra or a program is not installed
    ├── PackingFailed                 the solver ended without an answer
    ├── TerraformError
    │   ├── TerraformNotFound         no terraform program
    │   ├── TerraformFailed           terraform ended with an error
    │   │   ├── StateLocked           another run holds the state
    │   │   └── CloudRefused          the cloud refused a step; nothing is lost from the state
    │   │       ├── CapacityUnavailable       it has no such machine now
    │   │       ├── CloudCredentialsRefused   credentials that are missing, expired or not accepted
    │   │       ├── CloudPermissionDenied     the credentials may not do it
    │   │       ├── CloudThrottled            too many requests
    │   │       ├── QuotaExceeded             the account's quota does not allow it
    │   │       └── SpotPriceTooLow           the spot price is above the declared maximum
    │   ├── RunsElsewhere             nodes of this machine, and Terraform runs in HCP Terraform
    │   └── DeployInterrupted         interrupted; the state is usable
    ├── FleetError
    │   ├── FleetNotDeployed          nothing deployed under that name
    │   ├── FleetUnreachable          deployed, but its head does not answer
    │   │   └── BootFailed            its first boot failed; carries the step and the end of its output
    │   ├── CredentialsRefused        the head does not accept this fleet secret
    │   ├── VersionMismatch           the fleet runs another Python or Dask than the client
    │   └── InvalidManifest           a manifest that cannot be read
    ├── NodeError
    │   ├── InvalidNodeConfig         a node configuration that cannot be read
    │   ├── AcceleratorMissing        declared, but not on this node
    │   ├── PartitionFailed           the driver refused the layout
    │   │   └── PartitionBusy         processes use what would have to go
    │   ├── NodeRebooting             the node reboots to activate a pending MIG mode
    │   ├── PortTaken                 another process listens there
    │   ├── StateDirectoryError       the node's directory is full or cannot be written
    │   └── NodeFailed                a node did not come up; carries its log
    └── TaskError
        ├── TaskFailed                the task raised an exception that cannot be shipped
        ├── TaskNotPicklable          the function or its arguments cannot be shipped
        ├── TaskTooLarge              the call or its result is larger than can be shipped
        ├── TaskTimeout               the task ran for longer than it may and was stopped
        ├── TaskAttemptsExceeded      the task took its worker process down again and again
        ├── ScriptFailed              a script ended with an exit code other than 0, or by a signal
        ├── GangFailed                a rank ended without an exception of its own: exit code, signal, lost slot
        ├── JobNotFound               the head keeps no job of that name
        ├── JobNameTaken              a job of that name is there already
        ├── JobCancelled              the job was cancelled; there is no result
        ├── SlotLost                  the slot is gone
        ├── TaskInputsLost            what the task needs is gone from the head, and is another here now
        ├── NotSynced                 the path is not among what was synced
        └── NotInTask                 asked for the instance outside of a task

A message says where, what was given, and what would work. This module travels to nodes with the runner:
standard library only.
"""

from __future__ import annotations

from skyinfra._errors.base import (
    SkyinfraError,
)
from skyinfra._errors.base import (
    did_you_mean as did_you_mean,
)
from skyinfra._errors.declarations import (
    ConcurrencyMismatch,
    DeclarationError,
    DemandDoesNotFit,
    DriverTooOld,
    DuplicatePool,
    InvalidAccelerator,
    InvalidDemand,
    InvalidField,
    InvalidInclude,
    InvalidLayout,
    InvalidPartition,
    LayoutDoesNotFit,
    LayoutError,
    MigNotSupported,
    NotOffered,
    NotSupported,
    PartitionNotSupported,
    UnknownAccelerator,
    UnknownProfile,
)
from skyinfra._errors.fleets import (
    AcceleratorMissing,
    BootFailed,
    CredentialsRefused,
    FleetError,
    FleetNotDeployed,
    FleetUnreachable,
    InvalidManifest,
    InvalidNodeConfig,
    NodeError,
    NodeFailed,
    NodeRebooting,
    PartitionBusy,
    PartitionFailed,
    PortTaken,
    StateDirectoryError,
    VersionMismatch,
)
from skyinfra._errors.tasks import (
    GangFailed,
    JobCancelled,
    JobNameTaken,
    JobNotFound,
    NotInTask,
    NotSynced,
    ScriptFailed,
    SlotLost,
    TaskAttemptsExceeded,
    TaskError,
    TaskFailed,
    TaskInputsLost,
    TaskNotPicklable,
    TaskTimeout,
    TaskTooLarge,
)
from skyinfra._errors.tools import (
    AppFailed,
    CapacityUnavailable,
    CloudCredentialsRefused,
    CloudPermissionDenied,
    CloudRefused,
    CloudThrottled,
    DeployInterrupted,
    MissingDependency,
    PackingFailed,
    PoolNotFound,
    ProjectError,
    ProjectNotFound,
    QuotaExceeded,
    RunsElsewhere,
    SpotPriceTooLow,
    StackNotFound,
    StateLocked,
    TerraformError,
    TerraformFailed,
    TerraformNotFound,
)

__all__ = [
    "AcceleratorMissing",
    "AppFailed",
    "BootFailed",
    "CapacityUnavailable",
    "CloudCredentialsRefused",
    "CloudPermissionDenied",
    "CloudRefused",
    "CloudThrottled",
    "ConcurrencyMismatch",
    "CredentialsRefused",
    "DeclarationError",
    "DemandDoesNotFit",
    "DeployInterrupted",
    "DriverTooOld",
    "DuplicatePool",
    "FleetError",
    "FleetNotDeployed",
    "FleetUnreachable",
    "GangFailed",
    "InvalidAccelerator",
    "InvalidDemand",
    "InvalidField",
    "InvalidInclude",
    "InvalidLayout",
    "InvalidManifest",
    "InvalidNodeConfig",
    "InvalidPartition",
    "JobCancelled",
    "JobNameTaken",
    "JobNotFound",
    "LayoutDoesNotFit",
    "LayoutError",
    "MigNotSupported",
    "MissingDependency",
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
    "PoolNotFound",
    "PortTaken",
    "ProjectError",
    "ProjectNotFound",
    "QuotaExceeded",
    "RunsElsewhere",
    "ScriptFailed",
    "SkyinfraError",
    "SlotLost",
    "SpotPriceTooLow",
    "StackNotFound",
    "StateDirectoryError",
    "StateLocked",
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
    "VersionMismatch",
]

# Users see and pickle these as skyinfra.NAME.
for _name in __all__:
    globals()[_name].__module__ = "skyinfra"
