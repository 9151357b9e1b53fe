"""Plugins: the older way to say what a pool's accelerators are to be.

``plugins=[sky.plugins.mig(profile="3g.40gb")]`` says the same as ``accelerator="H100/3g.40gb"``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from skyinfra._errors import InvalidField
from skyinfra.accelerators import Accelerator
from skyinfra.mig import PerGpu


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


def mig(profile: str | Mapping[str, int] | Sequence[str] | PerGpu) -> Mig:
    """The layout of the pool's GPUs: a profile that fills each, a list, a mapping, or ``sky.mig.per_gpu(...)``."""
    return Mig(profile)
