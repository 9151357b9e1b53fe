"""Brings the GPUs of a node to their desired layouts.

Level-triggered: the actual layout (profile, start and size of every GPU instance, and that one compute instance fills
it) is compared with the desired one, and only the difference is touched, so that a second run does nothing and tasks on
other partitions never notice. Every instance is created at an explicit place and in a fixed order: the same layout then
gives the same instances, and with them the same UUIDs, at every boot. Profiles are resolved by name on the device: ids
and names differ between GPUs and drivers.

Nothing is touched before every GPU was checked: that it has MIG, the profiles and their places, and that no process
uses a partition that has to go.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pynvml

from skyinfra.errors import PartitionBusy, PartitionFailed
from skyinfra.gpu.machine import RebootGuard, SystemMachine
from skyinfra.gpu.nvml import Gpu, Nvml, error_name
from skyinfra.gpu.transition import HINTS, RESET_HINT, GpuTransition, Partition, Step, asking, check_no_steps
from skyinfra.mig import Layout
from skyinfra.node import processes

_POLL_S = 0.2
# A process that is ended by force has that long to save what it has.
_FORCE_GRACE_S = 10.0

Emit = Callable[[dict[str, Any]], None]
# The layout of each GPU by its index; an empty one means MIG off. GPUs that are not in it are left alone.
DesiredLayouts = Mapping[int, Layout]


@dataclass(frozen=True)
class ApplyOptions:
    """The means that `apply` may use.

    machine: for services, resets and reboots, and as a lock against other runs; None leaves a mode that stays pending
    to a person. patience_s: how long to wait for a GPU or instance that is in use. force: end the processes that use
    what has to go. reboot: reboot the machine where the driver activates a mode in no other way, once: ``reboot_file``
    remembers it.
    """

    machine: SystemMachine | None = None
    patience_s: float = 10.0
    force: bool = False
    reboot: bool = False
    reboot_file: Path | None = None


def plan(nvml: Nvml, desired: DesiredLayouts) -> list[Step]:
    """The steps to the *desired* layouts, GPU by GPU; empty where they are the actual ones. Changes nothing.

    Raises `PartitionFailed` where NVML refuses to answer, or the GPU has no MIG, no such profile or place.
    """
    return [step for gpu in _checked(nvml, desired, 0) for step in gpu.steps()]


def apply(
    nvml: Nvml, desired: DesiredLayouts, *, emit: Emit = lambda event: None, options: ApplyOptions | None = None
) -> tuple[Partition, ...]:
    """Brings the GPUs to the *desired* layouts and returns their partitions, by GPU and start.

    *emit* gets an event for every change: its ``phase`` is ``mode``, ``clients``, ``reset``, ``reboot``, ``force``,
    ``destroy``, ``create`` or ``cdi``, with ``gpu`` and the fields of a `Step`. The ``message`` of ``devices`` says
    which device files that tasks need could not be made.

    Raises `PartitionFailed` with the GPU, its desired and actual layout and NVML's error; `PartitionBusy` with the
    processes; `NodeRebooting` where a pending mode is activated by a reboot.
    """
    options = options or ApplyOptions()
    with options.machine.alone() if options.machine else contextlib.nullcontext():
        return _Run(nvml, desired, emit, options).apply()


def actual(nvml: Nvml, desired: DesiredLayouts) -> tuple[Partition, ...]:
    """The partitions of GPUs that have the *desired* layouts. Raises `PartitionFailed` where they differ."""
    gpus = _checked(nvml, desired, 0)
    check_no_steps([step for gpu in gpus for step in gpu.steps()])
    return tuple(partition for gpu in gpus for partition in gpu.partitions())


def _transitions(nvml: Nvml, desired: DesiredLayouts, patience_s: float) -> list[GpuTransition]:
    gpus = {gpu.index: gpu for gpu in _gpus(nvml)}
    for index in sorted(desired):
        if index not in gpus:
            raise PartitionFailed(
                f"GPU {index} is not there: the driver sees {len(gpus)} GPUs",
                field=f"accelerator.layouts[{index}]",
                hint="It may have fallen off the bus: the kernel log (NVRM lines) says so. Reboot or replace the node.",
            )
    return [GpuTransition(gpus[index], desired[index], patience_s=patience_s) for index in sorted(desired)]


def _checked(nvml: Nvml, desired: DesiredLayouts, patience_s: float) -> list[GpuTransition]:
    gpus = _transitions(nvml, desired, patience_s)
    for gpu in gpus:
        gpu.check()
    return gpus


def _gpus(nvml: Nvml) -> list[Gpu]:
    with asking("NVML cannot list the GPUs"):
        return nvml.gpus()


class _Run:
    """One `apply`."""

    def __init__(self, nvml: Nvml, desired: DesiredLayouts, emit: Emit, options: ApplyOptions) -> None:
        self._nvml = nvml
        self._desired = desired
        self._emit_event = emit
        self._options = options
        self._changed = False

    def apply(self) -> tuple[Partition, ...]:
        gpus = _checked(self._nvml, self._desired, self._options.patience_s)
        self._free(gpus)
        if any(gpu.mode_differs for gpu in gpus):
            self._switch(gpus)
            # Listed again: a change of the mode voids every handle. And asked again: now every driver answers.
            gpus = _checked(self._nvml, self._desired, self._options.patience_s)
        if self._options.reboot_file is not None:
            RebootGuard(self._options.reboot_file).clear(tuple(self._desired))
        partitions: list[Partition] = []
        for gpu in gpus:
            gpu.change(self._done)
            partitions.extend(gpu.partitions())
        machine = self._options.machine
        if machine is not None and self._changed and machine.refresh_cdi():
            self._emit("cdi")
        if machine is not None and (reason := machine.make_device_files()):
            # The partitions exist; the driver decides whether tasks get by without those files.
            self._emit("devices", message=reason)
        return tuple(partitions)

    def _emit(self, phase: str, **fields: Any) -> None:
        self._emit_event({"phase": phase, **fields})

    def _done(self, step: Step) -> None:
        self._changed = True
        self._emit_event(step.to_event())

    # The processes on what has to go.

    def _free(self, gpus: Sequence[GpuTransition]) -> None:
        """Waits until no process uses what has to go; with ``force``, ends those processes."""
        for gpu in gpus if self._options.force else ():
            for what, pids in gpu.users().items():
                self._emit("force", gpu=gpu.index, what=what, processes=[processes.describe(pid) for pid in pids])
                processes.end(pids, grace_s=_FORCE_GRACE_S)
        deadline = time.monotonic() + self._options.patience_s
        while users := [(gpu, held) for gpu in gpus if (held := gpu.users())]:
            if time.monotonic() >= deadline:
                raise _busy(users)
            time.sleep(_POLL_S)

    # The mode.

    def _switch(self, gpus: Sequence[GpuTransition]) -> None:
        """Sets the desired MIG modes; before MIG is turned off, the instances are destroyed."""
        reasons: dict[int, int] = {}
        for gpu in gpus:
            if gpu.mode_differs:
                gpu.change(self._done)
                reasons[gpu.index] = gpu.set_mode(self._done)
                if gpu.mode_differs:
                    self._emit("mode", gpu=gpu.index, on=gpu.on, pending=True)
        if any(gpu.mode_differs for gpu in gpus):
            self._activate(reasons)

    def _pending(self) -> list[GpuTransition]:
        return [t for t in _transitions(self._nvml, self._desired, self._options.patience_s) if t.mode_differs]

    def _activate(self, reasons: Mapping[int, int]) -> None:
        """Activates the pending modes: without the services that hold the GPUs, by a reset, by one reboot."""
        machine = self._options.machine
        if machine is None:
            raise _stays_pending(self._pending()[0], reasons, "")
        names = machine.stop_clients()
        if names:
            self._emit("clients", stopped=list(names))
        try:
            refused = self._activate_without_clients(machine)
        finally:
            machine.start_clients(names)
        pending = self._pending()
        if not pending:
            return
        file = self._options.reboot_file
        if not self._options.reboot or file is None:
            raise _stays_pending(pending[0], reasons, refused)
        indices = [gpu.index for gpu in pending]
        self._emit("reboot", gpus=indices)
        raise RebootGuard(file).reboot(machine, indices, f"turn MIG {'on' if pending[0].on else 'off'}")

    def _activate_without_clients(self, machine: SystemMachine) -> str:
        """Sets the modes again, then resets. Returns why the reset was refused, or ""."""
        for gpu in self._pending():
            gpu.set_mode(self._done)
        pending = self._pending()
        if not pending:
            return ""
        refused = self._reset(machine, [gpu.gpu for gpu in pending])
        gpus = _gpus(self._nvml)
        if refused and len(gpus) > len(pending) and self._all_idle(gpus):
            # GPUs that are linked by NVLink switches reset only together.
            refused = self._reset(machine, gpus)
        waiting = {gpu.index for gpu in self._pending()}
        for gpu in pending:
            if gpu.index not in waiting:
                self._done(Step(gpu.index, "mode", on=gpu.on))
        return refused

    def _all_idle(self, gpus: Sequence[Gpu]) -> bool:
        """Whether a reset of all GPUs ends no process, and no instance that this run does not create again."""
        try:
            for gpu in gpus:
                mode = gpu.mig_mode()
                foreign = gpu.index not in self._desired and mode is not None and mode[0] and gpu.instances()
                if foreign or gpu.processes():
                    return False
        except pynvml.NVMLError:
            return False
        return True

    def _reset(self, machine: SystemMachine, gpus: Sequence[Gpu]) -> str:
        """Resets *gpus*; returns why that was refused, or "". Raises `PartitionFailed` where a GPU is gone after it."""
        addresses = {gpu.index: gpu.bus_id for gpu in gpus}
        before = _gpus(self._nvml)
        # This session would hold the GPUs.
        self._nvml.close()
        try:
            refused = machine.reset(addresses)
        finally:
            try:
                self._nvml.open()
            except pynvml.NVMLError as error:
                raise PartitionFailed(
                    f"NVML does not answer after a reset: {error_name(error.value)}",
                    field="accelerator",
                    hint="The kernel log (NVRM lines) says what the driver sees; reboot the node.",
                ) from error
        there = {gpu.index: gpu.uuid for gpu in _gpus(self._nvml)}
        for gpu in before:
            if there.get(gpu.index) != gpu.uuid:  # the indices of the others may have changed
                raise PartitionFailed(
                    f"GPU {gpu.index} ({gpu.name}, {gpu.uuid}) is gone after a reset",
                    field=f"accelerator.layouts[{gpu.index}]",
                    hint="The kernel log (NVRM lines) says what the driver sees; reboot or replace the node.",
                )
        result = {"refused": refused} if refused else {}
        self._emit("reset", gpus=list(addresses), **result)
        return refused


def _busy(users: Sequence[tuple[GpuTransition, Mapping[str, Sequence[int]]]]) -> PartitionBusy:
    lines = [
        f"{gpu}: {what} is used by {', '.join(processes.describe(pid) for pid in pids)}"
        for gpu, held in users
        for what, pids in held.items()
    ]
    first = users[0][0]
    return PartitionBusy(
        "; ".join(lines),
        field=first.field,
        hint=f"{first.desired_and_actual()}\n"
        "Nothing was changed. Stop these processes, or add --force, which ends them.",
    )


def _stays_pending(gpu: GpuTransition, reasons: Mapping[int, int], refused: str) -> PartitionFailed:
    status = reasons.get(gpu.index, 0)
    reason = f": {error_name(status)}" if status else ""
    hints = [HINTS[status]] if status == pynvml.NVML_ERROR_IN_USE else []
    holders = ", ".join(processes.describe(pid) for pid in processes.holding("/dev/nvidia"))
    hints += [f"The GPUs are held by {holders}."] if holders else []
    hints += [f"The reset was refused: {refused.rstrip('.')}."] if refused else []
    hints.append(RESET_HINT.format(index=gpu.index))
    word = "on" if gpu.on else "off"
    return gpu.error(f"MIG stays pending instead of {word}; a reset or reboot is needed{reason}", "\n".join(hints))
