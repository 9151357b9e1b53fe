"""Images of a provider: which one its machines start with, and whether its driver serves their accelerators."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Literal

from skyinfra.accelerators import Accelerator, drivers
from skyinfra.declared import Declaration
from skyinfra.errors import NotSupported
from skyinfra.mig.drivers import version

# In place of a vendor, for machines without accelerators.
PLAIN = "cpu"


class Image(Declaration):
    """A row of ``[[images]]``: the image of one family of machines. The first row that fits a machine counts.

    machines: pattern of the machine types; empty for all. vendor: of their accelerators; "cpu" without. arch: of the
    machines. image: by the name that the provider takes. kind: of the driver. driver: its branch or version; None where
    no source says it. listed: whether the source is the provider's list of the image for these machines, or runs it on
    them: then it serves them, though no source says its driver. why: the reason that there is no image for them.
    """

    machines: str = ""
    vendor: Literal["cpu", "nvidia", "amd", "aws", "google"]
    arch: Literal["x86_64", "arm64"] = "x86_64"
    image: str = ""
    kind: Literal["open", "proprietary", "unnamed modules", "grid", "rocm", "neuron", "tpu", "host"] | None = None
    driver: str | None = None
    listed: bool = False
    why: str = ""
    source: str
    date: str

    def fits(self, machine_type: str, vendor: str, arch: str) -> bool:
        """Returns whether it is the row of such a machine."""
        return (self.vendor, self.arch) == (vendor, arch) and re.match(self.machines, machine_type) is not None

    def unfit(self, accelerator: Accelerator, *, share: float = 1.0) -> str | None:
        """The reason why it does not serve *accelerator*, of which a machine has *share*; None where it does."""
        if self.why:
            return self.why
        needed = drivers.needs(accelerator, share=share)
        if self.kind == drivers.HOST or (self.listed and share == 1 and self.driver is None):
            return None
        if self.kind not in needed.kinds and not (self.listed and share == 1):
            of = "a share of a GPU" if share < 1 else f"{accelerator.name} ({accelerator.architecture})"
            return f"{of} needs a driver with {_kinds(needed.kinds)}; {self.image} has one with {_kinds([self.kind])}"
        if self.kind == drivers.ROCM and needed.least is None and not self.listed:
            return f"no source says which ROCm serves {accelerator.name}"
        if self.driver is None:
            return None if needed.least is None else f"the driver of {self.image} is not known here"
        has = version(self.driver)
        # Of an image whose branch alone is known, the branch is compared: the node examines the rest.
        if needed.least is not None and has < version(needed.least)[: len(has)]:
            return f"{accelerator} needs driver {needed.least} or later; {self.image} has {self.driver}"
        if needed.last is not None and has[0] > version(needed.last)[0]:
            return f"driver {needed.last} is the last for {accelerator.name}; {self.image} has {self.driver}"
        return None


def image_of(
    images: Sequence[Image], machine_type: str, arch: str, accelerator: Accelerator | None, *, share: float = 1.0
) -> Image | str:
    """Returns the image for such machines with the driver of *accelerator*, or the reason why none is known."""
    vendor = accelerator.vendor if accelerator else PLAIN
    found = next((row for row in images if row.fits(machine_type, vendor, arch)), None)
    if found is None:
        return f"no image with the driver of {accelerator.name} is known" if accelerator else "no image is known"
    return (found.unfit(accelerator, share=share) if accelerator else found.why or None) or found


def no_image(why: str, *, field: str) -> NotSupported:
    """Returns the error for a machine without an image. field: that takes an image of one's own."""
    return NotSupported(why, field=field, hint=f"Give an image that has it: {field.rpartition('.')[2]}=...")


def _kinds(kinds: Sequence[str | None]) -> str:
    """Kinds of a driver in words, without GRID for whole devices, which it serves besides."""
    words = {
        drivers.OPEN: "the open kernel modules",
        drivers.PROPRIETARY: "the proprietary kernel modules",
        drivers.UNNAMED: "kernel modules of which no source says whether they are open",
        drivers.GRID: "support for virtual GPUs (GRID)",
        drivers.ROCM: "ROCm",
        drivers.NEURON: "support for Neuron devices",
        drivers.TPU: "support for TPUs",
    }
    said = [kind for kind in kinds if kind in words and (kind != drivers.GRID or len(kinds) == 1)]
    return " or ".join(words[kind] for kind in said) or "none that is known here"
