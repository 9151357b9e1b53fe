"""Measurements of NVML: figures of GPUs and MIG devices, of which each driver and each GPU has some."""

from __future__ import annotations

import contextlib
import ctypes
import math
from collections.abc import Collection, Iterator
from typing import Any

import pynvml

UNSUPPORTED = (
    pynvml.NVML_ERROR_NOT_SUPPORTED,
    pynvml.NVML_ERROR_FUNCTION_NOT_FOUND,
    pynvml.NVML_ERROR_NO_PERMISSION,
    pynvml.NVML_ERROR_INVALID_ARGUMENT,
    pynvml.NVML_ERROR_NO_DATA,
    pynvml.NVML_ERROR_ARGUMENT_VERSION_MISMATCH,
)


def asked(api: Any, function: str, *arguments: Any, absent: Collection[int] = UNSUPPORTED) -> Any:
    """The answer of NVML's *function*; None where it refuses with one of *absent*: where it does not support it."""
    call = getattr(api, function, None)
    if call is None:  # the simulated driver has what a partitioner needs
        return None
    try:
        return call(*arguments)
    except pynvml.NVMLError as error:
        if error.value in absent:
            return None
        raise


class MigDevice:
    """A MIG device. ``instance`` is the id of its GPU instance; None where the driver does not say it."""

    def __init__(self, api: Any, handle: Any) -> None:
        self._api = api
        self._handle = handle
        self.instance: int | None = asked(api, "nvmlDeviceGetGpuInstanceId", handle)

    def memory(self) -> Any:
        """Its memory, with ``total`` and ``used`` in bytes; None where the driver does not say it."""
        return asked(self._api, "nvmlDeviceGetMemoryInfo", self._handle)


class Readings:
    """The part of a GPU that measures. A subclass sets ``_api`` and ``_handle``."""

    _api: Any
    _handle: Any

    def ask(self, function: str, *arguments: Any, absent: Collection[int] = UNSUPPORTED) -> Any:
        """The answer of NVML's *function* for this GPU; None as for `asked`."""
        return asked(self._api, function, self._handle, *arguments, absent=absent)

    def temperature(self) -> int | None:
        """In degrees Celsius; None where the driver does not say it."""
        asks = (self.ask(f"nvmlDeviceGetTemperature{v}", pynvml.NVML_TEMPERATURE_GPU) for v in ("V", ""))
        return next((int(now) for now in asks if now is not None), None)

    def has_gpm(self) -> bool:
        """Whether it measures its performance (GPM): Hopper and later."""
        support = self.ask("nvmlGpmQueryDeviceSupport")
        return support is not None and bool(support.isSupportedDevice)

    @contextlib.contextmanager
    def gpm_sample(self, instance: int) -> Iterator[Any]:
        """A sample of the GPU instance *instance* now; None where the driver refuses, as it may but for root."""
        sample = self._api.nvmlGpmSampleAlloc()
        try:
            yield self.ask("nvmlGpmMigSampleGet", instance, sample)
        finally:
            self._api.nvmlGpmSampleFree(sample)

    def busy_multiprocessors(self, first: Any, second: Any) -> float | None:
        """Percent of the multiprocessors that were busy between two samples; None where the driver does not say it."""
        metrics = pynvml.c_nvmlGpmMetricsGet_t()
        metrics.version = pynvml.NVML_GPM_METRICS_GET_VERSION
        metrics.numMetrics = 1
        metrics.sample1, metrics.sample2 = first, second
        metrics.metrics[0].metricId = pynvml.NVML_GPM_METRIC_SM_UTIL
        given = asked(self._api, "nvmlGpmMetricsGet", metrics)
        if given is None or given.metrics[0].nvmlReturn != pynvml.NVML_SUCCESS or math.isnan(given.metrics[0].value):
            return None
        return float(given.metrics[0].value)

    def fabric_state(self) -> int | None:
        """Its state in the fabric of NVSwitch, as NVML counts (3: completed); None where the driver does not say it."""
        info = pynvml.c_nvmlGpuFabricInfoV_t()
        # The structure has to say its version; pynvml leaves that to its caller.
        info.version = pynvml.nvmlGpuFabricInfo_v2
        given = self.ask("nvmlDeviceGetGpuFabricInfoV", ctypes.byref(info))
        return None if given is None else int(info.state)
