"""Errors of projects, dependencies, Terraform and clouds. See `skyinfra.errors` for the whole tree."""

from __future__ import annotations

from skyinfra.errors.base import SkyinfraError


class ProjectError(SkyinfraError):
    """Something is wrong with the project folder or its program."""


class ProjectNotFound(ProjectError):
    """There is no cdktf.json here or above.

    Cure: change into the folder of the project, use `skyinfra -C DIR`, or make one with `skyinfra init`.
    """

    exit_code = 2


class AppFailed(ProjectError):
    """The program that declares the stacks failed.

    Cure: mend the program at the line that the message shows; with SKYINFRA_DEBUG=1 all that it printed is there.
    """


class StackNotFound(ProjectError):
    """The project has no stack of that name.

    Cure: take one of the stacks that the message lists.
    """

    exit_code = 2


class PoolNotFound(ProjectError):
    """The stack has no pool of that name.

    Cure: take one of the pools that the message lists.
    """

    exit_code = 2


class MissingDependency(SkyinfraError):
    """An extra or a program that is needed is not installed; the message holds the install command.

    Cure: run the install command of the message.
    """


class PackingFailed(SkyinfraError):
    """The solver ended without an answer.

    Cure: ask for less, or for fewer kinds of machines.
    """


class TerraformError(SkyinfraError):
    """Terraform could not do its work."""


class TerraformNotFound(TerraformError):
    """No terraform program was found.

    Cure: `pip install "skyinfra[toolchain]"`, for Linux on x86-64 with glibc 2.35 or later and for macOS 14 or later;
    elsewhere put `terraform` or `tofu` on PATH.
    """


class TerraformFailed(TerraformError):
    """Terraform ended with an error; the message is Terraform's own.

    Cure: mend what the message says, and deploy again: what was made before is in the state.

    diagnostics: the address and the text of each error that Terraform reported.
    """

    diagnostics: tuple[tuple[str, str], ...] = ()


class StateLocked(TerraformFailed):
    """Another run of Terraform holds the state, so this one has changed nothing.

    Cure: wait for the other run; if it has died, run the command that the message names.
    """


class StateNotSaved(TerraformFailed):
    """Terraform did its work and could not save the state; the message names the file that holds it.

    Cure: push the file with `terraform state push`, before anything else changes the stack.
    """


class DiskTooSmall(TerraformError):
    """A declared disk is smaller than that of nodes that run, and no volume shrinks; nothing was changed.

    Cure: declare the size that the nodes have, or destroy the pool first.
    """


class VolumeProtected(TerraformError):
    """A destroy, or a changed declaration, would remove a volume with the data on it; nothing was changed.

    Cure: leave it as it is declared; or declare it with ``protect=False``, deploy, and remove it then.
    """


class PlaceChanged(TerraformError):
    """A deployed pool is declared in another region, project or subscription, or, of nodes that stand on own machines,
    with another provider: Terraform would not see its machines and forget them; nothing was changed.

    Cure: destroy it first, or declare the pool in the other place under another name: that makes the one and
    destroys the other.
    """


class StrayMachine(TerraformError):
    """A deploy that did not end has made a machine that no state has, and another one would be made beside it.

    Cure: end the machine in its cloud, as the message says, and deploy again.
    """


class RunsElsewhere(TerraformError):
    """Terraform runs in HCP Terraform, where the nodes of this machine cannot be started.

    Cure: set the workspace's execution mode to local, or take a provider of a cloud.
    """


class CloudRefused(TerraformFailed):
    """The cloud refused a step. Terraform's state has the resources created before; the same command goes on.

    Cure: mend what the message says, and run the same command again.
    """


class CapacityUnavailable(CloudRefused):
    """The cloud has no such machine available now.

    Cure: name more types, zones or regions, take `spot=False` or a reservation, or try later.
    """


class CloudCredentialsRefused(CloudRefused):
    """The cloud's credentials are missing, have expired or are not accepted.

    Cure: log in anew; `skyinfra preflight` says which credentials are used.
    """


class WrongAccount(CloudRefused):
    """The credentials are of another account than the one that is declared, or that the machines of the stack are
    in: Terraform would not see them and forget them.

    Cure: use credentials of the account that the message names, or destroy the stack with them first.
    """


class CloudPermissionDenied(CloudRefused):
    """The cloud's credentials lack a permission; the message names it.

    Cure: add the permission; on AWS `skyinfra iam` prints all that a deploy needs.
    """


class CloudThrottled(CloudRefused):
    """The cloud throttles the account's requests, after retries too.

    Cure: wait some minutes, and run the same command again.
    """


class QuotaExceeded(CloudRefused):
    """The account's quota does not allow it.

    Cure: ask the provider for more, or take a smaller type or another region; `skyinfra preflight` shows
    quotas.
    """


class SpotPriceTooLow(CloudRefused):
    """The spot price is above the maximum that is declared.

    Cure: raise `spot_max_price`, or leave it out.
    """


class DeployInterrupted(TerraformError):
    """A deploy or destroy was interrupted; the message says whether the state is saved, and names the next command
    where something was changed.

    Cure: run the command that the message names.
    """

    exit_code = 130
