"""Errors of declarations. See `skyinfra.errors` for the whole tree."""

from __future__ import annotations

from skyinfra.errors.base import SkyinfraError


class DeclarationError(SkyinfraError):
    """The declaration is invalid; nothing was created."""

    exit_code = 2


class InvalidField(DeclarationError):
    """A declared field is unknown, missing, or holds the wrong kind of value.

    Cure: correct the field that the message names; it lists the fields and kinds that there are.
    """


class UnknownAccelerator(DeclarationError):
    """No accelerator of that name is in the catalog.

    Cure: take one of the names that the message proposes, or declare `sky.accelerators.Custom(...)`.
    """


class InvalidAccelerator(DeclarationError):
    """The accelerator exists, but not with that memory, form factor, count or spelling.

    Cure: take a memory, form factor or count that the message lists.
    """


class UnknownModel(DeclarationError):
    """No model of that name is known here, so that nothing says how much memory it needs.

    Cure: give its size: `skyinfra recommend --params`, with `--layers` and `--hidden`.
    """


class LayoutError(DeclarationError):
    """Something is wrong with a MIG layout."""


class InvalidLayout(LayoutError):
    """The layout cannot be read.

    Cure: write it as `3g.40gb+1g.10gb*2`; `skyinfra mig show GPU LAYOUT` reads it.
    """


class UnknownProfile(LayoutError):
    """The GPU has no profile of that name.

    Cure: take one of `skyinfra mig profiles GPU`.
    """


class LayoutDoesNotFit(LayoutError):
    """The profiles exist on this GPU but have no placement together.

    Cure: take one of the layouts that the message proposes; `skyinfra mig layouts GPU` lists all.
    """


class DriverTooOld(LayoutError):
    """The driver is too old for the layout; the message names the version that offers it.

    Cure: declare an image with a newer driver, or another layout.
    """


class MigNotSupported(LayoutError):
    """The accelerator cannot be partitioned, or its MIG geometry is not known.

    Cure: leave the layout out, or take a GPU that `skyinfra mig profiles` knows.
    """


class InvalidPartition(DeclarationError):
    """The GPU has no partition or memory mode of that name, or the two do not go together on it.

    Cure: take one of the modes that the message lists for this GPU.
    """


class PartitionNotSupported(DeclarationError):
    """The accelerator has no partition modes, or they are not known.

    Cure: leave the mode out.
    """


class InvalidDemand(DeclarationError):
    """The demand for partitions cannot be read.

    Cure: write it as `1g.10gb*20, 3g.40gb*4`.
    """


class DemandDoesNotFit(DeclarationError):
    """The demand is on offer, but does not fit on as few machines.

    Cure: allow more machines, other providers or regions, or ask for less.
    """


class ConcurrencyMismatch(DeclarationError):
    """Worker.concurrency disagrees with the number of slots that the layout gives.

    Cure: leave `concurrency` out, or give the number of slots that the message names.
    """


class DuplicatePool(DeclarationError):
    """Two pools of one stack have the same name.

    Cure: give one of them another name.
    """


class NotOffered(DeclarationError):
    """The provider has no machine for the declaration.

    Cure: take another count, region or provider; the message names the nearest offers.
    """


class InvalidInclude(DeclarationError):
    """A path to sync does not exist, is too large, holds a secret, or leads elsewhere, or Git does not say what it
    ignores there; nothing was sent.

    Cure: name a path that exists, and leave out what is large or secret with `excludes` or `.skyinfraignore`.
    """


class NotSupported(DeclarationError):
    """The provider, or this version, does not support the declaration.

    Cure: leave the field out, or take a provider that has it: see the table of providers.
    """
