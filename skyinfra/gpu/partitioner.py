"""Brings the GPUs of a node to the layouts that are wanted.

Level-triggered: what is (profile, start and size of every GPU instance, and that one compute instance fills it) is
compared with what is wanted, and only the difference is touched, so that a second run does nothing and tasks on other
partitions never notice. Every instance is created at an explicit place and in a fixed order: the same layout then
gives the same instances, and with them the same UUIDs, at every boot. Profiles are resolved by name on the device: ids
and names differ between GPUs and drivers.

Nothing is touched before every GPU was checked: that it has MIG, the profiles and their places, and that nobody uses
what has to go.
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
from skyinfra.gpu.machine import Address, Machine
from skyinfra.gpu.nvml import Gpu, Nvml, error_name, error_text
from skyinfra.gpu.reboot import RebootGuard
from skyinfra.gpu.target import HINTS, RESET_HINT, Partition, Step, Target, resolve
from skyinfra.node import processes
from skyinfra.protocol.nodeconfig import NodeAccelerator, PlacedPartition

__all__ = ["Emit", "Means", "Partition", "Step", "Wanted", "apply", "plan", "resolve", "standing", "wanted_of"]

_POLL_S = 0.2
# A process that is ended by force has that long to save what it has.
_FORCE_GRACE_S = 10.0

Emit = Callable[[dict[str, Any]], None]
# The partitions of each GPU by its index; none of them means MIG off. GPUs that are not in it are left alone.
Wanted = Mapping[int, Sequence[PlacedPartition]]


@dataclass(frozen=True)
class Means:
    """What may be done to get there.

    machine: for services, resets and reboots, and so that no other run is at work there meanwhile; None leaves a mode
    that stays pending to a person. patience_s: for how long something that is in use is waited for. force: end the
    processes that use what has to go. reboot: reboot the machine where the driver activates a mode in no other way,
    once: ``reboot_file`` remembers it.
    """

    machine: Machine | None = None
    patience_s: float = 10.0
    force: bool = False
    reboot: bool = False
    reboot_file: Path | None = None


def wanted_of(accelerator: NodeAccelerator) -> Wanted:
    """What a node configuration wants: a layout for every GPU."""
    layouts = accelerator.layouts or ((),) * accelerator.count
    return dict(enumerate(layouts))


def plan(nvml: Nvml, wanted: Wanted) -> list[Step]:
    """The steps from what is to what is *wanted*, GPU by GPU; empty where it stands. Changes nothing.

    Raises `PartitionFailed` where NVML refuses to say what is, or the GPU has no MIG, no such profile or place.
    """
    steps = []
    for target in _targets(nvml, wanted, 0):
        target.check()
        steps += target.steps()
    return steps


def apply(
    nvml: Nvml, wanted: Wanted, *, emit: Emit = lambda event: None, means: Means | None = None
) -> tuple[Partition, ...]:
    """Brings the GPUs to what is *wanted* and returns the partitions that stand then, by GPU and start.

    *emit* gets an event for everything that was done: its ``phase`` is ``mode``, ``clients``, ``reset``, ``reboot``,
    ``force``, ``destroy``, ``create`` or ``cdi``; ``gpu`` and the fields of a `Step` say what of. The
    ``message`` of ``devices`` says which device files that tasks need could not be made.

    Raises `PartitionFailed` with the GPU, what was wanted, what was found and NVML's error; `PartitionBusy` with the
    processes; `NodeRebooting` where a pending mode is activated by a reboot.
    """
    run = _Run(nvml, wanted, emit, means or Means())
    with means.machine.alone() if means and means.machine else contextlib.nullcontext():
        return run.apply()


def standing(nvml: Nvml, wanted: Wanted) -> tuple[Partition, ...]:
    """The partitions of a node that stands as *wanted*. Raises `PartitionFailed` where it does not."""
    steps = plan(nvml, wanted)
    if steps:
        raise PartitionFailed(
            "the GPUs do not stand as declared",
            field="accelerator.layouts",
            hint="\n".join([*map(str, steps), "Run `sudo skyinfra-runner partition` with the same configuration."]),
        )
    return tuple(p for target in _targets(nvml, wanted, 0) for p in target.partitions())


def _targets(nvml: Nvml, wanted: Wanted, patience_s: float) -> list[Target]:
    gpus = {gpu.index: gpu for gpu in _gpus(nvml)}
    for index in sorted(wanted):
        if index not in gpus:
            raise PartitionFailed(
                f"GPU {index} is not there: the driver sees {len(gpus)} GPUs",
                field=f"accelerator.layouts[{index}]",
                hint="It may have fallen off the bus: the kernel log (NVRM lines) says so. Reboot or replace the node.",
            )
    return [Target(gpus[index], wanted[index], patience_s=patience_s) for index in sorted(wanted)]


def _gpus(nvml: Nvml) -> list[Gpu]:
    try:
        return nvml.gpus()
    except pynvml.NVMLError as error:
        raise PartitionFailed(
            f"NVML cannot list the GPUs: {error_text(error)}",
            field="accelerator",
            hint=HINTS.get(error.value, "`nvidia-smi -q` and the kernel log say what the driver sees."),
        ) from error


class _Run:
    """One `apply`."""

    def __init__(self, nvml: Nvml, wanted: Wanted, emit: Emit, means: Means) -> None:
        self._nvml = nvml
        self._wanted = wanted
        self._emit_event = emit
        self._means = means
        self._changed = False

    def apply(self) -> tuple[Partition, ...]:
        targets = self._check()
        self._free(targets)
        if any(target.mode_differs for target in targets):
            self._switch(targets)
            # Listed again: a change of the mode voids every handle. And asked again: now every driver answers.
            targets = self._check()
        if self._means.reboot_file is not None:
            RebootGuard(self._means.reboot_file).clear(tuple(self._wanted))
        partitions: list[Partition] = []
        for target in targets:
            if target.on:
                target.destroy_unwanted(self._done)
                target.create_missing(self._done)
            partitions.extend(target.partitions())
        if self._changed and self._means.machine is not None and self._means.machine.refresh_cdi():
            self._emit("cdi")
        if self._means.machine is not None and (reason := self._means.machine.make_device_files()):
            # The partitions stand; whether tasks get by without those files is the driver's to say.
            self._emit("devices", message=reason)
        return tuple(partitions)

    def _emit(self, phase: str, **fields: Any) -> None:
        self._emit_event({"phase": phase, **fields})

    def _done(self, step: Step) -> None:
        self._changed = True
        self._emit_event(step.to_event())

    def _check(self) -> list[Target]:
        targets = _targets(self._nvml, self._wanted, self._means.patience_s)
        for target in targets:
            target.check()
        return targets

    # Who uses what has to go.

    def _free(self, targets: Sequence[Target]) -> None:
        """Waits until nobody uses what has to go; ends those who do where that was asked for."""
        if self._means.force:
            self._end_users(targets)
        deadline = time.monotonic() + self._means.patience_s
        while users := [(target, held) for target in targets if (held := target.users())]:
            if time.monotonic() >= deadline:
                raise _busy(users)
            time.sleep(_POLL_S)

    def _end_users(self, targets: Sequence[Target]) -> None:
        for target in targets:
            for what, pids in target.users().items():
                self._emit("force", gpu=target.index, what=what, processes=[processes.describe(pid) for pid in pids])
                processes.end(pids, grace_s=_FORCE_GRACE_S)

    # The mode.

    def _switch(self, targets: Sequence[Target]) -> None:
        """Turns MIG on and off where it has to be, destroying the instances before off."""
        reasons: dict[int, int] = {}
        for target in targets:
            if target.mode_differs:
                target.destroy_unwanted(self._done)
                reasons[target.index] = target.set_mode()
                self._report_mode(target)
        if any(target.mode_differs for target in targets):
            self._activate(reasons)

    def _report_mode(self, target: Target) -> None:
        if target.mode_differs:
            self._emit("mode", gpu=target.index, on=target.on, pending=True)
        else:
            self._done(Step(target.index, "mode", on=target.on))

    def _pending(self) -> list[Target]:
        return [t for t in _targets(self._nvml, self._wanted, self._means.patience_s) if t.mode_differs]

    def _activate(self, reasons: Mapping[int, int]) -> None:
        """Gets the pending modes active: without the services that hold the GPUs, by a reset, by one reboot."""
        machine = self._means.machine
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
        file = self._means.reboot_file
        if not self._means.reboot or file is None:
            raise _stays_pending(pending[0], reasons, refused)
        indices = [target.index for target in pending]
        self._emit("reboot", gpus=indices)
        raise RebootGuard(file).reboot(machine, indices, f"turn MIG {'on' if pending[0].on else 'off'}")

    def _activate_without_clients(self, machine: Machine) -> str:
        """Asks again, then resets. Empty, or why the reset was refused."""
        for target in self._pending():
            target.set_mode()
            if not target.mode_differs:
                self._done(Step(target.index, "mode", on=target.on))
        pending = self._pending()
        if not pending:
            return ""
        refused = self._reset(machine, pending)
        gpus = _gpus(self._nvml)
        if refused and len(gpus) > len(pending) and self._all_idle():
            # GPUs that are linked by NVLink switches reset only together.
            refused = self._reset(machine, [Target(gpu, self._wanted.get(gpu.index, ())) for gpu in gpus])
        waiting = {target.index for target in self._pending()}
        for target in pending:
            if target.index not in waiting:
                self._done(Step(target.index, "mode", on=target.on))
        return refused

    def _all_idle(self) -> bool:
        """Whether a reset of all GPUs disturbs nobody: no process, and no instance that is not ours to make again."""
        for gpu in _gpus(self._nvml):
            try:
                mode = gpu.mig_mode()
                foreign = gpu.index not in self._wanted and mode is not None and mode[0] and gpu.instances()
                if foreign or gpu.processes():
                    return False
            except pynvml.NVMLError:
                return False
        return True

    def _reset(self, machine: Machine, targets: Sequence[Target]) -> str:
        addresses = [Address(target.index, target.gpu.bus_id) for target in targets]
        before = _gpus(self._nvml)
        # This very session would hold them.
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
        _check_same(before, _gpus(self._nvml))
        result = {"refused": refused} if refused else {}
        self._emit("reset", gpus=[address.index for address in addresses], **result)
        return refused


def _check_same(before: Sequence[Gpu], after: Sequence[Gpu]) -> None:
    """Refuses to go on where a GPU is gone, because the indices of others are not what they were."""
    there = {gpu.index: gpu.uuid for gpu in after}
    for gpu in before:
        if there.get(gpu.index) != gpu.uuid:
            raise PartitionFailed(
                f"GPU {gpu.index} ({gpu.name}, {gpu.uuid}) is gone after a reset",
                field=f"accelerator.layouts[{gpu.index}]",
                hint="The kernel log (NVRM lines) says what the driver sees; reboot or replace the node.",
            )


def _busy(users: Sequence[tuple[Target, Mapping[str, Sequence[int]]]]) -> PartitionBusy:
    lines = [
        f"{target}: {what} is used by {', '.join(processes.describe(pid) for pid in pids)}"
        for target, held in users
        for what, pids in held.items()
    ]
    first = users[0][0]
    return PartitionBusy(
        "; ".join(lines),
        field=first.field,
        hint=f"{first.wanted_and_found()}\nNothing was changed. Stop these processes, or add --force, which ends them.",
    )


def _stays_pending(target: Target, reasons: Mapping[int, int], refused: str) -> PartitionFailed:
    status = reasons.get(target.index, 0)
    reason = f": {error_name(status)}" if status else ""
    hints = [HINTS[status]] if status == pynvml.NVML_ERROR_IN_USE else []
    holders = ", ".join(processes.describe(pid) for pid in processes.holding("/dev/nvidia"))
    hints += [f"The GPUs are held by {holders}."] if holders else []
    hints += [f"The reset was refused: {refused.rstrip('.')}."] if refused else []
    hints.append(RESET_HINT.format(index=target.index))
    word = "on" if target.on else "off"
    return target.error(f"MIG stays pending instead of {word}; a reset or reboot is needed{reason}", "\n".join(hints))
