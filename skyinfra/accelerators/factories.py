"""A factory for every accelerator of the catalog, made from the data."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import cache
from typing import Protocol, Unpack

from skyinfra.accelerators import catalog
from skyinfra.accelerators.accelerator import Accelerator, Options, Scalar
from skyinfra.errors import InvalidAccelerator, UnknownAccelerator, did_you_mean
from skyinfra.mig import Declared, PerGpu


class Factory(Protocol):
    """Makes an accelerator from keyword arguments; Options explains each."""

    def __call__(
        self,
        *,
        count: int | None = None,
        memory: str | int | None = None,
        form_factor: str | None = None,
        mig: Declared | PerGpu | None = None,
        partition: str | None = None,
        memory_mode: str | None = None,
        exact: bool = False,
    ) -> Accelerator: ...


@cache
def factory_names() -> Mapping[str, str]:
    """Maps the names of the factories ("RTX_4090", "TPUv5p_8") to the names and aliases in the catalog."""
    return {re.sub(r"[^A-Za-z0-9]+", "_", name): name for name in (*catalog.names(), *catalog.aliases())}


@cache
def factory(identifier: str, owner: str = "skyinfra.accelerators", vendor: str | None = None) -> Factory:
    """The factory of that name. Raises AttributeError for *owner* with the nearest names, of one vendor if given."""
    name = factory_names().get(identifier)
    if name is None or vendor not in (None, _vendor(name)):
        known = identifiers(vendor)
        near = did_you_mean(identifier, known) or "dir() lists the names."
        raise AttributeError(f"{owner} has no accelerator {identifier!r}. {near}")

    def make(**options: Unpack[Options]) -> Accelerator:
        return Accelerator(name, **options)

    spelling = catalog.read_name(name)
    row = catalog.choose(spelling.name, spelling.memory_gb, spelling.form_factor)
    make.__name__ = make.__qualname__ = identifier
    make.__doc__ = f"{row.name}, {row.memory_gb} GB unless memory= or form_factor= say otherwise."
    return make


@cache
def identifiers(vendor: str | None = None) -> tuple[str, ...]:
    """Returns the names of all factories, or of one vendor's."""
    return tuple(sorted(key for key, name in factory_names().items() if vendor in (None, _vendor(name))))


def Custom(  # noqa: N802 - stands beside the factories
    name: str,
    *,
    memory: str | int,
    count: int | None = None,
    vendor: str = "custom",
    form_factor: str | None = None,
    mig: Declared | PerGpu | None = None,
    mig_model: str | None = None,
    **metadata: Scalar,
) -> Accelerator:
    """Returns an accelerator that is not in the catalog.

    memory: of one device, as 48, "48GB" or "48 GB". vendor, mig_model: for mig they are "nvidia" and a
    key of mig.models(). metadata: anything else worth knowing, such as cuda_min="12.0". Raises as Accelerator does.
    """
    return Accelerator.of_custom(
        name,
        memory=memory,
        count=count,
        vendor=vendor,
        form_factor=form_factor,
        mig=mig,
        mig_model=mig_model,
        metadata=metadata,
    )


class Literals:
    """The accelerators of one vendor as they are by default: NVIDIA.H100."""

    def __init__(self, vendor: str, label: str) -> None:
        self._vendor = vendor
        self._label = label

    def __getattr__(self, name: str) -> Accelerator:
        if name.startswith("__"):
            raise AttributeError(name)
        return factory(name, self._label, self._vendor)()

    def __dir__(self) -> list[str]:
        return list(identifiers(self._vendor))


class Factories:
    """The factories of one vendor: AcceleratorSpec.NVIDIA.H100(count=4)."""

    def __init__(self, vendor: str, label: str) -> None:
        self._vendor = vendor
        self._label = f"AcceleratorSpec.{label}"

    def __getattr__(self, name: str) -> Factory:
        if name.startswith("__"):
            raise AttributeError(name)
        return factory(name, self._label, self._vendor)

    def __dir__(self) -> list[str]:
        own = [name for name in vars(type(self)) if not name.startswith("_")]
        return sorted({*identifiers(self._vendor), *own})


class _AWS(Factories):
    def Trainium(self, version: int = 1, **options: Unpack[Options]) -> Accelerator:  # noqa: N802
        """AWS Trainium of a generation. Raises UnknownAccelerator for an unknown one."""
        return Accelerator(f"Trainium{version}", **options)

    def Inferentia(self, version: int = 1, **options: Unpack[Options]) -> Accelerator:  # noqa: N802
        """AWS Inferentia of a generation. Raises UnknownAccelerator for an unknown one."""
        return Accelerator(f"Inferentia{version}", **options)


class _Google(Factories):
    def TPU(self, version: str, slice: int | None = None, **options: Unpack[Options]) -> Accelerator:  # noqa: N802
        """Returns a TPU chip, or the slice of that number: TPU("v5p", slice=8) is v5p-8, four chips.

        Raises UnknownAccelerator or InvalidAccelerator for what does not exist.
        """
        return Accelerator(f"TPU{version}" if slice is None else f"TPU{version}-{slice}", **options)


class AcceleratorSpec:
    """Factories by vendor: AcceleratorSpec.NVIDIA.H100(count=4), AcceleratorSpec.AWS.Trainium(version=2)."""

    NVIDIA = Factories("nvidia", "NVIDIA")
    AMD = Factories("amd", "AMD")
    AWS = _AWS("aws", "AWS")
    Google = _Google("google", "Google")
    Intel = Factories("intel", "Intel")


NVIDIA = Literals("nvidia", "NVIDIA")


def is_nvidia(value: str | Accelerator) -> bool:
    """Returns whether it is an NVIDIA GPU; False for a name that is not in the catalog."""
    return _is(value, lambda name, vendor: vendor == "nvidia")


def is_amd(value: str | Accelerator) -> bool:
    """Returns whether it is an AMD GPU; False for a name that is not in the catalog."""
    return _is(value, lambda name, vendor: vendor == "amd")


def is_trainium(value: str | Accelerator) -> bool:
    """Returns whether it is AWS Trainium of any generation; False for a name that is not in the catalog."""
    return _is(value, lambda name, vendor: vendor == "aws" and name.startswith("Trainium"))


def is_tpu(value: str | Accelerator) -> bool:
    """Returns whether it is a Google TPU, chip or slice; False for a name that is not in the catalog."""
    return _is(value, lambda name, vendor: vendor == "google")


def _is(value: str | Accelerator, test: Callable[[str, str], bool]) -> bool:
    if isinstance(value, Accelerator):
        return test(value.name, value.vendor)
    try:
        name = catalog.read_name(re.split("[!:/]", value)[0]).name
    except (UnknownAccelerator, InvalidAccelerator):
        return False
    return test(name, catalog.variants(name)[0].vendor)


def _vendor(name: str) -> str:
    return catalog.variants(catalog.read_name(name).name)[0].vendor
