"""Readings of a slot at one moment, as `skyinfra top` and Prometheus show them."""

from __future__ import annotations

from dataclasses import dataclass

from skyinfra.errors import InvalidManifest
from skyinfra.protocol import _schema
from skyinfra.protocol.instance import InstanceInfo


@dataclass(frozen=True)
class SlotReading(_schema.Document, error=InvalidManifest, source="metrics"):
    """Utilization of *slot*. None stands for a value that its device, or the driver, does not tell.

    utilization: percent of the time that something ran on it; of a MIG partition, percent of its multiprocessors that
    were busy, by NVIDIA's GPM, which Hopper and later have; of NeuronCores, their mean. memory_used, memory_total:
    bytes of its device.
    temperature (degrees Celsius) and power (watts) are those of the whole accelerator that it stands on.
    """

    slot: InstanceInfo
    utilization: float | None = None
    memory_used: int | None = None
    memory_total: int | None = None
    temperature: int | None = None
    power: float | None = None
