"""Asks the driver of the slot's device whether it still answers for it, where a task raised what may come of that.

The texts are those of PyTorch ("CUDA error: ...", "HIP error: ..."), CuPy ("cudaError...") and XLA ("CUDA_ERROR_...").
After some errors "any further CUDA work will return the same error. To continue using CUDA, the process must be
terminated and relaunched": docs.nvidia.com/cuda/cuda-runtime-api, cudaError_t 700, 702, 710, 714 to 719.
"""

from __future__ import annotations

import errno
import re

from skyinfra.errors import SkyinfraError
from skyinfra.protocol import pickles
from skyinfra.protocol.instance import InstanceInfo, instance_info

_SAYS = re.compile(
    r"\b(CUDA|HIP|NVML)( runtime| driver)? error\b|\b(cuda|hip)Error[A-Z]|\b(CUDA|HIP|NVML)_ERROR_", re.I
)
_STAYS = re.compile(
    r"illegal (memory access|address|instruction)|misaligned.?address|invalid.?(address.?space|pc|program counter)"
    r"|(unspecified )?launch.?(failure|failed|time(d )?out)|device-side assert|hardware.?stack"
    r"|error_?(illegal_?(address|instruction)|launch_?(failed|failure|timeout)|assert)",
    re.I,
)
_MEMORY = re.compile(r"out of memory|OUT_OF_MEMORY|MemoryAllocation", re.I)
_LONG, _DEEP = 10_000, 10


def words(error: BaseException) -> str | None:
    """Returns the text of *error*, or of one before it, that is of a device, and not of its memory; None without."""
    seen: BaseException | None = error
    for _ in range(_DEEP):
        if seen is None:
            break
        text = (pickles.said(seen) or "")[:_LONG]
        if _SAYS.search(text) and not _MEMORY.search(text):
            return text
        seen = seen.__cause__ or seen.__context__
    return None


def stays(text: str) -> bool:
    """Returns whether every later call to the device in this process meets the error of `words` too."""
    return _STAYS.search(text) is not None


def check(slot: InstanceInfo | None = None) -> None:
    """Raises OSError where the driver of NVIDIA answers with an error for the device of *slot*, by default this one."""
    try:
        slot = slot or instance_info()
    except SkyinfraError:  # outside of a slot
        return
    if slot.simulated or slot.uuid is None or slot.visible is None or slot.visible[0] != "CUDA_VISIBLE_DEVICES":
        return
    import pynvml

    try:
        pynvml.nvmlInit()
        try:
            pynvml.nvmlDeviceGetMemoryInfo(pynvml.nvmlDeviceGetHandleByUUID(slot.uuid))
        finally:
            pynvml.nvmlShutdown()
    except (pynvml.NVMLError_LibraryNotFound, pynvml.NVMLError_NotSupported, pynvml.NVMLError_NoPermission):
        return
    except pynvml.NVMLError as error:
        raise OSError(errno.EIO, f"the driver answers for its device: {error}", slot.uuid) from None
