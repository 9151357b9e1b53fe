"""Readings of slots in Prometheus's text format: by our names, and by those of the vendor's own exporter."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

from skyinfra.protocol.readings import SlotReading

_MIB = 2**20
_PERCENT = 100
# A label that NVIDIA's exporter alone has.
_DRIVER = "DCGM_FI_DRIVER_VERSION"


class _Metric(NamedTuple):
    """A metric: its *name*, its help text, and how its *value* is read; None is left out."""

    name: str
    text: str
    value: Callable[[SlotReading], float | None]
    kind: str = "gauge"


def _divided(field: str, by: float = 1.0) -> Callable[[SlotReading], float | None]:
    def value(reading: SlotReading) -> float | None:
        found = getattr(reading, field)
        return None if found is None else found / by

    return value


def _of_task(field: str) -> Callable[[SlotReading], float | None]:
    def value(reading: SlotReading) -> float | None:
        found = None if reading.figures is None else getattr(reading.figures, field)
        return None if found is None else float(found)

    return value


def _active(measure: str) -> Callable[[SlotReading], float | None]:
    def value(reading: SlotReading) -> float | None:
        return reading.activity[measure] / _PERCENT if measure in reading.activity else None

    return value


def _millijoules(reading: SlotReading) -> float | None:
    return None if reading.energy is None else round(reading.energy * 1000)


def _of_gpu(reading: SlotReading) -> float | None:
    return reading.utilization if reading.slot.kind == "gpu" else None


def _free(reading: SlotReading) -> float | None:
    if reading.memory_total is None or reading.memory_used is None:
        return None
    return (reading.memory_total - reading.memory_used) / _MIB


_SLOT = _Metric("skyinfra_slot_info", "A slot that has a worker; always 1.", lambda _: 1.0)
_OURS = (
    _SLOT,
    _Metric(
        "skyinfra_slot_utilization_ratio",
        "Share of the time, or multiprocessors, in use.",
        _divided("utilization", _PERCENT),
    ),
    _Metric("skyinfra_slot_memory_used_bytes", "Device memory of the slot in use.", _divided("memory_used")),
    _Metric("skyinfra_slot_memory_bytes", "Device memory of the slot.", _divided("memory_total")),
    _Metric(
        "skyinfra_slot_accelerator_celsius", "Temperature of the slot's whole accelerator.", _divided("temperature")
    ),
    _Metric("skyinfra_slot_accelerator_watts", "Power of the slot's whole accelerator.", _divided("power")),
    _Metric(
        "skyinfra_slot_energy_joules_total",
        "The slot's share, by its size, of the energy of its accelerator since the driver was loaded.",
        _divided("slot_energy"),
        "counter",
    ),
)
_TASKS = (
    _Metric(
        "skyinfra_task_memory_peak_bytes",
        "The most device memory that was in use on the slot since its task has started.",
        _of_task("memory_peak"),
    ),
    _Metric("skyinfra_task_energy_joules", "Energy of the slot since its task has started.", _of_task("energy")),
)
# Names, units and labels of DCGM exporter 4.6 (etc/default-counters.csv, etc/dcp-metrics-included.csv, and
# internal/pkg/rendermetrics of NVIDIA/dcgm-exporter, read 2026-11-24), which has them for each GPU, or instance on it.
_DCGM = (
    _Metric("DCGM_FI_DEV_GPU_TEMP", "GPU temperature (in C).", _divided("temperature")),
    _Metric("DCGM_FI_DEV_POWER_USAGE", "Power draw (in W).", _divided("power")),
    _Metric(
        "DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION",
        "Total energy consumption since boot (in mJ).",
        _millijoules,
        "counter",
    ),
    _Metric("DCGM_FI_DEV_GPU_UTIL", "GPU utilization (in %).", _of_gpu),
    _Metric("DCGM_FI_DEV_FB_FREE", "Framebuffer memory free (in MiB).", _free),
    _Metric("DCGM_FI_DEV_FB_USED", "Framebuffer memory used (in MiB).", _divided("memory_used", _MIB)),
    _Metric("DCGM_FI_PROF_GR_ENGINE_ACTIVE", "Ratio of time the graphics engine is active.", _active("graphics")),
    _Metric("DCGM_FI_PROF_SM_ACTIVE", "The ratio of cycles an SM has at least 1 warp assigned.", _active("sm")),
    _Metric("DCGM_FI_PROF_SM_OCCUPANCY", "The ratio of number of warps resident on an SM.", _active("occupancy")),
    _Metric("DCGM_FI_PROF_PIPE_TENSOR_ACTIVE", "Ratio of cycles the tensor (HMMA) pipe is active.", _active("tensor")),
    _Metric(
        "DCGM_FI_PROF_DRAM_ACTIVE",
        "Ratio of cycles the device memory interface is active sending or receiving data.",
        _active("dram"),
    ),
    _Metric("DCGM_FI_PROF_PIPE_FP64_ACTIVE", "Ratio of cycles the fp64 pipes are active.", _active("fp64")),
    _Metric("DCGM_FI_PROF_PIPE_FP32_ACTIVE", "Ratio of cycles the fp32 pipes are active.", _active("fp32")),
    _Metric("DCGM_FI_PROF_PIPE_FP16_ACTIVE", "Ratio of cycles the fp16 pipes are active.", _active("fp16")),
)


def text(readings: Sequence[SlotReading]) -> str:
    """Returns *readings* in Prometheus's text format, without unknown values."""
    lines = [
        *_lines(_OURS, readings, _labels),
        *_activity(readings),
        *_lines(_TASKS, readings, _task_labels),
        *_lines(_DCGM, [each for each in readings if _DRIVER in each.labels], lambda each, _: each.labels),
    ]
    return "".join(f"{line}\n" for line in lines)


def _lines(
    metrics: Sequence[_Metric],
    readings: Sequence[SlotReading],
    labels: Callable[[SlotReading, _Metric], Mapping[str, object]],
) -> Iterator[str]:
    for metric in metrics:
        known = [(each, value) for each in readings if (value := metric.value(each)) is not None]
        if known:
            yield from _head(metric.name, metric.text, metric.kind)
            yield from (f"{metric.name}{_shown(labels(each, metric))} {float(value)!r}" for each, value in known)


def _activity(readings: Sequence[SlotReading]) -> Iterator[str]:
    """The activity by our name, with its measure as a label: every vendor has its own measures."""
    name = "skyinfra_slot_activity_ratio"
    known = [(each, measure, value) for each in readings for measure, value in each.activity.items()]
    if known:
        yield from _head(name, "What a unit of the slot did, of what it could do; 1 is all.", "gauge")
    for each, measure, value in known:
        yield f"{name}{_shown(_labels(each) | {'measure': measure})} {value / _PERCENT!r}"


def _head(name: str, text: str, kind: str) -> tuple[str, str]:
    return f"# HELP {name} {text}", f"# TYPE {name} {kind}"


def _labels(reading: SlotReading, metric: _Metric | None = None) -> dict[str, object]:
    slot = reading.slot
    labels: dict[str, object] = {"fleet": slot.fleet, "node": slot.node, "slot": slot.worker, "gpu": slot.gpu}
    if metric is _SLOT:
        labels |= {"kind": slot.kind, "accelerator": slot.accelerator, "profile": slot.profile, "uuid": slot.uuid}
    return labels


def _task_labels(reading: SlotReading, metric: _Metric) -> dict[str, object]:
    """Returns the name of the task, not its key: each key would be a series of its own, for ever."""
    return _labels(reading) | {"task": (reading.task or "").rpartition("-")[0]}


def _shown(labels: Mapping[str, object]) -> str:
    shown = {name: "" if value is None else _escaped(str(value)) for name, value in labels.items()}
    return "{" + ",".join(f'{name}="{value}"' for name, value in shown.items()) + "}"


def _escaped(value: str) -> str:
    return value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
