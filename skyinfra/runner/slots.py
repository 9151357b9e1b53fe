"""The slots of a node, which run its tasks, from its accelerators and partitions.

The order is the manifest's: by accelerator, within it by placement; CPU slots by number.
"""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Collection, Container, Iterable, Iterator, Sequence
from dataclasses import replace

from skyinfra import mig
from skyinfra.gpu.amd.partitioner import ComputePartition
from skyinfra.gpu.inventory import Device
from skyinfra.mig.steps import Partition
from skyinfra.protocol.instance import InstanceInfo
from skyinfra.protocol.manifest import slot_kind
from skyinfra.protocol.nodeconfig import NodeAccelerator, NodeConfig, Vendor

# The variables that confine a process to one device, by vendor. ROCm's runtime reads the first of its two and HIP
# the second; `InstanceInfo.visible` names the first.
_VARIABLES: dict[Vendor, tuple[str, ...]] = {
    "nvidia": ("CUDA_VISIBLE_DEVICES",),
    "amd": ("ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"),
    "aws": ("NEURON_RT_VISIBLE_CORES",),
    "google": ("TPU_VISIBLE_CHIPS",),
    "intel": ("HABANA_VISIBLE_MODULES",),
    "custom": (),
}
# What a process needs besides, to take its one chip for all that there is: tasks do not reach the metadata service,
# from which libtpu has the topology of the machine. https://cloud.google.com/tpu/docs/run-multiple-workloads-tpu-vm
# (the bounds), https://github.com/pytorch/xla/issues/7714 (the rest).
_BESIDES: dict[Vendor, dict[str, str]] = {
    "google": {
        "TPU_SKIP_MDS_QUERY": "1",
        "TPU_CHIPS_PER_PROCESS_BOUNDS": "1,1,1",
        "TPU_PROCESS_BOUNDS": "1,1,1",
        "TPU_CHIPS_PER_HOST_BOUNDS": "1,1,1",
        "TPU_HOST_BOUNDS": "1,1,1",
        "TPU_WORKER_HOSTNAMES": "localhost",
        "TPU_WORKER_ID": "0",
    }
}
_NUMBERLESS = -1


def plan(
    config: NodeConfig,
    devices: Sequence[Device],
    partitions: Sequence[Partition],
    *,
    running: Iterable[InstanceInfo] = (),
    held: Container[int | None] = (),
) -> tuple[InstanceInfo, ...]:
    """Returns the slots of the node *config*, ordered by their index.

    *devices*: the accelerators that were found. *partitions*: those on them; a device with partitions gives one slot
    per partition. *running*: slots that have a worker now; one whose device stays keeps its index, so that
    its worker (and the task in it) never notices a change elsewhere. No other slot gets the index of a running one.
    *held*: the GPUs on which no slot is to be beside those that run.
    """
    if config.scheduler_only:
        return ()
    kept = {_device_of(slot): slot.worker for slot in running}
    free = _free(kept.values())
    planned = []
    for slot in _slots(config, devices, partitions):
        device = _device_of(slot)
        if slot.gpu not in held or device in kept:
            index = kept[device] if device in kept else next(free)
            planned.append(replace(slot, worker=index, slot=_name(slot.node, index)))
    return tuple(sorted(planned, key=lambda slot: slot.worker))


def count(config: NodeConfig) -> int:
    """The desired number of slots of *config*: one for each partition, and for each accelerator without partitions."""
    accelerator = config.accelerator
    if config.scheduler_only:
        return 0
    if accelerator is None:
        return config.cpu_slots
    if config.slice_hosts:
        return 1
    return sum(len(mig.parts(layout)) or 1 for layout in accelerator.per_gpu)


def names(node: str, total: int, kept: Iterable[int]) -> tuple[str, ...]:
    """Returns the names of the *total* slots of *node*, of which those with the indexes *kept* are known already."""
    known = set(kept)
    others = itertools.islice(_free(known), max(0, total - len(known)))
    return tuple(_name(node, index) for index in sorted({*known, *others}))


def environment(slot: InstanceInfo, vendor: Vendor | None) -> dict[str, str]:
    """Returns the variables that confine the processes of *slot* to its device; empty on a CPU slot."""
    if slot.visible is None or vendor is None:
        return {}
    name, value = slot.visible
    variables = {name: value}
    # Inside the devices that ROCR leaves, HIP counts from 0 again.
    variables.update(dict.fromkeys(_VARIABLES[vendor][1:], "0"))
    return variables | _BESIDES.get(vendor, {})


def _slots(config: NodeConfig, devices: Sequence[Device], partitions: Sequence[Partition]) -> Iterator[InstanceInfo]:
    """Yields the slots that there are to be; only those of CPUs have their index."""
    blank = InstanceInfo(config.node, _NUMBERLESS, "", "cpu", config.fleet, head=config.head)
    accelerator = config.accelerator
    if accelerator is None:
        yield from (replace(blank, worker=index) for index in range(config.cpu_slots))
        return
    if config.slice_hosts:
        # One process uses all chips of a host, with the processes of the other hosts.
        memory = None if accelerator.memory_gb is None else accelerator.memory_gb * len(devices)
        name, simulated = accelerator.name, config.simulate
        yield replace(blank, kind="host", accelerator=name, memory_gb=memory, simulated=simulated)
        return
    variables = _VARIABLES[accelerator.vendor]
    for device in devices:
        whole = replace(
            blank,
            kind=slot_kind(accelerator.vendor),
            accelerator=accelerator.name,
            gpu=device.index,
            uuid=device.uuid,
            visible=(variables[0], device.visible) if variables else None,
            memory_gb=accelerator.memory_gb,
            simulated=config.simulate,
        )
        mine = sorted((p for p in partitions if p.gpu == device.index), key=_by_place)
        units = _units(accelerator, mine) if mine else None
        shared = Counter(partition.start for partition in mine)
        for partition in mine:
            yield replace(
                whole,
                kind="partition",
                profile=partition.profile,
                uuid=partition.uuid,
                visible=(
                    variables[0],
                    partition.visible if isinstance(partition, ComputePartition) else partition.uuid,
                ),
                memory_gb=_memory_gb(accelerator, partition, units),
                start=partition.start,
                size=partition.size,
                units=units,
                compute=partition.compute,
                shared_by=shared[partition.start] if partition.compute is not None else None,
            )
        if not mine and device.profile is not None:
            yield replace(whole, kind="partition", profile=device.profile, memory_gb=_profile_memory_gb(device.profile))
        elif not mine:
            yield whole


def _by_place(partition: Partition) -> tuple[int, int]:
    return partition.start, partition.compute.start if partition.compute is not None else 0


def _units(accelerator: NodeAccelerator, partitions: Sequence[Partition]) -> int | None:
    """Returns the size of the whole GPU: XCDs, which AMD partitions fill, or placement units of its MIG geometry."""
    if accelerator.vendor == "amd":
        return sum(partition.size for partition in partitions)
    return mig.geometry(accelerator.mig_model).placement_units if accelerator.mig_model else None


def _memory_gb(accelerator: NodeAccelerator, partition: Partition, units: int | None) -> float | None:
    """Returns the memory in the name of a MIG profile; for an AMD GPU its share."""
    if accelerator.vendor == "amd":
        share = partition.size / units if units else 1
        return None if accelerator.memory_gb is None else round(accelerator.memory_gb * share, 1)
    return _profile_memory_gb(partition.profile)


def _profile_memory_gb(profile: str) -> float | None:
    match = re.search(r"\.(\d+)gb", profile)
    return float(match.group(1)) if match else None


def _device_of(slot: InstanceInfo) -> tuple[object, ...]:
    return (slot.kind, slot.gpu, slot.uuid, slot.profile, slot.visible, slot.worker if slot.kind == "cpu" else None)


def _free(taken: Collection[int]) -> Iterator[int]:
    """Yields the indexes that are not *taken*, the lowest first."""
    return (index for index in itertools.count() if index not in taken)


def _name(node: str, index: int) -> str:
    return f"{node}/{index}"
