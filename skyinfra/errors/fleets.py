"""Errors of fleets and their nodes. See `skyinfra.errors` for the whole tree."""

from __future__ import annotations

from skyinfra.errors.base import SkyinfraError


class FleetError(SkyinfraError):
    """A fleet cannot be used."""


class FleetNotDeployed(FleetError):
    """No fleet is deployed under that name."""


class FleetUnreachable(FleetError):
    """The fleet is deployed, but its head does not answer."""


class BootFailed(FleetUnreachable):
    """A step of the head's first boot failed; the message carries the step and the end of its output."""


class CredentialsRefused(FleetError):
    """The head does not accept the fleet secret of this client."""


class VersionMismatch(FleetError):
    """The fleet runs another Python or another version of Dask than the client; tasks cannot be shipped."""


class UpgradeFailed(FleetError):
    """The fleet was not upgraded; it serves with the runner that it had."""


class UnsafeAnswer(FleetError):
    """The answer to a question would run code here if it was read as Dask reads it; it was not read."""


class TooLittleMeasured(FleetError):
    """Too few tasks ran, or too little is known of them, to say which layout they need."""


class InvalidManifest(FleetError):
    """The manifest cannot be read."""


class NodeError(SkyinfraError):
    """A node cannot follow its configuration."""


class InvalidNodeConfig(NodeError):
    """The node configuration cannot be read."""

    exit_code = 2


class AcceleratorMissing(NodeError):
    """The node does not have the declared accelerators."""


class PartitionFailed(NodeError):
    """The driver refused a step towards the layout."""


class PartitionBusy(PartitionFailed):
    """Processes use a partition that has to go, or would end with a reboot; the message lists them."""


class NodeRebooting(NodeError):
    """The node reboots, because the driver activates a pending MIG mode in no other way."""


class PortTaken(NodeError):
    """Another process listens on the port."""


class StateDirectoryError(NodeError):
    """The node's directory is full or cannot be written."""


class NodeFailed(NodeError):
    """A node did not come up; the message carries its log."""
