"""Errors of fleets and their nodes. See `skyinfra.errors` for the whole tree."""

from __future__ import annotations

from skyinfra.errors.base import SkyinfraError


class FleetError(SkyinfraError):
    """A fleet cannot be used."""


class FleetNotDeployed(FleetError):
    """No fleet is deployed under that name.

    Cure: run `skyinfra deploy`, or name a fleet that `skyinfra status` shows.
    """


class FleetUnreachable(FleetError):
    """The fleet is deployed, but its head does not answer.

    Cure: look whether the head runs (`skyinfra status`) and whether `allow_cidrs` has your address.
    """


class BootFailed(FleetUnreachable):
    """A step of the head's first boot failed; the message carries the step and the end of its output.

    Cure: mend the step that the message shows, in the image for example; then deploy again.
    """


class ConnectionForked(FleetError):
    """The connection to the fleet is that of the process from which this one was forked.

    Cure: connect in this process, too: `sky.connect(pool.manifest)`.
    """


class CredentialsRefused(FleetError):
    """The head does not accept the fleet secret of this client.

    Cure: take the manifest of the present fleet: `skyinfra manifest STACK/POOL > fleet.json`.
    """


class VersionMismatch(FleetError):
    """The fleet runs another Python or another version of Dask than the client; tasks cannot be shipped.

    Cure: run the client with the Python and Dask that the message names, or `skyinfra upgrade STACK/POOL`.
    """


class UpgradeFailed(FleetError):
    """The fleet was not upgraded; it serves with the runner that it had.

    Cure: mend what the message names, and run `skyinfra upgrade` again.
    """


class UnsafeAnswer(FleetError):
    """The answer to a question would run code here if it was read as Dask reads it; it was not read.

    Cure: destroy the fleet and deploy it again: no head of skyinfra answers so.
    """


class TooLittleMeasured(FleetError):
    """Too few tasks ran, or too little is known of them, to say which layout they need.

    Cure: ask again when more tasks have run.
    """


class InvalidManifest(FleetError):
    """The manifest cannot be read.

    Cure: write it anew with `skyinfra manifest STACK/POOL > fleet.json`.
    """


class NodeError(SkyinfraError):
    """A node cannot follow its configuration."""


class InvalidNodeConfig(NodeError):
    """The node configuration cannot be read.

    Cure: write it anew with the version of skyinfra that the node has, with `skyinfra render` or a deploy.
    """

    exit_code = 2


class AcceleratorMissing(NodeError):
    """The node does not have the declared accelerators.

    Cure: declare what the node has, or look at its driver with `skyinfra doctor STACK/POOL`.
    """


class PartitionFailed(NodeError):
    """The driver refused a step towards the layout.

    Cure: `skyinfra doctor STACK/POOL` says what the driver lacks; a reboot of the node frees a GPU that hangs.
    """


class PartitionBusy(PartitionFailed):
    """Processes use a partition that has to go, or would end with a reboot; the message lists them.

    Cure: end the processes that the message lists, or wait for them.
    """


class NodeRebooting(NodeError):
    """The node reboots, because the driver activates a pending MIG mode in no other way.

    Cure: wait; the node comes back with the layout.
    """


class PortTaken(NodeError):
    """Another process listens on the port.

    Cure: end that process, or declare another port.
    """


class StateDirectoryError(NodeError):
    """The node's directory is full or cannot be written.

    Cure: make room, or give the directory to the user of the runner.
    """


class NodeFailed(NodeError):
    """A node did not come up; the message carries its log.

    Cure: mend what its log says, and deploy again.
    """
