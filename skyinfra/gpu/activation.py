"""Activates MIG modes that stay pending: by a reset, without what holds the GPUs, by one reboot of the machine.

Each means is used only where the one before it did not do, because each touches more than it. Without Fabric Manager
and in a reboot ends what runs on all GPUs: both are for a machine whose GPUs are all idle, or for whoever forces it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import pynvml

from skyinfra.errors import NodeError, NodeFailed, PartitionBusy, PartitionFailed
from skyinfra.gpu.holders import FABRIC_MANAGER, Holders
from skyinfra.gpu.machine import RebootGuard, SystemMachine
from skyinfra.gpu.nvml import Gpu, Nvml, error_name
from skyinfra.gpu.transition import HINTS, RESET_HINT, Done, GpuTransition, Step, asking


class Activation:
    """The activation of one run. *pending*: the GPUs whose mode is, read anew; *desired*: those of the run.

    reboot_file: remembers a reboot; None where the machine is not to be rebooted. force: whatever it ends.
    """

    def __init__(
        self,
        nvml: Nvml,
        machine: SystemMachine,
        holders: Holders,
        *,
        pending: Callable[[], list[GpuTransition]],
        desired: Collection[int],
        reboot_file: Path | None,
        force: bool,
        done: Done,
        emit: Callable[[dict[str, Any]], None],
    ) -> None:
        self._nvml = nvml
        self._machine = machine
        self._holders = holders
        self._pending = pending
        self._desired = desired
        self._reboot_file = reboot_file
        self._force = force
        self._done = done
        self._emit = emit
        # Whether the last reset was one of all GPUs.
        self._all_reset = False

    def run(self, reasons: Mapping[int, int]) -> Mapping[int, NodeError]:
        """Activates what is pending; *reasons* has NVML's codes by GPU. Returns why GPUs are left pending.

        Raises `PartitionFailed` where a GPU is gone after a reset, and `NodeRebooting`.
        """
        refused = self._retry()
        if self._held(reasons, refused) and self._holders.unload_display():
            refused = self._retry()
        if self._held(reasons, refused) and self._holders.stop_fabric_manager():
            refused = self._retry(everything=True)
            if not self._all_reset:
                message = (
                    f"{FABRIC_MANAGER} was restarted without a reset of all GPUs: NVLink SHARP may fail until reboot"
                )
                self._emit({"phase": "fabric", "message": message})
        pending = self._pending()
        if not pending or self._reboot_file is None:
            return {gpu.index: self._stays_pending(gpu, reasons, refused) for gpu in pending}
        hurt = "" if self._force else self._holders.hurt()
        if hurt:
            return {gpu.index: _needs_reboot(gpu, hurt) for gpu in pending}
        return self._reboot([gpu.index for gpu in pending], "on" if pending[0].on else "off", self._reboot_file)

    def _reboot(self, gpus: Sequence[int], mode: str, file: Path) -> Mapping[int, NodeError]:
        self._emit({"phase": "reboot", "gpus": gpus})
        try:
            rebooting = RebootGuard(file).reboot(self._machine, gpus, f"turn MIG {mode}")
        except (PartitionFailed, NodeFailed) as error:
            return dict.fromkeys(gpus, error)
        raise rebooting

    def _held(self, reasons: Mapping[int, int], refused: str) -> bool:
        """Whether something holds a GPU whose mode is pending; a virtual machine refuses a reset for other reasons."""
        in_use = "in use" in refused.lower()
        return any(in_use or reasons.get(gpu.index) == pynvml.NVML_ERROR_IN_USE for gpu in self._pending())

    def _retry(self, *, everything: bool = False) -> str:
        """Sets the modes again, then resets. Returns why the reset was refused, or "". everything: reset all GPUs."""
        for gpu in self._pending():
            gpu.set_mode(self._done)
        pending = self._pending()
        gpus = listed(self._nvml)
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

    def _reset(self, gpus: Sequence[Gpu]) -> str:
        """Resets *gpus*; returns why that was refused, or "". Raises `PartitionFailed` where a GPU is gone after it."""
        addresses = {gpu.index: gpu.bus_id for gpu in gpus}
        before = listed(self._nvml)
        # This session would hold the GPUs.
        self._nvml.close()
        try:
            refused = self._machine.reset(addresses)
        finally:
            try:
                self._nvml.open()
            except pynvml.NVMLError as error:
                raise PartitionFailed(
                    f"NVML does not answer after a reset: {error_name(error.value)}",
                    field="accelerator",
                    hint="The kernel log (NVRM lines) says what the driver sees; reboot the node.",
                ) from error
        there = {gpu.index: gpu.uuid for gpu in listed(self._nvml)}
        for gpu in before:
            if there.get(gpu.index) != gpu.uuid:  # the indices of the others may have changed
                raise PartitionFailed(
                    f"GPU {gpu.index} ({gpu.name}, {gpu.uuid}) is gone after a reset",
                    field=f"accelerator.layouts[{gpu.index}]",
                    hint="The kernel log (NVRM lines) says what the driver sees; reboot or replace the node.",
                )
        result = {"refused": refused} if refused else {}
        self._emit({"phase": "reset", "gpus": list(addresses), **result})
        return refused

    def _stays_pending(self, gpu: GpuTransition, reasons: Mapping[int, int], refused: str) -> PartitionFailed:
        held = self._holders.hint(gpu.gpu)
        return stays_pending(gpu, reasons, [held] if held else [], refused)


def listed(nvml: Nvml) -> list[Gpu]:
    """The GPUs by index. Raises `PartitionFailed`."""
    with asking("NVML cannot list the GPUs"):
        return nvml.gpus()


def stays_pending(
    gpu: GpuTransition, reasons: Mapping[int, int], held: Sequence[str] = (), refused: str = ""
) -> PartitionFailed:
    """The error of a mode that stays pending: NVML's codes by GPU, who holds it, and why its reset was refused."""
    status = reasons.get(gpu.index, 0)
    reason = f": {error_name(status)}" if status else ""
    hints = [*held] or ([HINTS[status]] if status == pynvml.NVML_ERROR_IN_USE else [])
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
