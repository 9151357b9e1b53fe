"""Metrics of this node's slots: utilization, memory, temperature and power, also for Prometheus.

NVIDIA's come from NVML, those of other vendors from `skyinfra.doctor.figures`.

NVML refuses `nvmlDeviceGetUtilizationRates` on MIG devices and on their GPU. GPM measures them, on Hopper and later,
from two samples of a GPU instance.
"""

from __future__ import annotations

import contextlib
import errno
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import pynvml

from skyinfra.doctor import figures
from skyinfra.errors import AcceleratorMissing, NodeFailed, PortTaken, SkyinfraError
from skyinfra.gpu.hardware import Hardware
from skyinfra.gpu.nvml import Gpu, MigDevice, Nvml
from skyinfra.node.node import directory_of
from skyinfra.protocol.instance import InstanceInfo
from skyinfra.protocol.nodeconfig import NodeConfig
from skyinfra.protocol.readings import SlotReading

# Between two samples of GPM; NVIDIA asks for at least 100 ms.
_SAMPLE_S = 0.15


def read(config: Path, *, root: Path = Path("/")) -> list[SlotReading]:
    """Returns the reading of each slot that the node *config* has now. Raises `InvalidNodeConfig`.

    A value that cannot be measured is None: where the driver or the vendor's tool does not tell it, on simulated
    accelerators but NVIDIA's, on TPUs and on CPU slots. *root*: the parent of sys/.
    """
    directory = directory_of(config)
    status = directory.status()
    slots = status.slots if status is not None and directory.holder() is not None else ()
    node = NodeConfig.load(config)
    vendor = node.accelerator.vendor if node.accelerator is not None else None
    if slots and vendor == "nvidia":
        with contextlib.suppress(AcceleratorMissing, pynvml.NVMLError), Hardware(node, directory).nvml() as nvml:
            return _of_gpus(nvml, slots)
    elif slots and vendor is not None and not node.simulate:
        return figures.read(vendor, slots, root=root)
    return [SlotReading(slot) for slot in slots]


def _of_gpus(nvml: Nvml, slots: Sequence[InstanceInfo]) -> list[SlotReading]:
    gpus = {gpu.index: gpu for gpu in nvml.gpus()}
    readings = {}
    parts = {}
    for slot in slots:
        gpu = gpus.get(slot.gpu) if slot.gpu is not None else None
        device = nvml.mig_device(slot.uuid) if slot.kind == "partition" and slot.uuid else None
        readings[slot.slot] = _reading(slot, gpu, device)
        if gpu is not None and device is not None:
            parts[slot.slot] = gpu, device
    for name, busy in _busy(parts).items():
        readings[name] = replace(readings[name], utilization=busy)
    return list(readings.values())


def _reading(slot: InstanceInfo, gpu: Gpu | None, device: MigDevice | None) -> SlotReading:
    if gpu is None:
        return SlotReading(slot)
    whole = slot.kind == "gpu"
    memory = gpu.ask("nvmlDeviceGetMemoryInfo") if whole else device.memory() if device is not None else None
    rates = gpu.ask("nvmlDeviceGetUtilizationRates") if whole else None
    power = gpu.ask("nvmlDeviceGetPowerUsage")
    return SlotReading(
        slot,
        utilization=float(rates.gpu) if rates is not None else None,
        memory_used=int(memory.used) if memory is not None else None,
        memory_total=int(memory.total) if memory is not None else None,
        temperature=gpu.temperature(),
        power=power / 1000 if power is not None else None,
    )


def _busy(parts: dict[str, tuple[Gpu, MigDevice]]) -> dict[str, float]:
    """Returns the percentage of busy multiprocessors of each partition, within the last moment."""
    able = {name: part for name, part in parts.items() if part[0].has_gpm()}
    with contextlib.ExitStack() as stack:
        first = {name: sample for name, part in able.items() if (sample := _sample(part, stack)) is not None}
        if not first:
            return {}
        time.sleep(_SAMPLE_S)
        second = {name: sample for name in first if (sample := _sample(able[name], stack)) is not None}
        values = {name: able[name][0].busy_multiprocessors(first[name], sample) for name, sample in second.items()}
    return {name: value for name, value in values.items() if value is not None}


def _sample(part: tuple[Gpu, MigDevice], stack: contextlib.ExitStack) -> Any:
    gpu, device = part
    return stack.enter_context(gpu.gpm_sample(device.instance)) if device.instance is not None else None


# Prometheus ---------------------------------------------------------------------------------------------------------


# By the field of a reading: the name of the metric, and its help text.
_GAUGES = {
    "slot": ("skyinfra_slot_info", "A slot that has a worker; always 1."),
    "utilization": ("skyinfra_slot_utilization_ratio", "Share of the time, or multiprocessors, in use."),
    "memory_used": ("skyinfra_slot_memory_used_bytes", "Device memory of the slot in use."),
    "memory_total": ("skyinfra_slot_memory_bytes", "Device memory of the slot."),
    "temperature": ("skyinfra_slot_accelerator_celsius", "Temperature of the slot's whole accelerator."),
    "power": ("skyinfra_slot_accelerator_watts", "Power of the slot's whole accelerator."),
}


def prometheus(readings: Sequence[SlotReading]) -> str:
    """Returns the readings in Prometheus's text format, without unknown values."""
    lines = []
    for field, (name, text) in _GAUGES.items():
        known = [reading for reading in readings if getattr(reading, field) is not None]
        if known:
            lines += [f"# HELP {name} {text}", f"# TYPE {name} gauge"]
            lines += [f"{name}{_labels(each.slot, field)} {_value(each, field)!r}" for each in known]
    return "".join(f"{line}\n" for line in lines)


def _labels(slot: InstanceInfo, field: str) -> str:
    labels = {"fleet": slot.fleet, "node": slot.node, "slot": slot.worker, "gpu": slot.gpu}
    if field == "slot":
        labels |= {"kind": slot.kind, "accelerator": slot.accelerator, "profile": slot.profile, "uuid": slot.uuid}
    shown = {name: "" if value is None else _escaped(str(value)) for name, value in labels.items()}
    return "{" + ",".join(f'{name}="{value}"' for name, value in shown.items()) + "}"


def _value(reading: SlotReading, field: str) -> float:
    return 1.0 if field == "slot" else getattr(reading, field) / (100 if field == "utilization" else 1.0)


def _escaped(value: str) -> str:
    return value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")


def serve(config: Path, host: str, port: int) -> None:
    """Answers GET /metrics until the process ends. *host* may stand in brackets. Raises `PortTaken`, `NodeFailed`."""

    class Handler(_Handler):
        node = config

    try:
        server = ThreadingHTTPServer((host.strip("[]"), port), Handler)
    except OSError as error:
        raise cannot_listen(f"{host}:{port}", error) from None
    with server:
        print(f"serving http://{host}:{server.server_address[1]}/metrics", file=sys.stderr, flush=True)
        server.serve_forever()


def cannot_listen(listen: str, error: OSError) -> SkyinfraError:
    """Returns the error for an address where nothing can listen."""
    if error.errno == errno.EADDRINUSE:
        return PortTaken(f"another process listens at {listen}", field="--listen", hint="Choose another port.")
    return NodeFailed(f"cannot listen at {listen}: {error.strerror or error}", field="--listen")


class _Handler(BaseHTTPRequestHandler):
    """Answers GET /metrics for *node*, by its configuration file."""

    node: ClassVar[Path]

    def do_GET(self) -> None:
        status, text = 404, "GET /metrics\n"
        if self.path.partition("?")[0] == "/metrics":
            try:
                status, text = 200, prometheus(read(self.node))
            except SkyinfraError as error:
                status, text = 500, f"{error}\n"
        body = text.encode()
        self.send_response(status)
        self.send_header("Content-Type", "text/plain; version=0.0.4; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *arguments: object) -> None:
        """Each scrape would be a line."""
