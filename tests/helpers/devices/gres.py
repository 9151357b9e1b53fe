"""The gres.conf of a machine with the fake driver, and what Slurm reads of it."""

from __future__ import annotations

from pathlib import Path

from fake_nvml.fake_machine import FakeMachine

from skyinfra.gpu import exports
from skyinfra.gpu.hardware import session
from skyinfra.gpu.nvml import Nvml


def gres(machine: FakeMachine, root: Path) -> tuple[str, tuple[str, ...]]:
    with machine.loaded(), session(Nvml()) as nvml:
        return exports.gres(nvml, root=root)


def lines(text: str) -> list[str]:
    return [line.partition(" #")[0] for line in text.splitlines() if not line.startswith("#")]
