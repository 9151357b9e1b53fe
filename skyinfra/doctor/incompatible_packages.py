"""Packages that stumble over how a slot names its device: CUDA_VISIBLE_DEVICES has the UUID of a GPU or a partition.

The UUID is what NVIDIA recommends, and an index is no way out: indices of MIG devices differ with what else stands, and
those of GPUs with what has failed. No variable makes these packages take it, so that the runner sets none; what helps
is another version, or what the finding says. What is known stands here with its source, all read on 2026-11-24.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from skyinfra.doctor import packages
from skyinfra.protocol.findings import Finding, Result


class Trouble(NamedTuple):
    """A known defect of *package* in the versions from *since* and before *fixed* (None: in all that are known).

    partitions: only on partitions, not on whole GPUs. result: of the finding; ``ok`` is advice. source: of all of it.
    """

    package: str
    since: tuple[int, ...]
    fixed: tuple[int, ...] | None
    partitions: bool
    result: Result
    found: str
    to_do: str
    source: str


# NVML tells the memory and the processes of a GPU whose MIG is on to root only.
_TROUBLES = (
    Trouble(
        "vllm",
        (0,),
        (0, 24),
        False,
        "wrong",
        "reads the UUID of the device as a number: ValueError, or `Model architectures failed to be inspected`",
        "Write vllm>=0.24 in the image's pip. No setting helps an older one.",
        "vllm-project/vllm#6551, #20939, #41848; #45026 repairs it, 0.22.0 fails and 0.24.0 does not",
    ),
    Trouble(
        "vllm",
        (0, 24),
        None,
        True,
        "ok",
        "takes the batch sizes of the smallest GPU, because NVML refuses the memory of the whole GPU",
        "Give max_num_batched_tokens and max_num_seqs; 28 to 53 % of the throughput were lost without.",
        "vllm-project/vllm#55381, open",
    ),
    Trouble(
        "torch",
        (1, 13),
        (2, 1),
        True,
        "wrong",
        "torch.cuda.device_count() is 0, though tensors can be made on the device",
        "Write torch>=2.1 in the image's pip.",
        "pytorch/pytorch#95784, #92315",
    ),
    Trouble(
        "torch",
        (2, 1),
        None,
        True,
        "ok",
        "says `NVML_SUCCESS == r INTERNAL ASSERT FAILED at CUDACachingAllocator.cpp` where memory has run out",
        "Take it for torch.OutOfMemoryError: a larger partition or a smaller batch helps. "
        "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:False in the image's env avoids some of them.",
        "pytorch/pytorch#112377, #197312; #185946 (2026-07) makes it a warning; vllm-project/ci-infra#355",
    ),
    Trouble(
        "deepspeed",
        (0,),
        None,
        False,
        "ok",
        "its launcher `deepspeed` reads the UUID as a number, or with --num_gpus takes the variable away",
        "Start scripts with torchrun: `skyinfra run --torchrun`. Without the variable they see another's device.",
        "deepspeedai/DeepSpeed#5278, and deepspeed/launcher/runner.py",
    ),
    Trouble(
        "sglang",
        (0,),
        (0, 5),
        True,
        "unknown",
        "may end at its start: `nvidia-smi` refuses the memory of the GPU",
        "Write sglang>=0.5 in the image's pip, which asks torch.",
        "sgl-project/sglang#2933, #6110; #8167 (2025-07) repairs it",
    ),
)


def checks(path: list[str], *, partitions: bool) -> Iterator[Finding]:
    """Yields what is known of the packages on the import path *path*; *partitions*: whether a GPU is partitioned."""
    for trouble in _TROUBLES:
        version = packages.version(trouble.package, path)
        if version is None or (trouble.partitions and not partitions):
            continue
        text, numbers = version
        if trouble.since <= numbers and (trouble.fixed is None or numbers < trouble.fixed):
            fixed = ".".join(map(str, trouble.fixed or ()))
            wanted = f"{trouble.package} {fixed} or later" if fixed else "no more is known to help"
            to_do = f"{trouble.to_do} ({trouble.source})"
            what = f"{trouble.package} and {'partitions' if trouble.partitions else 'device UUIDs'}"
            yield Finding(what, trouble.result, f"{trouble.package} {text} {trouble.found}", wanted, to_do)
