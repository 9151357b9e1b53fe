"""The accelerators of one node, real or simulated: which exist, and bringing them to the desired layout."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pynvml

from skyinfra import mig
from skyinfra.errors import AcceleratorMissing, SkyinfraError
from skyinfra.gpu import actual, inventory, partitioner, targets
from skyinfra.gpu.amd import partitioner as amd
from skyinfra.gpu.inventory import Device
from skyinfra.gpu.machine import SimulatedMachine, SystemMachine
from skyinfra.gpu.nvml import Nvml
from skyinfra.gpu.partitioner import ApplyOptions, DesiredLayouts, Emit
from skyinfra.mig.steps import Partition, Step
from skyinfra.node.folder import NodeDirectory
from skyinfra.protocol.nodeconfig import NodeConfig


@contextlib.contextmanager
def session(nvml: Nvml) -> Iterator[Nvml]:
    """*nvml*, open. Raises `AcceleratorMissing` where there is no driver."""
    try:
        nvml.open()
    except pynvml.NVMLError as error:
        raise inventory.no_driver(error) from error
    with contextlib.closing(nvml):
        yield nvml


class Hardware:
    """The accelerators that *config* declares, on this node. *root*: the parent of dev/ and sys/.

    Its methods raise `AcceleratorMissing` where they are not there, `DriverTooOld` and `PartitionFailed` where the
    driver does not offer what is declared or refuses.
    """

    def __init__(self, config: NodeConfig, directory: NodeDirectory, *, root: Path = Path("/")) -> None:
        self._simulate = config.simulate
        self._env = config.env
        self._directory = directory
        self._root = root
        # A head without slots has none of the accelerators of the fleet's nodes.
        accelerator = None if config.scheduler_only else config.accelerator
        self._accelerator = accelerator
        self._gpus = accelerator if accelerator is not None and accelerator.vendor == "nvidia" else None
        # What was given to the node is as it should be.
        self._given = config.given and not config.simulate and self._gpus is not None
        self._desired = dict(enumerate(self._gpus.per_gpu)) if self._gpus is not None and not self._given else {}
        self._driver: Any = pynvml
        if self._gpus is not None and config.simulate:
            from skyinfra.gpu.simulated.driver import SimulatedDriver

            seed = f"{config.fleet}/{config.node}"
            self._driver = SimulatedDriver(self._gpus, path=directory.simulated_file, seed=seed)
        self._amd = amd.of(config, directory, root=root)

    def devices(self) -> tuple[Device, ...]:
        """Returns the accelerators by index; empty on a node that declares none."""
        if self._amd is not None:
            return self._amd.devices()
        if self._gpus is not None:
            with self.nvml() as nvml:
                if self._given:
                    return inventory.given(nvml, self._gpus, os.environ)
                return inventory.nvidia(nvml, self._gpus)
        accelerator = self._accelerator
        if accelerator is None:
            return ()
        if self._simulate:
            return inventory.simulated(accelerator)
        return inventory.by_device_files(accelerator, root=self._root, env=self._env)

    def plan(self) -> list[Step]:
        """Returns the steps that `partition` would execute; empty where the actual layout is the desired one."""
        if self._amd is not None:
            return self._amd.plan()
        if self._gpus is None or self._given:
            return []
        with self.nvml() as nvml:
            actual.check_driver(nvml, self._gpus)
            return partitioner.plan(nvml, self._targets(nvml))

    def existing(self) -> tuple[Partition, ...]:
        """Returns the partitions that exist, desired or not; those that cannot be used have no UUID."""
        if self._gpus is None or self._given:
            return ()
        with self.nvml() as nvml:
            return actual.existing(nvml)

    def usable(self) -> tuple[Partition, ...] | None:
        """The `existing` partitions that can be used, with their declared names; None where the driver does not say."""
        try:
            found = [partition for partition in self.existing() if partition.uuid]
        except SkyinfraError:
            return None
        declared = {index: {place.name for place in mig.parts(layout)} for index, layout in self._desired.items()}
        names = [
            mig.same_profile(each.profile, declared.get(each.gpu, ()), device=True) or each.profile for each in found
        ]
        return tuple(replace(each, profile=name) for each, name in zip(found, names, strict=True))

    def choose(self, in_use: Mapping[int, Collection[mig.At]]) -> None:
        """Chooses and keeps the places of the desired partitions, see `targets.choose`. Raises `StateDirectoryError`.

        *in_use*: `Placement.at` of the partitions whose slots have tasks, by GPU.
        """
        if self._gpus is not None and any(self._gpus.layouts) and not self._given:
            targets.choose(self._gpus, self._directory, self.existing(), in_use)

    def partition(self, emit: Emit, *, force: bool = False, reboot: bool = False) -> tuple[Partition, ...]:
        """Brings the GPUs to their desired layouts and returns the partitions. *emit* gets an event for each change.

        For NVIDIA's GPUs *force* and *reboot* are those of `ApplyOptions`. Raises `PartitionBusy` and `NodeRebooting`
        besides.
        """
        if self._amd is not None:
            return self._amd.partition(emit)
        if self._gpus is None or self._given:
            return ()
        options = ApplyOptions(
            machine=SimulatedMachine(self._driver) if self._simulate else SystemMachine(),
            force=force,
            reboot=reboot,
            reboot_file=self._directory.reboot_file,
        )
        with self.nvml() as nvml:
            actual.check_driver(nvml, self._gpus)
            return partitioner.apply(nvml, self._targets(nvml), emit=emit, options=options)

    def actual(self) -> tuple[Partition, ...]:
        """Returns the partitions of GPUs whose actual layout is the desired one; changes nothing."""
        if self._amd is not None:
            return self._amd.actual()
        if self._gpus is None or self._given:
            return ()
        with self.nvml() as nvml:
            return partitioner.actual(nvml, self._targets(nvml))

    def _targets(self, nvml: Nvml) -> DesiredLayouts:
        gpus = self._gpus
        if gpus is None:
            return self._desired
        known = {gpu: layout for gpu, layout in self._desired.items() if targets.legal(layout, gpus)}
        return {**self._desired, **targets.arranged(nvml, known, targets.read(gpus, self._directory))}

    @contextlib.contextmanager
    def nvml(self) -> Iterator[Nvml]:
        """NVML of the NVIDIA GPUs, open. Raises `AcceleratorMissing` where there is no driver, or none is declared."""
        if self._gpus is None:
            raise AcceleratorMissing("this node has no NVIDIA GPUs", field="accelerator")
        with session(Nvml(self._driver)) as nvml:
            yield nvml
