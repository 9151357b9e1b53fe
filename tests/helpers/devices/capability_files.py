"""The files in /proc that NVIDIA's driver has for what stands on a machine with the fake driver."""

from __future__ import annotations

from pathlib import Path

from fake_nvml.fake_machine import FakeMachine


def list_capabilities(machine: FakeMachine, root: Path) -> None:
    """Writes them below *root*; each instance has a minor number of its own, from 21."""
    minor = 20
    for number, gpu in enumerate(machine.show()):
        for instance in gpu["instances"]:
            folder = root / f"proc/driver/nvidia/capabilities/gpu{number}/mig/gi{instance['id']}"
            names = ["access", *(f"ci{compute['id']}/access" for compute in instance["compute"])]
            for name in names:
                minor += 1
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                (folder / name).write_text(f"DeviceFileMinor: {minor}\nDeviceFileMode: 292\nDeviceFileModify: 1\n")
