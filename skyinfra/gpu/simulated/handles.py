"""The handles that the simulated driver gives out: opaque to their holder, as NVML's are."""

from __future__ import annotations

import ctypes
from enum import IntEnum
from typing import Any, NamedTuple

import pynvml

# Where gpu, epoch, instance and compute are in a handle: shift and mask.
_FIELDS = ((48, 0xFF), (32, 0xFFFF), (16, 0xFFFF), (0, 0xFFFF))
_REFERENCE: Any = type(ctypes.byref(ctypes.c_uint()))


class Kind(IntEnum):
    """What a handle points to."""

    GPU = 1
    INSTANCE = 2
    COMPUTE = 3
    DEVICE = 4


_TYPES: dict[Kind, Any] = {
    Kind.GPU: pynvml.c_nvmlDevice_t,
    Kind.INSTANCE: pynvml.c_nvmlGpuInstance_t,
    Kind.COMPUTE: pynvml.c_nvmlComputeInstance_t,
    Kind.DEVICE: pynvml.c_nvmlDevice_t,
}


class Handle(NamedTuple):
    """What is in a handle. ``epoch`` is the GPU's when the handle was given out; a handle to a GPU has none."""

    kind: Kind
    gpu: int
    epoch: int = 0
    instance: int = 0
    compute: int = 0

    def pointer(self) -> Any:
        """As the caller gets it."""
        number = self.kind << 56 | self.gpu << 48 | self.epoch << 32 | self.instance << 16 | self.compute
        return ctypes.cast(ctypes.c_void_p(number), _TYPES[self.kind])

    @classmethod
    def read(cls, pointer: Any) -> Handle:
        """What the caller gave. Raises ``NVMLError_InvalidArgument`` where it is no handle."""
        number = ctypes.cast(pointer, ctypes.c_void_p).value or 0
        if number >> 56 not in list(Kind):
            raise pynvml.NVMLError(pynvml.NVML_ERROR_INVALID_ARGUMENT)
        return cls(Kind(number >> 56), *(number >> shift & mask for shift, mask in _FIELDS))


def pointed(reference: Any) -> Any:
    """What *reference* points to. The real library ends the process where it gets a value instead."""
    if not isinstance(reference, _REFERENCE):
        raise pynvml.NVMLError(pynvml.NVML_ERROR_INVALID_ARGUMENT)
    return reference._obj
