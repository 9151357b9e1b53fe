"""Asks the driver of a slot's device whether it still answers for it, and whether the GPU is to be reset or replaced.

What is to be done with a GPU the driver itself concludes from its Xid errors, those of ECC and NVLink included: it says
that in the field behind Xid 154, "GPU Recovery Action Changed" (docs.nvidia.com/deploy/xid-errors, the catalog of
2025-10-29). No error is counted here, and nobody reads the kernel's log, which only root may.

The texts are those of PyTorch ("CUDA error: ...", "HIP error: ..."), CuPy ("cudaError...") and XLA ("CUDA_ERROR_...").
After some errors "any further CUDA work will return the same error. To continue using CUDA, the process must be
terminated and relaunched": docs.nvidia.com/cuda/cuda-runtime-api, cudaError_t 700, 702, 710, 714 to 719.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import re
from collections.abc import Callable, Iterable
from typing import Any

from skyinfra.errors import SkyinfraError
from skyinfra.node import processes
from skyinfra.protocol import pickles
from skyinfra.protocol.instance import InstanceInfo, instance_info

# Where the files of devices begin, by the drivers of the vendors.
FILES = ("/dev/nvidia", "/dev/kfd", "/dev/dri/render", "/dev/neuron", "/dev/accel", "/dev/vfio", "/dev/hl")
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
# NVML_FI_DEV_GET_GPU_RECOVERY_ACTION and nvmlDeviceGpuRecoveryAction_t of nvml.h 13.5; old pynvml does not name them.
RECOVERY = 230
_ACTIONS = {
    1: "a reset of the GPU",
    2: "a reboot of the machine",
    3: "the end of all traffic between GPUs, for NVLink",
    4: "a reset of the GPU, which has lost a part of its memory or of its instances",
    5: "the recovery of its IMEX domain",
    6: "a reset of the GPU's PCIe bus",
    7: "a reboot of the machine",
}
_FAILED_ROW = "a row of the GPU's memory could not be remapped: replace the machine"


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
    """Raises OSError where the driver of NVIDIA answers with an error for the device of *slot*, by default this one, or
    says that its GPU has to be reset or replaced."""
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
            handle = pynvml.nvmlDeviceGetHandleByUUID(slot.uuid)
            pynvml.nvmlDeviceGetMemoryInfo(handle)
            wrong = _wrong(handle)
        finally:
            pynvml.nvmlShutdown()
    except (pynvml.NVMLError_LibraryNotFound, pynvml.NVMLError_NotSupported, pynvml.NVMLError_NoPermission):
        return
    except pynvml.NVMLError as error:
        raise OSError(errno.EIO, f"the driver answers for its device: {error}", slot.uuid) from None
    if wrong is not None:
        raise OSError(errno.EIO, wrong, slot.uuid)


def is_open() -> bool:
    """Returns whether this process has a device open, and so may hold memory of it."""
    return any(file.startswith(FILES) for file in processes.open_files("self"))


def held() -> int | None:
    """Returns the bytes in use on the first device of this process, where that has a context of CUDA; else None.

    Takes microseconds, where NVML would have to be opened. It names no process, and is for one that has its device for
    itself.
    """
    try:
        # Where a library has not loaded it, there is no context.
        cuda = ctypes.CDLL("libcuda.so.1", mode=os.RTLD_NOLOAD | os.RTLD_NOW)
    except OSError:
        return None
    number, flags, active = ctypes.c_int(), ctypes.c_uint(), ctypes.c_int()
    context, free, total = ctypes.c_void_p(), ctypes.c_size_t(), ctypes.c_size_t()
    by = ctypes.byref
    if cuda.cuDeviceGet(by(number), 0) or cuda.cuDevicePrimaryCtxGetState(number, by(flags), by(active)):
        return None
    # The one that libraries share; the thread of a task may have none, or another one.
    if not active.value or cuda.cuDevicePrimaryCtxRetain(by(context), number):
        return None
    try:
        if cuda.cuCtxPushCurrent_v2(context):
            return None
        wrong = cuda.cuMemGetInfo_v2(by(free), by(total))
        cuda.cuCtxPopCurrent_v2(by(context))
    finally:
        cuda.cuDevicePrimaryCtxRelease_v2(number)
    return None if wrong else total.value - free.value


def failing(slots: Iterable[InstanceInfo]) -> dict[str, str]:
    """Returns why the devices of *slots* fail, by the names of the slots; those without a fault are left out."""
    found: dict[str, str] = {}
    for slot in slots:
        try:
            check(slot)
        except OSError as error:
            found[slot.slot] = f"{error.strerror}: {error.filename}"
    return found


def _wrong(handle: Any) -> str | None:
    """Returns what has to be done to the GPU of *handle*, or of the MIG device *handle*; None where it is well."""
    import pynvml

    if _asked(pynvml.nvmlDeviceIsMigDeviceHandle, handle):
        handle = pynvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(handle)
    *_, failed = _asked(pynvml.nvmlDeviceGetRemappedRows, handle) or (0,)
    if failed:
        return _FAILED_ROW
    return asks_for(_asked(pynvml.nvmlDeviceGetFieldValues, handle, [RECOVERY]))


def asks_for(fields: Iterable[Any] | None) -> str | None:
    """Returns what the driver asks for where it answered with *fields* when it was asked for `RECOVERY`; else None."""
    for field in fields or ():
        action = field.value.uiVal
        if field.nvmlReturn == 0 and action:
            return f"the driver asks for {_ACTIONS.get(action, f'recovery action {action}')}"
    return None


def _asked(call: Callable[..., Any], *arguments: object) -> Any:
    """Returns the answer of NVML; None where the driver, or the board, does not know the question."""
    import pynvml

    refused = (
        pynvml.NVMLError_NotSupported,
        pynvml.NVMLError_FunctionNotFound,
        pynvml.NVMLError_InvalidArgument,
        pynvml.NVMLError_NoPermission,
    )
    with contextlib.suppress(*refused):
        return call(*arguments)
    return None
