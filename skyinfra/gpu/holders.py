"""Processes that hold a GPU or a partition, and the services among them, stopped while it changes.

NVML lists the processes that compute or draw. A monitor is on none of its lists, but the device files that it has open
hold a GPU as well: the driver answers that a partition is in use (NVIDIA/DCGM issues 95 and 276), or leaves a MIG mode
pending and refuses the reset (NVIDIA/gpu-operator issue 118 of persistenced, NVIDIA/mig-parted issue 181 of
nvidia_drm). Services that hold this GPU are stopped, no others, and started again after the change, whatever comes of
it.

What computes is never stopped here, nor a service with which it would end. Fabric Manager serves all GPUs: CUDA
programs may end with it, and unless the GPUs are reset before it starts again, NVLink SHARP fails until a reboot
(NVIDIA/nccl issue 1488).

A MIG mode that stays pending is activated by a reset, without what holds the GPU, by one reboot of the machine: each of
these only where the one before it did not do, because each touches more than it. Without Fabric Manager and in a reboot
ends what runs on all GPUs: both are for a machine whose GPUs are all idle, or for whoever forces it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

import pynvml

from skyinfra.errors import NodeError, NodeFailed, PartitionBusy, PartitionFailed
from skyinfra.gpu.machine import Holder, InstanceId, RebootGuard, SystemMachine
from skyinfra.gpu.nvml import Gpu, Nvml, error_name
from skyinfra.gpu.transition import HINTS, RESET_HINT, Done, GpuTransition, asking
from skyinfra.mig.steps import Step
from skyinfra.node import processes

FABRIC_MANAGER = "nvidia-fabricmanager.service"
# Not stopped for one GPU: what runs tasks and containers, and what people are logged in by.
_KEPT = frozenset(
    {
        FABRIC_MANAGER,
        "skyinfra-runner.service",
        "skyinfra-partition.service",
        "kubelet.service",
        "containerd.service",
        "crio.service",
        "docker.service",
        "slurmd.service",
        "systemd-logind.service",
        "display-manager.service",
        "gdm.service",
        "lightdm.service",
        "sddm.service",
        "ssh.service",
        "sshd.service",
    }
)
# A process that is ended by force has that long to save what it has.
FORCE_GRACE_S = 10.0

# The processes that compute or draw, and the GPUs that they do it on.
Work = Mapping[int, Collection[int]]


class Holders:
    """The holders of the GPUs of one run of the partitioner. A context: at its end, what it stopped is started again.

    *work*: asks NVML, and raises its errors. *force*: end the holders that are no services, and stop Fabric Manager
    whatever computes. *emit* gets the events ``clients`` and ``force``.
    """

    def __init__(
        self, machine: SystemMachine, work: Callable[[], Work], *, force: bool, emit: Callable[[dict[str, Any]], None]
    ) -> None:
        self._machine = machine
        self._work = work
        self._force = force
        self._emit = emit
        self._stopped: list[str] = []
        self._unloaded = False
        self._ended: set[int] = set()
        # The service that this process is of, if any, would take it along.
        self._kept = _KEPT | {machine.unit(os.getpid()) or FABRIC_MANAGER}
        # Why a service, or the kernel's module, was not stopped.
        self._refused: dict[str, str] = {}

    def __enter__(self) -> Holders:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._unloaded:
            self._machine.load_display()
        if self._stopped:
            self._machine.start(self._stopped)

    def release(self, gpu: Gpu, instance: InstanceId | None, over: bool) -> bool:
        """Stops the services that hold *gpu*, or the instance on it with that id; with force, ends other holders.

        Returns whether there were any. Who has a capability of the instance open holds it. Where nobody has, those go
        that have the GPU open, once patience is *over*.
        """
        found = self._holders(gpu, instance, device=over or instance is None)
        computing = self._computing() if found else None
        if computing is None:
            return False
        services = dict.fromkeys(each.service for each in found if each.service is not None)
        stopped = [name for name in services if self._may_stop(name, computing) and self._stop(name, gpu)]
        others = [each for each in found if each.pid not in computing and self._by_force(each, computing)]
        self._end(others, gpu)
        return bool(stopped or others)

    def stop_fabric_manager(self) -> bool:
        """Stops Fabric Manager, if it runs, where no GPU of the machine computes, or force says so."""
        if FABRIC_MANAGER in self._stopped or not self._machine.is_active(FABRIC_MANAGER):
            return False
        reason = self.hurt() if not self._force else ""
        if reason:
            self._refused[FABRIC_MANAGER] = f"CUDA programs may end with it: {reason}"
            return False
        return self._ends_alone(FABRIC_MANAGER, ()) and self._stop(FABRIC_MANAGER, None)

    def unload_display(self) -> bool:
        """Unloads nvidia_drm, if it is loaded and unused; `__exit__` loads it again. Returns whether it did."""
        self._unloaded = True
        reason = self._machine.unload_display()
        self._unloaded = reason == ""
        if reason:
            self._refused["nvidia_drm"] = reason
        elif self._unloaded:
            self._emit({"phase": "clients", "stopped": ["nvidia_drm"]})
        return self._unloaded

    def hurt(self) -> str:
        """Returns the processes that compute, by GPU, with their services; "" where none does."""
        try:
            work = self._work()
        except pynvml.NVMLError:
            return "NVML does not say what computes on which GPU"
        gpus = sorted({gpu for there in work.values() for gpu in there})
        return "; ".join(
            f"GPU {gpu}: {self._described(p for p, there in work.items() if gpu in there)}" for gpu in gpus
        )

    def hint(self, gpu: Gpu, instance: InstanceId | None = None) -> str:
        """Returns the holders of *gpu*, and why they were not stopped; "" where that is not known."""
        try:
            found = self._holders(gpu, instance, device=True)
        except pynvml.NVMLError:
            return ""
        computing = self._computing() or {}
        lines = [f"It is held by {self._described([each.pid])}{self._why(each, computing)}." for each in found]
        left = {name: reason for name, reason in self._refused.items() if name not in {each.unit for each in found}}
        return "\n".join([*lines, *(f"{name} was not stopped: {reason.rstrip('.')}." for name, reason in left.items())])

    def _holders(self, gpu: Gpu, instance: InstanceId | None, *, device: bool) -> list[Holder]:
        return self._machine.holders(gpu.minor, gpu.bus_id, instance, device=device)

    def _computing(self) -> dict[int | str, Collection[int]] | None:
        """Returns the GPUs on which each process and each service computes; None where NVML does not say it."""
        try:
            work = self._work()
        except pynvml.NVMLError:
            return None
        found: dict[int | str, Collection[int]] = {}
        for pid, gpus in work.items():
            found[pid] = gpus
            unit = self._machine.unit(pid)
            if unit is not None:
                found[unit] = {*found.get(unit, ()), *gpus}
        return found

    def _may_stop(self, service: str, computing: Collection[int | str]) -> bool:
        known = service in self._stopped or service in self._kept or service in computing
        return not known and self._ends_alone(service, computing)

    def _ends_alone(self, service: str, computing: Collection[int | str]) -> bool:
        """Returns whether nothing that is to go on stops with it."""
        others = self._machine.with_dependents(service)[1:]
        ending = [name for name in others if name in self._kept or name in computing]
        if ending:
            self._refused[service] = f"{', '.join(ending)} would end with it"
        return not ending

    def _stop(self, service: str, gpu: Gpu | None) -> bool:
        group = self._machine.with_dependents(service)
        # Before it is stopped: whoever ends this process meanwhile, it is started again. So is one that is not stopped
        # in time: it may still end later.
        self._stopped += [name for name in group if name not in self._stopped]
        reason = self._machine.stop(service)
        if reason:
            self._refused[service] = reason
            return False
        at = {} if gpu is None else {"gpu": gpu.index}
        self._emit({"phase": "clients", **at, "stopped": list(group)})
        return True

    def _by_force(self, holder: Holder, computing: Collection[int | str]) -> bool:
        kept = holder.service is not None or holder.unit in computing or holder.pid in self._ended
        return self._force and not kept

    def _end(self, holders: Collection[Holder], gpu: Gpu) -> None:
        pids = [each.pid for each in holders]
        if pids:
            described = [processes.describe(pid) for pid in pids]
            self._emit({"phase": "force", "gpu": gpu.index, "what": "the device files", "processes": described})
            self._ended.update(pids)
            processes.end(pids, grace_s=FORCE_GRACE_S)

    def _why(self, holder: Holder, computing: Mapping[int | str, Collection[int]]) -> str:
        """Returns why a holder is still there, for a message."""
        unit = holder.unit
        gpus = computing.get(holder.pid) or (computing.get(unit, ()) if unit is not None else ())
        if gpus:
            return f", which computes on GPU {', '.join(map(str, sorted(gpus)))}"
        if unit in self._refused:
            return f", which was not stopped: {self._refused[unit].rstrip('.')}"
        if holder.service is None:
            return ", which is no service: end it, or add --force"
        return ", which is not stopped for one GPU" if unit in self._kept else ""

    def _described(self, pids: Iterable[int]) -> str:
        units = ((processes.describe(pid), self._machine.unit(pid)) for pid in pids)
        return ", ".join(text if unit is None else f"{text} of {unit}" for text, unit in units)


def work_of(gpus: Iterable[Gpu]) -> dict[int, set[int]]:
    """Returns the processes that compute or draw on *gpus*. Raises ``pynvml.NVMLError``."""
    found: dict[int, set[int]] = {}
    for gpu in gpus:
        for pid in gpu.processes():
            found.setdefault(pid, set()).add(gpu.index)
    return found


@dataclass
class Activation:
    """The activation of one run. *pending*: the GPUs whose mode is, read anew; *desired*: those of the run.

    reboot_file: remembers a reboot; None where the machine is not to be rebooted. force: whatever it ends.
    """

    nvml: Nvml
    machine: SystemMachine
    holders: Holders
    pending: Callable[[], list[GpuTransition]]
    desired: Collection[int]
    reboot_file: Path | None
    force: bool
    done: Done
    emit: Callable[[dict[str, Any]], None]
    # Whether the last reset was one of all GPUs.
    _all_reset: bool = field(default=False, init=False)

    def run(self, reasons: Mapping[int, int]) -> Mapping[int, NodeError]:
        """Activates what is pending; *reasons* has NVML's codes by GPU. Returns why GPUs are left pending.

        Raises `PartitionFailed` where a GPU is gone after a reset, and `NodeRebooting`.
        """
        refused = self._retry()
        if self._held(reasons, refused) and self.holders.unload_display():
            refused = self._retry()
        if self._held(reasons, refused) and self.holders.stop_fabric_manager():
            refused = self._retry(everything=True)
            if not self._all_reset:
                message = (
                    f"{FABRIC_MANAGER} was restarted without a reset of all GPUs: NVLink SHARP may fail until reboot"
                )
                self.emit({"phase": "fabric", "message": message})
        pending = self.pending()
        if not pending or self.reboot_file is None:
            return {gpu.index: stays_pending(gpu, reasons, self.holders.hint(gpu.gpu), refused) for gpu in pending}
        hurt = "" if self.force else self.holders.hurt()
        if hurt:
            return {gpu.index: _needs_reboot(gpu, hurt) for gpu in pending}
        return self._reboot([gpu.index for gpu in pending], "on" if pending[0].on else "off", self.reboot_file)

    def _reboot(self, gpus: Sequence[int], mode: str, file: Path) -> Mapping[int, NodeError]:
        self.emit({"phase": "reboot", "gpus": gpus})
        try:
            rebooting = RebootGuard(file).reboot(self.machine, gpus, f"turn MIG {mode}")
        except (PartitionFailed, NodeFailed) as error:
            return dict.fromkeys(gpus, error)
        raise rebooting

    def _held(self, reasons: Mapping[int, int], refused: str) -> bool:
        """Whether something holds a GPU whose mode is pending; a virtual machine refuses a reset for other reasons."""
        in_use = "in use" in refused.lower()
        return any(in_use or reasons.get(gpu.index) == pynvml.NVML_ERROR_IN_USE for gpu in self.pending())

    def _retry(self, *, everything: bool = False) -> str:
        """Sets the modes again, then resets. Returns why the reset was refused, or "". everything: reset all GPUs."""
        for gpu in self.pending():
            gpu.set_mode(self.done)
        pending = self.pending()
        gpus = listed(self.nvml)
        # GPUs that are linked by NVLink switches reset only together.
        attempts = [[gpu.gpu for gpu in pending], gpus if self._all_idle(gpus) else []]
        refused = ""
        for group in reversed(attempts) if everything else attempts:
            if not group or not (pending or everything):
                continue
            refused = self._reset(group)
            self._all_reset = not refused and len(group) == len(gpus)
            if not refused:
                break
        waiting = {gpu.index for gpu in self.pending()}
        for gpu in pending:
            if gpu.index not in waiting:
                self.done(Step(gpu.index, "mode", on=gpu.on))
        return refused

    def _all_idle(self, gpus: Sequence[Gpu]) -> bool:
        """Returns whether a reset of all GPUs ends no process, and no instance that this run does not create again."""
        try:
            for gpu in gpus:
                foreign = gpu.index not in self.desired and gpu.is_partitioned and gpu.instances()
                if foreign or gpu.processes():
                    return False
        except pynvml.NVMLError:
            return False
        return True

    def _reset(self, gpus: Sequence[Gpu]) -> str:
        """Resets *gpus*; returns why that was refused, or "". Raises `PartitionFailed` where a GPU is gone after it."""
        addresses = {gpu.index: gpu.bus_id for gpu in gpus}
        before = listed(self.nvml)
        # This session would hold the GPUs.
        self.nvml.close()
        try:
            refused = self.machine.reset(addresses)
        finally:
            try:
                self.nvml.open()
            except pynvml.NVMLError as error:
                raise PartitionFailed(
                    f"NVML does not answer after a reset: {error_name(error.value)}",
                    field="accelerator",
                    hint="The kernel log (NVRM lines) says what the driver sees; reboot the node.",
                ) from error
        there = {gpu.index: gpu.uuid for gpu in listed(self.nvml)}
        for gpu in before:
            if there.get(gpu.index) != gpu.uuid:  # the indices of the others may have changed
                raise PartitionFailed(
                    f"GPU {gpu.index} ({gpu.name}, {gpu.uuid}) is gone after a reset",
                    field=f"accelerator.layouts[{gpu.index}]",
                    hint="The kernel log (NVRM lines) says what the driver sees; reboot or replace the node.",
                )
        result = {"refused": refused} if refused else {}
        self.emit({"phase": "reset", "gpus": list(addresses), **result})
        return refused


def listed(nvml: Nvml) -> list[Gpu]:
    """Returns the GPUs by index. Raises `PartitionFailed`."""
    with asking("NVML cannot list the GPUs"):
        return nvml.gpus()


def stays_pending(gpu: GpuTransition, reasons: Mapping[int, int], held: str = "", refused: str = "") -> PartitionFailed:
    """The error of a mode that stays pending: NVML's codes by GPU, who holds it, and why its reset was refused."""
    status = reasons.get(gpu.index, 0)
    reason = f": {error_name(status)}" if status else ""
    hints = [held or HINTS[status]] if held or status == pynvml.NVML_ERROR_IN_USE else []
    hints += [f"The reset was refused: {refused.rstrip('.')}."] if refused else []
    hints.append(RESET_HINT.format(index=gpu.index))
    word = "on" if gpu.on else "off"
    return gpu.error(f"MIG stays pending instead of {word}; a reset or reboot is needed{reason}", "\n".join(hints))


def _needs_reboot(gpu: GpuTransition, hurt: str) -> PartitionBusy:
    return PartitionBusy(
        f"{gpu}: its MIG mode needs a reboot, which would end what computes on this machine: {hurt}",
        field=gpu.field,
        hint=f"{gpu.desired_and_actual()}\nRun it again when that has ended, or with --force, which reboots anyway.",
    )
