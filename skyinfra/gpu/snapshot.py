"""How the GPUs of a machine were found: noted in a file before anything is changed there, and brought back from it.

AMD's partition modes are not among it, nor GPU instances without a compute instance.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from skyinfra import mig
from skyinfra.errors import AcceleratorMissing, InvalidField
from skyinfra.gpu import partitioner
from skyinfra.gpu.actual import geometry_of
from skyinfra.gpu.hardware import session
from skyinfra.gpu.nvml import Gpu, GpuInstance, Nvml, noting
from skyinfra.gpu.partitioner import ApplyOptions, Emit
from skyinfra.gpu.transition import asking
from skyinfra.mig import Compute, Placement
from skyinfra.node.folder import replace_file

VERSION = 1


def save(file: Path, nvml: Nvml) -> None:
    """Notes MIG modes and partitions in *file*, unless it is there. Without a driver there is nothing to note.

    Raises `PartitionFailed` where NVML does not say, and `StateDirectoryError`.
    """
    if file.exists():
        return
    gpus: list[dict[str, Any]] = []
    try:
        with session(nvml), asking("NVML does not say what is there"):
            gpus = [_existing(gpu) for gpu in nvml.gpus() if gpu.mig_mode() is not None]
    except AcceleratorMissing:
        gpus = []
    replace_file(file, json.dumps({"version": VERSION, "gpus": gpus}) + "\n", durable=True)


def restore(file: Path, nvml: Nvml, *, emit: Emit, options: ApplyOptions) -> None:
    """Brings the GPUs back to what *file* says.

    Raises `InvalidField` where it says nothing, and what `partitioner.apply` raises.
    """
    try:
        gpus = json.loads(file.read_text(encoding="utf-8"))["gpus"]
        found = {each["gpu"]: tuple(_place(*place) for place in each["partitions"]) for each in gpus}
        empty = {each["gpu"] for each in gpus if each["mig"] and not each["partitions"]}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InvalidField(f"it does not say how the GPUs were found: {error}", field=str(file)) from None
    if not found:
        return
    with session(nvml):
        with asking("NVML cannot list the GPUs"):
            for gpu in [each for each in nvml.gpus() if each.index in empty]:
                del found[gpu.index]
                if not gpu.is_partitioned:
                    # A layout without partitions is MIG off for `apply`. One turns MIG on, and goes below.
                    known = geometry_of(gpu)
                    found[gpu.index] = mig.fill(known.profiles[0].name, known)[:1]
        partitioner.apply(nvml, found, emit=emit, options=options)
        emptied = False
        with asking("NVML cannot list the GPUs"):
            for gpu in [each for each in nvml.gpus() if each.index in empty and each.is_partitioned]:
                for instance in gpu.instances():
                    gpu.empty(instance)
                    gpu.destroy(instance)
                    emptied = True
        if emptied and options.machine is not None:
            options.machine.refresh_cdi()


def _existing(gpu: Gpu) -> dict[str, Any]:
    with noting(gpu.index):
        on = gpu.is_partitioned
        places = [_noted(each) for each in gpu.instances()] if on else []
    return {"gpu": gpu.index, "mig": on, "partitions": places}


def _noted(instance: GpuInstance) -> list[Any]:
    """Profile, start and size of *instance*, and of compute instances that share it, their starts and sizes."""
    shares = [[each.start, each.size] for each in instance.shares]
    return [instance.profile.name, instance.start, instance.size, *([shares] if shares else [])]


def _place(profile: str, start: int, size: int, shares: Sequence[Sequence[int]] = ()) -> Placement:
    return Placement(profile, start, size, compute=tuple(Compute(*each) for each in shares))
