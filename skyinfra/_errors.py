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

from collections.abc import Iterable
from difflib import get_close_matches


class SkyinfraError(Exception):
    """Base of every error that skyinfra raises on purpose.

    message: what is wrong, in one sentence.
    field: path of the declared field or the file it is about, such as ``pools[0].accelerator.mig``.
    given: what was found there; shown with ``repr``. Never a secret.
    hint: what would work.
    """

    exit_code = 1

    def __init__(
        self, message: str, *, field: str | None = None, given: object = None, hint: str | None = None
    ) -> None:
        self.message = message
        self.field = field
        self.given = given
        self.hint = hint
        super().__init__(message)

    def __str__(self) -> str:
        text = f"{self.field}: {self.message}" if self.field else self.message
        if self.given is not None:
            text += f" (given: {self.given!r})"
        if self.hint:
            text += f"\n{self.hint}"
        return text

    def at(self, field: str) -> SkyinfraError:
        """The same error with *field* in front of its path, for a caller that knows more of the way."""
        separator = "" if not self.field or self.field.startswith("[") else "."
        self.field = f"{field}{separator}{self.field or ''}"
        return self

    def __reduce__(self) -> tuple[object, ...]:
        return _rebuild, (type(self), self.message, self.field, self.given, self.hint, dict(self.__dict__))


def _rebuild(
    cls: type[SkyinfraError], message: str, field: str | None, given: object, hint: str | None, state: dict[str, object]
) -> SkyinfraError:
    error = cls.__new__(cls, message)
    SkyinfraError.__init__(error, message, field=field, given=given, hint=hint)
    error.__dict__.update(state)
    return error


def did_you_mean(given: str, known: Iterable[str], *, limit: int = 3) -> str:
    """A hint with the *known* names nearest to *given*, or the empty string where none is near."""
    by_key = {name.lower(): name for name in known}
    near = [by_key[key] for key in get_close_matches(given.lower(), by_key, n=limit, cutoff=0.5)]
    if not near:
        return ""
    return f"Did you mean {' or '.join(near)}?"


class DeclarationError(SkyinfraError):
    """What was declared cannot be; nothing was created."""

    exit_code = 2


class InvalidField(DeclarationError):
    """A declared field is unknown, missing, or holds the wrong kind of value."""


class UnknownAccelerator(DeclarationError):
    """No accelerator of that name is in the catalog."""


class InvalidAccelerator(DeclarationError):
    """The accelerator exists, but not with that memory, form factor, count or spelling."""


class LayoutError(DeclarationError):
    """Something is wrong with a MIG layout."""


class InvalidLayout(LayoutError):
    """The layout cannot be read."""


class UnknownProfile(LayoutError):
    """The GPU has no profile of that name."""


class LayoutDoesNotFit(LayoutError):
    """The profiles exist on this GPU but have no placement together."""


class DriverTooOld(LayoutError):
    """The driver is older than the one that offers the layout; the message says which is needed."""


class MigNotSupported(LayoutError):
    """The accelerator cannot be partitioned, or its MIG geometry is not known."""


class InvalidPartition(DeclarationError):
    """The GPU has no partition or memory mode of that name, or the two do not go together on it."""


class PartitionNotSupported(DeclarationError):
    """The accelerator has no partition modes, or they are not known."""


class InvalidDemand(DeclarationError):
    """The demand for partitions cannot be read."""


class DemandDoesNotFit(DeclarationError):
    """What is wanted is on offer, but does not fit on as few machines."""


class ConcurrencyMismatch(DeclarationError):
    """Worker.concurrency disagrees with the number of slots that the layout gives."""


class DuplicatePool(DeclarationError):
    """Two pools of one stack have the same name."""


class NotOffered(DeclarationError):
    """The provider has no machine for what is declared."""


class InvalidInclude(DeclarationError):
    """What is to be synced is not there, is too large, holds a secret, or leads elsewhere; nothing of it was sent."""


class NotSupported(DeclarationError):
    """The provider, or this version, cannot do what is declared."""


class ProjectError(SkyinfraError):
    """Something is wrong with the project folder or its program."""


class ProjectNotFound(ProjectError):
    """There is no cdktf.json here or above."""

    exit_code = 2


class AppFailed(ProjectError):
    """The program that declares the stacks failed."""


class StackNotFound(ProjectError):
    """The project has no stack of that name."""

    exit_code = 2


class PoolNotFound(ProjectError):
    """The stack has no pool of that name."""

    exit_code = 2


class MissingDependency(SkyinfraError):
    """An extra or a program that is needed is not installed; the message holds the install command."""


class PackingFailed(SkyinfraError):
    """The solver ended without an answer."""


class TerraformError(SkyinfraError):
    """Terraform could not do its work."""


class TerraformNotFound(TerraformError):
    """No terraform program was found."""


class TerraformFailed(TerraformError):
    """Terraform ended with an error; the message is Terraform's own.

    diagnostics: the address and the text of each error that Terraform reported.
    """

    diagnostics: tuple[tuple[str, str], ...] = ()


class StateLocked(TerraformFailed):
    """Another run of Terraform holds the state, so this one has changed nothing."""


class CloudRefused(TerraformFailed):
    """The cloud refused a step. What was created before is in Terraform's state, and the same command goes on."""


class CapacityUnavailable(CloudRefused):
    """The cloud has no such machine to give now."""


class CloudCredentialsRefused(CloudRefused):
    """The cloud's credentials are missing, have expired or are not accepted."""


class CloudPermissionDenied(CloudRefused):
    """The cloud's credentials may not do it; the message names the permission."""


class CloudThrottled(CloudRefused):
    """The cloud throttles the account's requests, and went on doing so."""


class QuotaExceeded(CloudRefused):
    """The account's quota does not allow it."""


class SpotPriceTooLow(CloudRefused):
    """The spot price is above the maximum that is declared."""


class DeployInterrupted(TerraformError):
    """A deploy or destroy was interrupted; the state is usable and the message says what to run next."""

    exit_code = 130


class FleetError(SkyinfraError):
    """A fleet cannot be used."""


class FleetNotDeployed(FleetError):
    """No fleet is deployed under that name."""


class FleetUnreachable(FleetError):
    """The fleet is deployed, but its head does not answer."""


class BootFailed(FleetUnreachable):
    """A step of the head's first boot failed; the message carries the step and the end of its output."""


class CredentialsRefused(FleetError):
    """The head does not accept the fleet secret of this client."""


class VersionMismatch(FleetError):
    """The fleet runs another Python or another version of Dask than the client; tasks would not survive the way."""


class InvalidManifest(FleetError):
    """A manifest that cannot be read."""


class NodeError(SkyinfraError):
    """A node cannot do what it was configured to do."""


class InvalidNodeConfig(NodeError):
    """A node configuration that cannot be read."""

    exit_code = 2


class AcceleratorMissing(NodeError):
    """What was declared is not on this node."""


class PartitionFailed(NodeError):
    """The driver refused a step towards the layout."""


class PartitionBusy(PartitionFailed):
    """Processes use what would have to go; the message lists them."""


class NodeRebooting(NodeError):
    """The node reboots, because the driver activates a pending MIG mode in no other way."""


class PortTaken(NodeError):
    """Another process listens on the port."""


class StateDirectoryError(NodeError):
    """The node's directory is full or cannot be written."""


class NodeFailed(NodeError):
    """A node did not come up; the message carries its log."""


class TaskError(SkyinfraError):
    """A task could not be run. What a task itself raises arrives as it is."""


class TaskFailed(TaskError):
    """The task raised an exception that cannot be shipped; the message carries its text and traceback."""


class TaskNotPicklable(TaskError):
    """The function, its arguments or its result cannot be shipped."""


class TaskAttemptsExceeded(TaskError):
    """The task ended its worker process several times and is not tried again."""


class TaskTooLarge(TaskError):
    """The call of a task, or its result, is larger than can be shipped."""


class TaskTimeout(TaskError):
    """The task ran for longer than it may and was stopped. Waiting in vain for a result raises TimeoutError instead."""


class ScriptFailed(TaskError):
    """The script of a job ended with an exit code other than 0, or by a signal.

    code: the exit code, negative for the signal that ended it.
    """

    code: int = 1


class GangFailed(TaskError):
    """A rank of a gang ended without an exception of its own: with an exit code, by a signal, or with its slot.

    rank: the first one that did. code: its exit code, negative for a signal; None where its slot was lost.
    """

    rank: int | None = None
    code: int | None = None


class JobNotFound(TaskError):
    """The head keeps no job of that name."""


class JobNameTaken(TaskError):
    """A job of that name is there already."""


class JobCancelled(TaskError):
    """The job was cancelled; there is no result."""


class SlotLost(TaskError):
    """The slot that the task was bound to is gone."""


class TaskInputsLost(TaskError):
    """What the task needs is gone from the head, and is another on the client now: it has to be sent anew."""


class NotSynced(TaskError):
    """The path is not among what was synced."""


class NotInTask(TaskError):
    """The instance was asked for outside of a task."""


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
