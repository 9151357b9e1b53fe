"""Errors of declarations. See `skyinfra.errors` for the whole tree."""

from __future__ import annotations

from skyinfra.errors.base import SkyinfraError


class DeclarationError(SkyinfraError):
    """The declaration is invalid; nothing was created."""

    exit_code = 2


class InvalidField(DeclarationError):
    """A declared field is unknown, missing, or holds the wrong kind of value."""


class UnknownAccelerator(DeclarationError):
    """No accelerator of that name is in the catalog."""


class InvalidAccelerator(DeclarationError):
    """The accelerator exists, but not with that memory, form factor, count or spelling."""


class UnknownModel(DeclarationError):
    """No model of that name is known here, so that nothing says how much memory it needs."""


class LayoutError(DeclarationError):
    """Something is wrong with a MIG layout."""


class InvalidLayout(LayoutError):
    """The layout cannot be read."""


class UnknownProfile(LayoutError):
    """The GPU has no profile of that name."""


class LayoutDoesNotFit(LayoutError):
    """The profiles exist on this GPU but have no placement together."""


class DriverTooOld(LayoutError):
    """The driver is too old for the layout; the message names the version that offers it."""


class MigNotSupported(LayoutError):
    """The accelerator cannot be partitioned, or its MIG geometry is not known."""


class InvalidPartition(DeclarationError):
    """The GPU has no partition or memory mode of that name, or the two do not go together on it."""


class PartitionNotSupported(DeclarationError):
    """The accelerator has no partition modes, or they are not known."""


class InvalidDemand(DeclarationError):
    """The demand for partitions cannot be read."""


class DemandDoesNotFit(DeclarationError):
    """The demand is on offer, but does not fit on as few machines."""


class ConcurrencyMismatch(DeclarationError):
    """Worker.concurrency disagrees with the number of slots that the layout gives."""


class DuplicatePool(DeclarationError):
    """Two pools of one stack have the same name."""


class NotOffered(DeclarationError):
    """The provider has no machine for the declaration."""


class InvalidInclude(DeclarationError):
    """A path to sync does not exist, is too large, holds a secret, or leads elsewhere; nothing was sent."""


class NotSupported(DeclarationError):
    """The provider, or this version, does not support the declaration."""
