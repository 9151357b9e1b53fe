"""Brings the GPUs of a node to their desired layouts.

Level-triggered: the actual layout (profile, start and size of every GPU instance, and that one compute instance fills
it, or which share it) is compared with the desired one, and only the difference is touched, so that a second run does
nothing and tasks on other partitions never notice. Every instance is created at an explicit place and in a fixed order:
the same layout then gives the same instances, and with them the same UUIDs, at every boot. Profiles are resolved by
name on the device: ids and names differ between GPUs and drivers.

Nothing is touched before every GPU was checked: that it has MIG, the profiles and their places, and that no process
uses a partition that has to go. A GPU that then fails does not hold up the others; one error at the end has all.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pynvml

from skyinfra.errors import NodeError, PartitionBusy, PartitionFailed, counted
from skyinfra.gpu.holders import FORCE_GRACE_S, Activation, Holders, listed, stays_pending, work_of
from skyinfra.gpu.machine import BareMachine, RebootGuard, SystemMachine
from skyinfra.gpu.nvml import Gpu, Nvml
from skyinfra.gpu.transition import GpuTransition
from skyinfra.mig import Layout
from skyinfra.mig.manager import OPERATED_HINT, operated
from skyinfra.mig.steps import Partition, Step, check_no_steps
from skyinfra.node import processes

_POLL_S = 0.2

Emit = Callable[[dict[str, Any]], None]
# The layout of each GPU by its index; an empty one means MIG off. GPUs that are not in it are left alone.
DesiredLayouts = Mapping[int, Layout]


@dataclass(frozen=True)
class ApplyOptions:
    """The means that `apply` may use.

    machine: for services, resets and reboots, and as a lock against other runs; None leaves a mode that stays pending
    to a person. patience_s: how long to wait for a GPU or instance that is in use. force: end the processes that use
    what has to go, and whatever ends with Fabric Manager or a reboot. reboot: reboot the machine where the driver
    activates a mode in no other way and nothing computes, once: ``reboot_file`` remembers it.
    """

    machine: SystemMachine | None = None
    patience_s: float = 10.0
    force: bool = False
    reboot: bool = False
    reboot_file: Path | None = None


def plan(nvml: Nvml, desired: DesiredLayouts) -> list[Step]:
    """Returns the steps to the *desired* layouts, GPU by GPU; empty where they are the actual ones. Changes nothing.

    Raises `PartitionFailed` where NVML refuses to answer, or the GPU has no MIG, no such profile or place.
    """
    return [step for gpu in _checked(nvml, desired) for step in gpu.steps()]


def apply(
    nvml: Nvml, desired: DesiredLayouts, *, emit: Emit = lambda event: None, options: ApplyOptions | None = None
) -> tuple[Partition, ...]:
    """Brings the GPUs to the *desired* layouts and returns their partitions, by GPU and start.

    *emit* gets an event for every change: its ``phase`` is ``mode``, ``clients``, ``reset``, ``reboot``, ``force``,
    ``destroy``, ``create`` or ``cdi``, with ``gpu`` and the fields of a `Step`. The ``message`` of ``devices`` says
    which device files that tasks need could not be made, that of ``fabric`` what a restart of Fabric Manager breaks.

    Raises `PartitionFailed` with the GPUs that failed, their desired and actual layouts and NVML's errors;
    `PartitionBusy` with the processes; `NodeRebooting` where a pending mode is activated by a reboot.
    """
    options = options or ApplyOptions()
    with options.machine.alone() if options.machine else contextlib.nullcontext():
        return _Run(nvml, desired, emit, options).apply()


def actual(nvml: Nvml, desired: DesiredLayouts) -> tuple[Partition, ...]:
    """Returns the partitions of GPUs that have the *desired* layouts. Raises `PartitionFailed` where they differ."""
    gpus = _checked(nvml, desired)
    check_no_steps([step for gpu in gpus for step in gpu.steps()])
    return tuple(partition for gpu in gpus for partition in gpu.partitions())


def _transition(gpus: Sequence[Gpu], index: int, desired: Layout, patience_s: float) -> GpuTransition:
    found = next((gpu for gpu in gpus if gpu.index == index), None)
    if found is None:
        raise PartitionFailed(
            f"GPU {index} is not there: the driver sees {counted(len(gpus), 'GPU')}",
            field=f"accelerator.layouts[{index}]",
            hint="It may have fallen off the bus: the kernel log (NVRM lines) says so. Reboot or replace the node.",
        )
    return GpuTransition(found, desired, patience_s=patience_s)


def _checked(nvml: Nvml, desired: DesiredLayouts) -> list[GpuTransition]:
    present = listed(nvml)
    gpus = [_transition(present, index, desired[index], 0) for index in sorted(desired)]
    for gpu in gpus:
        gpu.check()
    return gpus


class _Run:
    """One `apply`. A GPU that fails is left as it is then; the others go on."""

    def __init__(self, nvml: Nvml, desired: DesiredLayouts, emit: Emit, options: ApplyOptions) -> None:
        self._nvml = nvml
        self._desired = desired
        self._emit_event = emit
        self._options = options
        self._changed = False
        self._failed: dict[int, NodeError] = {}
        machine = options.machine or BareMachine()
        self._holders = Holders(machine, lambda: work_of(nvml.gpus()), force=options.force, emit=emit)

    def apply(self) -> tuple[Partition, ...]:
        with self._holders:
            partitions = self._apply()
        if self._failed:
            raise _all_failed(self._failed, len(self._desired))
        return partitions

    def _apply(self) -> tuple[Partition, ...]:
        gpus = self._checked(strictly=True)
        self._check_alone(gpus)
        gpus = self._free(gpus)
        if any(gpu.mode_differs for gpu in gpus):
            self._switch(gpus)
            # Listed again: a change of the mode voids every handle. And asked again: now every driver answers.
            gpus = self._checked()
        if self._options.reboot_file is not None and gpus:
            RebootGuard(self._options.reboot_file).clear([gpu.index for gpu in gpus])
        partitions: list[Partition] = []
        for gpu in gpus:
            with self._noting(gpu.index, gpu.gpu):
                gpu.change(self._done, self._holders.release)
                partitions.extend(gpu.partitions())
        machine = self._options.machine
        if machine is not None and self._changed and (failure := machine.refresh_cdi()) is not None:
            # The partitions exist; containers are given the old ones until it is done by hand.
            self._emit("cdi", **({"message": failure} if failure else {}))
        if machine is not None and (reason := machine.make_device_files()):
            # The partitions exist; the driver decides whether tasks get by without those files.
            self._emit("devices", message=reason)
        return tuple(partitions)

    def _check_alone(self, gpus: Sequence[GpuTransition]) -> None:
        """Refuses a change where the GPU operator would undo it."""
        manager = self._options.machine.mig_manager() if self._options.machine is not None else None
        if manager is not None and any(gpu.steps() for gpu in gpus):
            hint = f"Nothing was changed. {OPERATED_HINT}"
            raise PartitionFailed(operated(processes.describe(manager)), field="accelerator.layouts", hint=hint)

    def _emit(self, phase: str, **fields: Any) -> None:
        self._emit_event({"phase": phase, **fields})

    def _done(self, step: Step) -> None:
        self._changed = True
        self._emit_event(step.to_event())

    # The GPUs that have not failed.

    @contextlib.contextmanager
    def _noting(self, index: int, gpu: Gpu | None = None, *, strictly: bool = False) -> Iterator[None]:
        """Notes the failure of a GPU. strictly: raises where it is the layout's and not the driver's."""
        try:
            yield
        except PartitionFailed as error:
            cause = error.__cause__
            if strictly and cause is None:
                raise
            in_use = isinstance(cause, pynvml.NVMLError) and cause.value == pynvml.NVML_ERROR_IN_USE
            if in_use and gpu is not None and (held := self._holders.hint(gpu)):
                error.hint = f"{error.hint}\n{held}"
            self._failed[index] = error

    def _checked(self, *, strictly: bool = False) -> list[GpuTransition]:
        """Returns the GPUs that are asked for and have not failed.

        strictly: raises `PartitionFailed` where a layout cannot be.
        """
        gpus = self._transitions(self._options.patience_s, strictly=strictly)
        for gpu in gpus:
            with self._noting(gpu.index, strictly=strictly):
                gpu.check()
        return [gpu for gpu in gpus if gpu.index not in self._failed]

    def _transitions(self, patience_s: float, *, strictly: bool = False) -> list[GpuTransition]:
        present = listed(self._nvml)
        found = []
        for index in sorted(set(self._desired) - set(self._failed)):
            with self._noting(index, strictly=strictly):
                found.append(_transition(present, index, self._desired[index], patience_s))
        return found

    # The processes on what has to go.

    def _free(self, gpus: Sequence[GpuTransition]) -> list[GpuTransition]:
        """Waits until no process uses what has to go; with ``force``, ends those processes.

        Returns the GPUs that have not failed.
        """
        unseen: set[int] = set()
        for gpu, held in self._users(gpus) if self._options.force else ():
            for what, pids in held.items():
                self._emit("force", gpu=gpu.index, what=what, processes=[processes.describe(pid) for pid in pids])
                unseen.update(pid for pid in pids if not processes.exists(pid))
                processes.end(pids, grace_s=FORCE_GRACE_S)
        deadline = time.monotonic() + self._options.patience_s
        while users := self._users(gpus):
            if time.monotonic() >= deadline:
                raise _busy(users, unseen if self._options.force else None)
            time.sleep(_POLL_S)
        return [gpu for gpu in gpus if gpu.index not in self._failed]

    def _users(self, gpus: Sequence[GpuTransition]) -> list[tuple[GpuTransition, Mapping[str, Sequence[int]]]]:
        users = []
        for gpu in gpus:
            if gpu.index not in self._failed:
                with self._noting(gpu.index, strictly=True):
                    users.append((gpu, gpu.users()))
        return [(gpu, held) for gpu, held in users if held]

    # The mode.

    def _switch(self, gpus: Sequence[GpuTransition]) -> None:
        """Sets the desired MIG modes; before MIG is turned off, the instances are destroyed."""
        reasons: dict[int, int] = {}
        for gpu in gpus:
            if not gpu.mode_differs:
                continue
            with self._noting(gpu.index, gpu.gpu):
                gpu.change(self._done, self._holders.release)
                reasons[gpu.index] = gpu.set_mode(self._done, self._holders.release)
                if gpu.mode_differs:
                    self._emit("mode", gpu=gpu.index, on=gpu.on, pending=True)
        if self._pending():
            self._failed.update(self._activate(reasons))

    def _pending(self) -> list[GpuTransition]:
        return [gpu for gpu in self._transitions(0) if gpu.mode_differs]

    def _activate(self, reasons: Mapping[int, int]) -> Mapping[int, NodeError]:
        """Activates the pending modes; returns why GPUs are left pending."""
        options = self._options
        if options.machine is None:
            return {gpu.index: stays_pending(gpu, reasons) for gpu in self._pending()}
        return Activation(
            *(self._nvml, options.machine, self._holders),
            pending=self._pending,
            desired=self._desired,
            reboot_file=options.reboot_file if options.reboot else None,
            force=options.force,
            done=self._done,
            emit=self._emit_event,
        ).run(reasons)


def _all_failed(failed: Mapping[int, NodeError], count: int) -> NodeError:
    """One error for all GPUs that failed."""
    # Several may have failed by one.
    errors = list(dict.fromkeys(failed[index] for index in sorted(failed)))
    if len(errors) == 1:
        return errors[0]
    message = f"{len(failed)} of {counted(count, 'GPU')} failed. " + "; ".join(error.message for error in errors)
    hints = [f"{error.field}: {error.hint}" for error in errors if error.hint]
    return PartitionFailed(message, field="accelerator.layouts", hint="\n".join(hints))


def _busy(
    users: Sequence[tuple[GpuTransition, Mapping[str, Sequence[int]]]], unseen: Collection[int] | None
) -> PartitionBusy:
    """unseen: the processes that were not there when they were to be ended by force; None: none was."""
    lines = [
        f"{gpu}: {what} is used by {', '.join(processes.describe(pid) for pid in pids)}"
        for gpu, held in users
        for what, pids in held.items()
    ]
    first = users[0][0]
    return PartitionBusy(
        "; ".join(lines),
        field=first.field,
        hint=f"{first.desired_and_actual()}\nNothing was changed. {_stop_them(users, unseen)}",
    )


def _stop_them(
    users: Sequence[tuple[GpuTransition, Mapping[str, Sequence[int]]]], unseen: Collection[int] | None
) -> str:
    if unseen is None:
        return "Stop these processes, or add --force, which ends them."
    found = []
    for pid in dict.fromkeys(pid for _, held in users for pids in held.values() for pid in pids):
        if pid in unseen:
            found.append(f"--force could not end {pid}: no such process is seen here, so it may be in a container.")
        elif processes.exists(pid):
            found.append(f"--force could not end {processes.describe(pid)}: it may hang in the driver.")
        else:
            found.append(f"The driver still names {pid}, which has ended: run it again.")
    return " ".join(found)
