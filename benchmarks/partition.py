"""Partitioning on the fake driver, counted in NVML calls: what they cost on hardware is the driver's affair."""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from benchmarks.measure import Result

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests"))

from fake_nvml.build import build  # noqa: E402
from fake_nvml.fake_machine import FakeMachine  # noqa: E402

GPUS = 8
# A mode for each GPU, and for each of seven instances a GPU instance and the compute instance in it.
NEEDED = GPUS * (1 + 7 * 2)
PARTITION = ("-m", "skyinfra.runner", "partition", "--layout", "1g.10gb*7", "--gpu", "all")


def run() -> Iterator[Result]:
    driver = build(ROOT / "build" / "fake-nvml")
    with tempfile.TemporaryDirectory() as folder:
        machine = FakeMachine(driver, Path(folder), ",".join(["h100_80gb"] * GPUS))
        for what in ("partition 8 GPUs into 56", "the same again"):
            machine.forget_calls()
            start = time.perf_counter()
            machine.python(*PARTITION).check_returncode()
            seconds = time.perf_counter() - start
            calls = sum(machine.calls().values())
            baseline = f"the {NEEDED} that change something"
            yield Result(f"{what}: {calls} NVML calls", baseline, seconds, calls / NEEDED)
