"""The machine of the GPUs beside NVML: the services that hold GPUs, resets, reboots, and device files.

NVIDIA's libraries have a setuid program, nvidia-modprobe, make the device files when a process first needs them: that
of unified memory, and those of each partition's capabilities (NVIDIA, MIG User Guide, "Device Nodes and Capabilities").
A node's tasks gain no privileges, so that it would fail for them: root makes the files, at every boot and after each
change of a layout.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import re
import shutil
import subprocess
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from subprocess import DEVNULL, PIPE, STDOUT
from typing import Any, NamedTuple, TypeAlias

import pynvml

from skyinfra import mig
from skyinfra.errors import NodeFailed, NodeRebooting, PartitionFailed
from skyinfra.gpu.nvml import error_name
from skyinfra.mig.manager import BOOT_HINT, OPERATED_HINT, UNIT, boots, operated
from skyinfra.node import cdi, processes
from skyinfra.node.folder import replace_file, writing

logger = logging.getLogger("skyinfra.runner")

_ROOT = Path("/")
_LOCK = Path("/run/skyinfra-partition.lock")
_PATIENCE_S = 5.0
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
# A reset of eight GPUs takes some seconds; services may take longer to end.
_RESET_S = 300
_DEVICE_FILES_S = 60
_SERVICE_S = 120

_PROC = "proc/driver/nvidia"
# The id of a GPU instance on its GPU; with that of a compute instance in it, where it is about that one alone.
InstanceId: TypeAlias = int | tuple[int, int]
# Below `capabilities`: the right to use a GPU instance, a compute instance in it, and to watch all partitions.
_CAPABILITIES = ("gpu{gpu}/mig/gi{instance}/access", "gpu{gpu}/mig/gi{instance}/ci[0-9]*/access")
_ANY = "[0-9]*"
_MONITOR = "mig/monitor"
# The module of the kernel that lends GPUs to display servers. It holds every GPU.
_DISPLAY = "nvidia_drm"
# NVIDIA/mig-parted, cmd/nvidia-mig-manager.
_MIG_MANAGER = "nvidia-mig-manager"
_ENABLED = ("UnitFileState", "Environment")
_MINOR = re.compile(r"^DeviceFileMinor:\s*(\d+)$", re.MULTILINE)


class Holder(NamedTuple):
    """A process that has a GPU or a partition open, and the unit of systemd that it is in, if any."""

    pid: int
    unit: str | None

    @property
    def service(self) -> str | None:
        """Its service, which can be stopped and started again; a session or a container cannot."""
        return self.unit if self.unit is not None and self.unit.endswith(".service") else None


class SystemMachine:
    """The machine that this process runs on: systemd, and NVIDIA's program for the reset, which NVML has none for."""

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """Keeps other processes of this machine out: waits for those that are in it, and makes others wait."""
        try:
            lock = _LOCK.open("a")
        except OSError:
            # A user who may not write there may not partition either: the driver says so.
            yield
            return
        with lock:
            _wait_for(lock.fileno())
            yield

    def holders(self, gpu: int, address: str, instance: InstanceId | None, *, device: bool) -> list[Holder]:
        """The processes that have device files of a GPU open; root sees all. The services of this node are among them.

        gpu: the number in the name of its device file. address: its PCI address. instance: the id of the GPU instance
        (or of a compute instance in it) whose files count; None: those of all. device: whether the files of the whole
        GPU count as well.
        """
        number = _ANY if instance is None else instance
        files = {f"/dev/nvidia-caps/nvidia-cap{minor}" for _, minor in _minors(_capabilities(_ROOT, gpu, number))}
        if device:
            cards = (_ROOT / "sys/bus/pci/devices" / address / "drm").glob("*")
            files |= {f"/dev/nvidia{gpu}", *(f"/dev/dri/{card.name}" for card in cards)}
        pids = processes.holding(files, proc=_ROOT / "proc") if files else []
        return [Holder(pid, self.unit(pid)) for pid in pids]

    def mig_manager(self) -> int | None:
        """The process of the GPU operator's mig-manager, which brings this machine to the layout of its own label."""
        return next(iter(processes.named(_MIG_MANAGER, proc=_ROOT / "proc")), None)

    def selected_at_boot(self) -> mig.Selected | None:
        """The configuration to which nvidia-mig-manager.service brings this machine at every boot, if it is enabled."""
        asked = (self._ask_systemctl("show", "--value", f"--property={name}", UNIT) for name in _ENABLED)
        (known, state), (_, environment) = asked
        return mig.selected(environment) if known and state.startswith("enabled") else None

    def others_that_partition(self) -> list[str]:
        """Sentences on who else brings the GPUs of this machine to a layout, and what to do about it."""
        found = []
        if (manager := self.mig_manager()) is not None:
            found.append(f"{operated(processes.describe(manager))}. {OPERATED_HINT}")
        if (wanted := self.selected_at_boot()) is not None:
            found.append(f"{boots(wanted)}. {BOOT_HINT}")
        return found

    def unit(self, pid: int) -> str | None:
        """Returns the unit of systemd that a process is in, see `processes.unit`."""
        return processes.unit(pid, proc=_ROOT / "proc")

    def is_active(self, unit: str) -> bool:
        """Returns whether a service runs."""
        return self._systemctl("is-active", "--quiet", unit) is None

    def with_dependents(self, unit: str) -> tuple[str, ...]:
        """Returns the services that stop with *unit*: itself, and those that run and require it."""
        found = [unit]
        for name in found:
            known, shown = self._ask_systemctl("show", "--value", "--property=RequiredBy,BoundBy,ConsistsOf", name)
            others = {other for other in shown.split() if known and other.endswith(".service")} - set(found)
            found += [other for other in sorted(others) if self.is_active(other)]
        return tuple(found)

    def stop(self, unit: str) -> str:
        """Stops a service. Returns why that failed, or ""."""
        return self._systemctl("stop", unit) or ""

    def start(self, units: Sequence[str]) -> None:
        """Starts services again, in the order that systemd knows."""
        # While the machine boots they may be ordered after this very service: systemd starts them when it can.
        if units:
            self._systemctl("--no-block", "start", *units)

    def unload_display(self) -> str | None:
        """Unloads the kernel's module for display servers. Returns why that failed; "" where it did not.

        None where it is not loaded. The kernel refuses while a process uses it, on whatever GPU.
        """
        if not (_ROOT / "sys/module" / _DISPLAY).exists():
            return None
        # Not modprobe, which unloads with it whatever is needed no more: the driver itself, with its MIG modes.
        unloaded, output = _program("rmmod", _DISPLAY)
        return "" if unloaded else output

    def load_display(self) -> None:
        """Loads it again."""
        _program("modprobe", _DISPLAY)

    def reset(self, gpus: Mapping[int, str]) -> str:
        """Resets *gpus* together, PCI addresses by index; this process must not hold them. Returns why that failed."""
        program = shutil.which("nvidia-smi")
        if program is None:
            return "there is no nvidia-smi to reset it with"
        return _execute([program, "--gpu-reset", "-i", ",".join(gpus.values())], _RESET_S) or ""

    def refresh_cdi(self) -> str | None:
        """Makes the CDI specifications of this machine list what stands now, see `cdi.refresh`."""
        return cdi.refresh(self._systemctl, _execute, _ROOT)

    def make_device_files(self) -> str:
        """Makes the device files that tasks need. Returns which could not be made and why, else an empty string."""
        if os.geteuid() != 0 or not missing_files(_ROOT):
            return ""
        program = shutil.which("nvidia-modprobe")
        reasons = ["there is no nvidia-modprobe"]
        if program is not None:
            capabilities = [word for file, _ in _minors(_needed(_ROOT)) for word in ("-f", str(file))]
            commands = [arguments for arguments in (["-u", "-c", "0"], capabilities) if arguments]
            run = (_execute([program, *arguments], _DEVICE_FILES_S) for arguments in commands)
            reasons = [reason for reason in run if reason is not None]
        left = ", ".join(map(str, missing_files(_ROOT)))
        return left and f"{left}: {'; '.join(reasons) or 'nvidia-modprobe did not make it'}"

    def boot_id(self) -> str:
        """Returns the id of this boot of the machine."""
        return _BOOT_ID.read_text(encoding="ascii").strip()

    def reboot(self) -> None:
        """Starts a reboot of the machine; returns before it. Raises `NodeFailed`."""
        reason = self._systemctl("reboot")
        if reason is not None:
            raise NodeFailed(f"the machine cannot be rebooted: {reason}", hint="Reboot it, then run this again.")

    def _systemctl(self, *arguments: str) -> str | None:
        """None where systemctl succeeds, else why it does not."""
        succeeded, output = self._ask_systemctl(*arguments)
        return None if succeeded else output

    def _ask_systemctl(self, *arguments: str) -> tuple[bool, str]:
        """Returns whether systemctl succeeds, and its output."""
        return _program("systemctl", "--no-ask-password", *arguments)


class BareMachine(SystemMachine):
    """A machine of which nothing is touched but its GPUs."""

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        yield

    def holders(self, gpu: int, address: str, instance: InstanceId | None, *, device: bool) -> list[Holder]:
        return []

    def unit(self, pid: int) -> None:
        return None

    def mig_manager(self) -> int | None:
        return None

    def unload_display(self) -> None:
        return None

    def refresh_cdi(self) -> None:
        return None

    def make_device_files(self) -> str:
        return ""

    def _ask_systemctl(self, *arguments: str) -> tuple[bool, str]:
        return False, "services are not touched"


class SimulatedMachine(BareMachine):
    """The machine of simulated GPUs: resets them, has no services, and never reboots the one that it runs on."""

    def __init__(self, driver: Any) -> None:
        self._driver = driver

    def reset(self, gpus: Mapping[int, str]) -> str:
        for index in gpus:
            try:
                self._driver.reset(index)
            except pynvml.NVMLError as error:
                return error_name(error.value)
        return ""

    def boot_id(self) -> str:
        return "simulated"

    def reboot(self) -> None:
        raise NodeFailed("simulated GPUs do not reboot the machine that they are simulated on")


class _Asked(NamedTuple):
    """The boot in which a reboot was last asked for, and its GPUs; None: they are not known."""

    boot: str
    gpus: frozenset[int] | None


class RebootGuard:
    """Allows one reboot of the machine for the pending MIG mode of each GPU.

    *file* remembers it: ``{"boot": ID, "gpus": [INDEX, ...]}``. A GPU is forgotten when its mode is the desired one.
    """

    def __init__(self, file: Path) -> None:
        self._file = file

    def reboot(self, machine: SystemMachine, gpus: Sequence[int], what: str) -> NodeRebooting:
        """Reboots *machine* to get *what* done on *gpus*; returns the exception to raise then.

        Raises `PartitionFailed` after a reboot for any of them before, `NodeFailed` where the machine refuses.
        """
        numbers = ", ".join(map(str, gpus))
        boot = machine.boot_id()
        asked = self._asked()
        if asked is not None and asked.boot != boot and (asked.gpus is None or asked.gpus & set(gpus)):
            raise PartitionFailed(
                f"the node was rebooted to {what} on GPU {numbers}, and it is still pending; it is not rebooted again",
                field=str(self._file),
                given=f"asked for in boot {asked.boot}",
                hint="`nvidia-smi -q -d MIG` and the kernel log (NVRM lines) say what the driver sees. "
                "Remove the file to allow one more reboot.",
            )
        # On the disk before anything else happens: a reboot that is not remembered would come again and again.
        self._keep(_Asked(boot, frozenset(gpus) | ((asked and asked.gpus) or frozenset())))
        try:
            # Also where it was asked for in this boot: that process may have been ended before it could reboot.
            machine.reboot()
        except NodeFailed:
            self._keep(asked)
            raise
        return NodeRebooting(
            f"the node reboots once to {what} on GPU {numbers}",
            hint="When it is up, run this again to make the partitions; a node of a fleet does so by itself.",
        )

    def clear(self, gpus: Sequence[int]) -> None:
        """Forgets a reboot for *gpus* that was successful; that of others is not forgotten."""
        asked = self._asked()
        if asked is not None and not (asked.gpus and asked.gpus.isdisjoint(gpus)):
            left = (asked.gpus or frozenset()) - set(gpus)
            self._keep(_Asked(asked.boot, left) if left else None)

    def _keep(self, asked: _Asked | None) -> None:
        with writing(self._file):
            if asked is None:
                self._file.unlink(missing_ok=True)
                return
            self._file.parent.mkdir(parents=True, exist_ok=True)
        text = json.dumps({"boot": asked.boot, "gpus": sorted(asked.gpus or ())}) + "\n"
        replace_file(self._file, text, durable=True)

    def _asked(self) -> _Asked | None:
        """Returns the last reboot. A file that cannot be read counts for every GPU, because a loop is worse."""
        if not self._file.exists():
            return None
        try:
            read = json.loads(self._file.read_text(encoding="utf-8"))
            return _Asked(str(read["boot"]), frozenset(map(int, read["gpus"])))
        except (ValueError, KeyError, TypeError):
            return _Asked("unknown", None)


def needed_files(root: Path = Path("/")) -> tuple[Path, ...]:
    """Returns the device files that tasks need with the driver below *root*; none where it is not loaded."""
    if not (root / _PROC / "version").exists():
        return ()
    capabilities = (root / "dev/nvidia-caps" / f"nvidia-cap{minor}" for _, minor in _minors(_needed(root)))
    return (root / "dev/nvidia-uvm", *capabilities)


def partition_files(gpu: int, instance: int, compute: int, root: Path = Path("/")) -> tuple[str, ...]:
    """The device files of the MIG device of that compute instance, in a GPU instance of the GPU with the minor *gpu*.

    They are those of the GPU, of the GPU instance and of the compute instance, as paths below /, whatever *root* is.
    Raises OSError where the driver below *root* lists no such instance.
    """
    folder = root / _PROC / f"capabilities/gpu{gpu}/mig/gi{instance}"
    texts = [file.read_text(encoding="ascii") for file in (folder / "access", folder / f"ci{compute}/access")]
    found = [match[1] for text in texts if (match := _MINOR.search(text))]
    if len(found) != len(texts):
        raise OSError(f"{folder}: no DeviceFileMinor")
    return (f"/dev/nvidia{gpu}", *(f"/dev/nvidia-caps/nvidia-cap{minor}" for minor in found))


def missing_files(root: Path = Path("/")) -> tuple[Path, ...]:
    """Returns those of `needed_files` that do not exist."""
    return tuple(file for file in needed_files(root) if not file.exists())


def _capabilities(root: Path, gpu: int | str = _ANY, instance: InstanceId | str = _ANY) -> list[Path]:
    """Returns the files in /proc of the capabilities of a GPU and an instance on it, or of all."""
    patterns = [pattern.format(gpu=gpu, instance=instance) for pattern in _CAPABILITIES]
    if isinstance(instance, tuple):
        patterns = ["gpu{}/mig/gi{}/ci{}/access".format(gpu, *instance)]
    return [file for pattern in patterns for file in sorted((root / _PROC / "capabilities").glob(pattern))]


def _needed(root: Path) -> list[Path]:
    """Returns the capability files that tasks need."""
    files = _capabilities(root)
    return [*files, root / _PROC / "capabilities" / _MONITOR] if files else []


def _minors(files: Iterable[Path]) -> Iterator[tuple[Path, int]]:
    """The file in /proc of each capability, and the minor number of its device file."""
    for file in files:
        try:
            found = _MINOR.search(file.read_text(encoding="ascii", errors="replace"))
        except OSError:  # the partition has just gone
            continue
        if found:
            yield file, int(found[1])


def _wait_for(lock: int) -> None:
    # A person may wait for this process: the log says why it waits.
    timer = threading.Timer(
        _PATIENCE_S, logger.warning, ["another process partitions the GPUs of this machine: waiting for its end"]
    )
    timer.daemon = True
    timer.start()
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
    finally:
        timer.cancel()


def _execute(command: Sequence[str], seconds: float) -> str | None:
    """None where *command* succeeds, else its output in one line."""
    succeeded, output = _output(command, seconds)
    return None if succeeded else output


def _program(name: str, *arguments: str) -> tuple[bool, str]:
    """As `_output`, for a program that this machine may not have."""
    program = shutil.which(name)
    return (False, f"there is no {name}") if program is None else _output([program, *arguments], _SERVICE_S)


def _output(command: Sequence[str], seconds: float) -> tuple[bool, str]:
    """Returns whether *command* succeeds, and its output in one line, or why there is none."""
    try:
        done = subprocess.run(
            command, stdin=DEVNULL, stdout=PIPE, stderr=STDOUT, text=True, errors="replace", timeout=seconds
        )
    except subprocess.TimeoutExpired:
        return False, f"{Path(command[0]).name} has not ended within {seconds:g} s"
    except OSError as error:
        return False, f"{command[0]}: {error.strerror}"
    text = " ".join(done.stdout.split())
    if done.returncode and not text:
        text = f"{Path(command[0]).name} ended with exit code {done.returncode}"
    return done.returncode == 0, text
