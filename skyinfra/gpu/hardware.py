"""The accelerators of one node, real or simulated: which exist, and bringing them to the desired layout."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pynvml

from skyinfra.errors import AcceleratorMissing
from skyinfra.gpu import inventory, live, partitioner
from skyinfra.gpu.amd import partitioner as amd
from skyinfra.gpu.inventory import Device
from skyinfra.gpu.machine import SimulatedMachine, SystemMachine
from skyinfra.gpu.nvml import Nvml
from skyinfra.gpu.partitioner import ApplyOptions, Emit
from skyinfra.gpu.transition import Partition, Step
from skyinfra.node.folder import NodeDirectory
from skyinfra.protocol.nodeconfig import NodeAccelerator, NodeConfig


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
        self._config = config
        self._directory = directory
        self._root = root
        # A head without slots has none of the accelerators of the fleet's nodes.
        accelerator = None if config.scheduler_only else config.accelerator
        self._accelerator = accelerator
        self._gpus = accelerator if accelerator is not None and accelerator.vendor == "nvidia" else None
        self._amd = amd.of(config, directory, root=root)

    def devices(self) -> tuple[Device, ...]:
        """The accelerators by index; empty on a node that declares none."""
        if self._amd is not None:
            return self._amd.devices()
        if self._gpus is not None:
            with self._nvml(self._gpus) as nvml:
                return inventory.nvidia(nvml, self._gpus)
        accelerator = self._accelerator
        if accelerator is None:
            return ()
        if self._config.simulate:
            return inventory.simulated(accelerator)
        return inventory.by_device_files(accelerator, root=self._root)

    def plan(self) -> list[Step]:
        """The steps that `partition` would execute; empty where the actual layout is the desired one."""
        if self._amd is not None:
            return self._amd.plan()
        if self._gpus is None:
            return []
        with self._nvml(self._gpus) as nvml:
            live.check_driver(nvml, self._gpus)
            return partitioner.plan(nvml, dict(enumerate(self._gpus.per_gpu)))

    def partition(self, emit: Emit, *, force: bool = False, reboot: bool = False) -> tuple[Partition, ...]:
        """Brings the GPUs to their desired layouts and returns the partitions. *emit* gets an event for each change.

        For NVIDIA's GPUs *force* and *reboot* are those of `ApplyOptions`. Raises `PartitionBusy` and `NodeRebooting`
        besides.
        """
        if self._amd is not None:
            return self._amd.partition(emit)
        if self._gpus is None:
            return ()
        driver = self._driver(self._gpus)
        options = ApplyOptions(
            machine=SimulatedMachine(driver) if self._config.simulate else SystemMachine(),
            force=force,
            reboot=reboot,
            reboot_file=self._directory.reboot_file,
        )
        with self._nvml(self._gpus) as nvml:
            live.check_driver(nvml, self._gpus)
            return partitioner.apply(nvml, dict(enumerate(self._gpus.per_gpu)), emit=emit, options=options)

    def actual(self) -> tuple[Partition, ...]:
        """The partitions of GPUs whose actual layout is the desired one; changes nothing."""
        if self._amd is not None:
            return self._amd.actual()
        if self._gpus is None:
            return ()
        with self._nvml(self._gpus) as nvml:
            return partitioner.actual(nvml, dict(enumerate(self._gpus.per_gpu)))

    @contextlib.contextmanager
    def nvml(self) -> Iterator[Nvml]:
        """NVML of the NVIDIA GPUs, open. Raises `AcceleratorMissing` where there is no driver, or none is declared."""
        if self._gpus is None:
            raise AcceleratorMissing("this node has no NVIDIA GPUs", field="accelerator")
        with self._nvml(self._gpus) as nvml:
            yield nvml

    @contextlib.contextmanager
    def _nvml(self, gpus: NodeAccelerator) -> Iterator[Nvml]:
        with session(Nvml(self._driver(gpus))) as nvml:
            yield nvml

    def _driver(self, gpus: NodeAccelerator) -> Any:
        if not self._config.simulate:
            return pynvml
        from skyinfra.gpu.simulated.driver import SimulatedDriver

        seed = f"{self._config.fleet}/{self._config.node}"
        return SimulatedDriver(gpus, path=self._directory.simulated_file, seed=seed)
