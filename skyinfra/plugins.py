"""Plugins of a pool: the older spelling of layouts, and the environment of frameworks on every node.

``plugins=[sky.plugins.mig(profile="3g.40gb")]`` says the same as ``accelerator="H100/3g.40gb"``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from skyinfra.accelerators import Accelerator
from skyinfra.errors import InvalidField
from skyinfra.mig import PerGpu
from skyinfra.protocol.gang import DEFAULTS, Framework


@dataclass(frozen=True)
class Mig:
    """The layout that `mig` declares."""

    profile: str | Mapping[str, int] | Sequence[str] | PerGpu

    def apply(self, accelerator: Accelerator) -> Accelerator:
        """*accelerator* with this layout. Raises `InvalidField` where it has another one already."""
        if accelerator.mig is not None and accelerator.mig != accelerator.with_(mig=self.profile).mig:
            raise InvalidField(
                f"the layout is declared twice: {accelerator} and the mig plugin differ",
                field="plugins",
                given=self.profile,
                hint="Declare it in one place.",
            )
        return accelerator.with_(mig=self.profile)


@dataclass(frozen=True)
class Environment:
    """The variables that `torch` and `jax` declare. What the pool's image declares stands above them."""

    framework: Framework

    @property
    def variables(self) -> dict[str, str]:
        """The environment variables, by name."""
        return dict(DEFAULTS[self.framework])


def mig(profile: str | Mapping[str, int] | Sequence[str] | PerGpu) -> Mig:
    """The layout of the pool's GPUs: a profile that fills each, a list, a mapping, or ``sky.mig.per_gpu(...)``."""
    return Mig(profile)


def torch() -> Environment:
    """Sets PyTorch's environment variables for every task: a process in which NCCL fails or hangs ends.

    Ranks of ``pool.launch(..., framework="torch")`` have that anyway.
    """
    return Environment("torch")


def jax() -> Environment:
    """Sets JAX's environment variables for every task: memory of the device is taken as it is needed.

    Ranks of ``pool.launch(..., framework="jax")`` have that anyway.
    """
    return Environment("jax")
