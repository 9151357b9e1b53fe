"""GPM, NVIDIA's performance monitoring of whole GPUs and of GPU instances, on Hopper and later.

A value is measured between two samples. NVIDIA asks for at least 100 ms between them (nvml.h, "GPM").
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterator, Mapping
from typing import Any

import pynvml

from skyinfra.gpu.nvml import Gpu, asked

_SAMPLE_S = 0.15
# By the name of a measure: NVML's number of it. All are percents.
MEASURES = {
    "graphics": pynvml.NVML_GPM_METRIC_GRAPHICS_UTIL,
    "sm": pynvml.NVML_GPM_METRIC_SM_UTIL,
    "occupancy": pynvml.NVML_GPM_METRIC_SM_OCCUPANCY,
    "tensor": pynvml.NVML_GPM_METRIC_ANY_TENSOR_UTIL,
    "dram": pynvml.NVML_GPM_METRIC_DRAM_BW_UTIL,
    "fp64": pynvml.NVML_GPM_METRIC_FP64_UTIL,
    "fp32": pynvml.NVML_GPM_METRIC_FP32_UTIL,
    "fp16": pynvml.NVML_GPM_METRIC_FP16_UTIL,
}


def activity(parts: Mapping[str, tuple[Gpu, int | None]]) -> dict[str, dict[str, float]]:
    """Measures *parts* together, within the last moment: GPUs, or the GPU instance of that id on one, by any name.

    Returns percents by measure, of those parts that tell any: the GPU may have no GPM, and the driver may refuse it
    to all but root.
    """
    able = {gpu: _has_gpm(gpu) for gpu in {gpu for gpu, _ in parts.values()}}
    with contextlib.ExitStack() as stack:

        def sample(name: str) -> Any:
            return stack.enter_context(_sample(*parts[name]))

        first = {name: taken for name, (gpu, _) in parts.items() if able[gpu] and (taken := sample(name)) is not None}
        if not first:
            return {}
        time.sleep(_SAMPLE_S)
        pairs = {name: (before, sample(name)) for name, before in first.items()}
        found = {name: measured(parts[name][0], *pair) for name, pair in pairs.items() if pair[1] is not None}
    return {name: values for name, values in found.items() if values}


def _has_gpm(gpu: Gpu) -> bool:
    support = gpu.ask("nvmlGpmQueryDeviceSupport")
    return support is not None and bool(support.isSupportedDevice)


@contextlib.contextmanager
def _sample(gpu: Gpu, instance: int | None) -> Iterator[Any]:
    """A sample now; None where the driver refuses it."""
    sample = gpu.api.nvmlGpmSampleAlloc()
    try:
        of_part = () if instance is None else (instance,)
        yield gpu.ask("nvmlGpmSampleGet" if instance is None else "nvmlGpmMigSampleGet", *of_part, sample)
    finally:
        gpu.api.nvmlGpmSampleFree(sample)


def measured(gpu: Gpu, first: Any, second: Any) -> dict[str, float]:
    """Returns what *gpu* measured between two samples, in percent by measure; without what it does not tell."""
    metrics = pynvml.c_nvmlGpmMetricsGet_t()
    metrics.version = pynvml.NVML_GPM_METRICS_GET_VERSION
    metrics.numMetrics = len(MEASURES)
    metrics.sample1, metrics.sample2 = first, second
    for index, number in enumerate(MEASURES.values()):
        metrics.metrics[index].metricId = number
    given = asked(gpu.api, "nvmlGpmMetricsGet", metrics)
    if given is None:
        return {}
    values = {name: given.metrics[index] for index, name in enumerate(MEASURES)}
    read = {name: each for name, each in values.items() if each.nvmlReturn == pynvml.NVML_SUCCESS}
    return {name: float(each.value) for name, each in read.items() if not math.isnan(each.value)}
