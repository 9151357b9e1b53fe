"""Errors of projects, dependencies, Terraform and clouds. See `skyinfra.errors` for the whole tree."""

from __future__ import annotations

from skyinfra.errors.base import SkyinfraError


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


class StateNotSaved(TerraformFailed):
    """Terraform did its work and could not save the state; the message names the file that holds it."""


class DiskTooSmall(TerraformError):
    """A declared disk is smaller than that of nodes that run, and no volume shrinks; nothing was changed."""


class RunsElsewhere(TerraformError):
    """Terraform runs in HCP Terraform, where the nodes of this machine cannot be started."""


class CloudRefused(TerraformFailed):
    """The cloud refused a step. Terraform's state has the resources created before; the same command goes on."""


class CapacityUnavailable(CloudRefused):
    """The cloud has no such machine available now."""


class CloudCredentialsRefused(CloudRefused):
    """The cloud's credentials are missing, have expired or are not accepted."""


class CloudPermissionDenied(CloudRefused):
    """The cloud's credentials lack a permission; the message names it."""


class CloudThrottled(CloudRefused):
    """The cloud throttles the account's requests, after retries too."""


class QuotaExceeded(CloudRefused):
    """The account's quota does not allow it."""


class SpotPriceTooLow(CloudRefused):
    """The spot price is above the maximum that is declared."""


class DeployInterrupted(TerraformError):
    """A deploy or destroy was interrupted; the state is usable and the message names the next command."""

    exit_code = 130
