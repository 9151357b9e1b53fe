"""What the partitioner needs of a machine besides NVML: the services that hold its GPUs, a reset, a reboot."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import shutil
import subprocess
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import pynvml

from skyinfra.errors import NodeFailed
from skyinfra.gpu import device_files
from skyinfra.gpu.nvml import error_name

# Services of NVIDIA's that keep a GPU open, in the order in which they start: what NVIDIA's own MIG manager stops, and
# what `nvidia-smi --gpu-reset` names when it refuses (NVIDIA/mig-parted deployments/systemd/hooks.sh, and
# NVIDIA/gpu-operator issue 118 for persistenced). A display server is left alone: somebody may sit there.
CLIENTS = (
    "skyinfra-metrics.service",
    "nvidia-persistenced.service",
    "nvidia-fabricmanager.service",
    "nvsm.service",
    "nvsm-core.service",
    "nvidia-dcgm.service",
    "dcgm.service",
    "dcgm-exporter.service",
)
_CDI_REFRESH = "nvidia-cdi-refresh.service"
logger = logging.getLogger("skyinfra.runner")

_ROOT = Path("/")
_LOCK = Path("/run/skyinfra-partition.lock")
_PATIENCE_S = 5.0
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
# A reset of eight GPUs takes some seconds; services may take longer to end.
_RESET_S = 300
_DEVICE_FILES_S = 60
_SERVICE_S = 120


@dataclass(frozen=True)
class Address:
    """One GPU: its index, and its PCI address such as ``0000:1b:00.0``."""

    index: int
    bus_id: str


class Machine(Protocol):
    """The machine below the GPUs."""

    def alone(self) -> contextlib.AbstractContextManager[None]:
        """While it is entered, no other process on the machine is in it: waits for those."""

    def stop_clients(self) -> tuple[str, ...]:
        """Stops the known services that hold GPUs; the names of those that ran, for `start_clients`."""

    def start_clients(self, names: Sequence[str]) -> None:
        """Starts them again."""

    def reset(self, gpus: Sequence[Address]) -> str:
        """Resets *gpus* together. Nothing of this process may hold them. Empty, or why they could not be."""

    def refresh_cdi(self) -> bool:
        """Has the container toolkit list the devices anew. False where it does not do that on this machine."""

    def make_device_files(self) -> str:
        """Makes the device files that tasks need and may not make. Empty, or which could not be made, and why."""

    def boot_id(self) -> str:
        """What tells one boot of the machine from another."""

    def reboot(self) -> None:
        """Has the machine reboot; returns before it does. Raises `NodeFailed`."""


class SystemMachine:
    """The machine that this process runs on: systemd, and NVIDIA's program for the reset, which NVML has none for."""

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            try:
                lock = stack.enter_context(_LOCK.open("a"))
            except OSError:
                # Who may not write there may not partition either: the driver says so.
                yield
                return
            _wait_for(lock.fileno())
            yield

    def stop_clients(self) -> tuple[str, ...]:
        active = tuple(name for name in CLIENTS if _systemctl("is-active", "--quiet", name) is None)
        for name in reversed(active):
            # One that is not stopped in time may still end later: it is started again all the same.
            _systemctl("stop", name)
        return active

    def start_clients(self, names: Sequence[str]) -> None:
        # While the machine boots they may be ordered after this very service: systemd starts them when it can.
        if names:
            _systemctl("--no-block", "start", *names)

    def reset(self, gpus: Sequence[Address]) -> str:
        program = shutil.which("nvidia-smi")
        if program is None:
            return "there is no nvidia-smi to reset it with"
        return _execute([program, "--gpu-reset", "-i", ",".join(gpu.bus_id for gpu in gpus)], _RESET_S) or ""

    def refresh_cdi(self) -> bool:
        # With --no-block for the same reason as above.
        known = _systemctl("cat", _CDI_REFRESH) is None
        return known and _systemctl("--no-block", "restart", _CDI_REFRESH) is None

    def make_device_files(self) -> str:
        if os.geteuid() != 0 or not device_files.missing(_ROOT):
            return ""
        program = shutil.which("nvidia-modprobe")
        reasons = ["there is no nvidia-modprobe"]
        if program is not None:
            run = (_execute(command, _DEVICE_FILES_S) for command in device_files.commands(program, _ROOT))
            reasons = [reason for reason in run if reason is not None]
        left = ", ".join(map(str, device_files.missing(_ROOT)))
        return left and f"{left}: {'; '.join(reasons) or 'nvidia-modprobe did not make it'}"

    def boot_id(self) -> str:
        return _BOOT_ID.read_text(encoding="ascii").strip()

    def reboot(self) -> None:
        reason = _systemctl("reboot")
        if reason is not None:
            raise NodeFailed(f"the machine cannot be rebooted: {reason}", hint="Reboot it, then run this again.")


class SimulatedMachine:
    """The machine of simulated GPUs: resets them, has no services, and never reboots the one that it runs on."""

    def __init__(self, driver: Any) -> None:
        self._driver = driver

    def alone(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def stop_clients(self) -> tuple[str, ...]:
        return ()

    def start_clients(self, names: Sequence[str]) -> None:
        return

    def reset(self, gpus: Sequence[Address]) -> str:
        for gpu in gpus:
            try:
                self._driver.reset(gpu.index)
            except pynvml.NVMLError as error:
                return error_name(error.value)
        return ""

    def refresh_cdi(self) -> bool:
        return False

    def make_device_files(self) -> str:
        return ""

    def boot_id(self) -> str:
        return "simulated"

    def reboot(self) -> None:
        raise NodeFailed("simulated GPUs do not reboot the machine that they are simulated on")


def _wait_for(lock: int) -> None:
    # Somebody may wait for what waits here, and is told why.
    told = threading.Timer(
        _PATIENCE_S, logger.warning, ["another process partitions the GPUs of this machine: waiting for its end"]
    )
    told.daemon = True
    told.start()
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
    finally:
        told.cancel()


def _systemctl(*arguments: str) -> str | None:
    program = shutil.which("systemctl")
    if program is None:
        return "there is no systemctl"
    return _execute([program, "--no-ask-password", *arguments], _SERVICE_S)


def _execute(command: Sequence[str], seconds: float) -> str | None:
    """None where *command* succeeds, else what it said last."""
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            timeout=seconds,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"{Path(command[0]).name} has not ended within {seconds:g} s"
    except OSError as error:
        return f"{command[0]}: {error.strerror}"
    if done.returncode == 0:
        return None
    return " ".join(done.stdout.split()) or f"{Path(command[0]).name} ended with exit code {done.returncode}"
