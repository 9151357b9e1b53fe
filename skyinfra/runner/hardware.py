"""The accelerators of one node, real or simulated: what is there, and bringing it to the wanted layout."""

from __future__ import annotations

from dataclasses import dataclass

from skyinfra._errors import NotSupported
from skyinfra.runner.inventory import Device
from skyinfra.runner.node import Node
from skyinfra.runner.partitioner import Partition
from skyinfra.runner.state import NodeDirectory


@dataclass(frozen=True)
class Plan:
    """What `Hardware.apply` will do: UUIDs of the partitions that go, indexes of the GPUs whose MIG mode changes."""

    removed: frozenset[str] = frozenset()
    toggled: frozenset[int] = frozenset()


class Hardware:
    """The accelerators that *node* declares."""

    def __init__(self, node: Node, directory: NodeDirectory) -> None:
        self.devices: tuple[Device, ...] = ()
        if node.config.accelerator is not None:
            raise NotSupported("accelerators are not served yet")

    def plan(self, *, partitions: bool) -> Plan:
        """What has to change."""
        return Plan()

    def apply(self, plan: Plan) -> tuple[Partition, ...]:
        """Changes it."""
        return ()
