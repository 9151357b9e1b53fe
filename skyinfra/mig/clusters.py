"""Layouts as clusters take them: Slurm's `gres.conf`, and the configuration of NVIDIA's device plugin for Kubernetes.

What Slurm takes is in gres.conf(5) of Slurm 21.08 and later, which has MultipleFiles. A type is a name of ours that is
a part of the one which AutoDetect=nvml finds, as Slurm wants it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from skyinfra.errors import NotSupported
from skyinfra.mig.geometry import gpu_profile

# How a line of `gres.conf` begins that only counts what AutoDetect finds.
AUTODETECT = "AutoDetect=nvml"


@dataclass(frozen=True, slots=True)
class GresDevice:
    """A GPU or MIG device: its *type*, its device files, and its UUID."""

    type: str
    files: tuple[str, ...]
    uuid: str


def gres_type(name: str) -> str:
    """Returns the name of a GPU as Slurm writes it: ``nvidia_h100_80gb_hbm3``."""
    return "_".join(name.lower().split())


def gres_counts(types: Iterable[str]) -> str:
    """Returns the value of ``Gres=`` of a node in `slurm.conf`: ``gpu:3g.40gb:2,gpu:1g.10gb:4``."""
    return ",".join(f"gpu:{name}:{count}" for name, count in Counter(types).items())


def gres_declared(types: Iterable[str]) -> str:
    """Returns the lines of `gres.conf` for a layout that is declared: its device files are known once it stands.

    AutoDetect=nvml calls a compute instance by the profile of its GPU instance (SchedMD/slurm
    src/plugins/gpu/nvml/gpu_nvml.c, read 2026-11-24), so that it is of that type here.
    """
    given = list(types)
    found = [gpu_profile(name) for name in given]
    shared = ", ".join(dict.fromkeys(name for name, known in zip(given, found, strict=True) if name != known))
    note = f"# Slurm itself does not tell {shared} from what has its GPU instance alone; the lines of the node do.\n"
    return (
        f"# slurm.conf: GresTypes=gpu, and of each node Gres={gres_counts(found)}\n"
        f"{note if shared else ''}"
        "# slurmd needs NVIDIA's driver and has to be built with NVML. Where it is not, `skyinfra-runner partition\n"
        "# --export --format gres` on the node has the lines with the device files of what is there.\n"
        f"{AUTODETECT}\n"
    )


def gres_actual(devices: Sequence[GresDevice]) -> str:
    """Returns the lines of `gres.conf` for the *devices* of a node, in their order, by which Slurm numbers them."""
    lines = [
        f"# slurm.conf: GresTypes=gpu, and of this node Gres={gres_counts(each.type for each in devices)}",
        "# cgroup.conf: ConstrainDevices=yes; without it a job is not kept from the partitions of others.",
        "# A slurmd with NVML finds the same by itself: AutoDetect=nvml in place of all lines.",
        "AutoDetect=off",
    ]
    for each in devices:
        # File takes one file for each device, MultipleFiles all files of one device.
        key = "File" if len(each.files) == 1 else "MultipleFiles"
        lines.append(f"Name=gpu Type={each.type} {key}={','.join(each.files)} Flags=nvidia_gpu_env # {each.uuid}")
    return "\n".join(lines) + "\n"


def mig_resource(name: str) -> str:
    """Returns the resource as which the device plugin offers partitions of the profile *name* (strategy ``mixed``).

    Raises NotSupported for a compute instance that shares a GPU instance: the plugin passes by every profile whose
    compute slices are not those of its GPU instance (NVIDIA/k8s-device-plugin internal/rm/rm.go, read 2026-11-24).
    """
    whole = gpu_profile(name)
    if whole != name:
        raise NotSupported(
            "NVIDIA's device plugin for Kubernetes offers no compute instances", given=name, hint=f"Declare {whole}."
        )
    # Kubernetes takes no plus in names.
    return f"nvidia.com/mig-{name.replace('+', '.')}"


def device_plugin(gpus: Sequence[Sequence[str] | None]) -> str:
    """The configuration of the device plugin for a node with these *gpus*: the profiles on each, None without MIG.

    The strategy is ``single`` where every GPU has partitions of one and the same profile, as the plugin demands;
    ``none`` without MIG, else ``mixed``. A comment says which resources the node offers then. Raises NotSupported for
    compute instances.
    """
    names = [name for gpu in gpus for name in gpu or ()]
    whole = sum(gpu is None for gpu in gpus)
    if whole == len(gpus):
        strategy, offered = "none", {"nvidia.com/gpu": whole}
    elif not whole and all(gpus) and len(set(names)) == 1 and mig_resource(names[0]):
        strategy, offered = "single", {"nvidia.com/gpu": len(names)}
    else:
        parts = Counter(map(mig_resource, names))
        strategy, offered = "mixed", {**({"nvidia.com/gpu": whole} if whole else {}), **parts}
    comments = "".join(f"#   {name}: {count}\n" for name, count in offered.items()) or "#   nothing\n"
    return f"# The node offers:\n{comments}version: v1\nflags:\n  migStrategy: {strategy}\n"
