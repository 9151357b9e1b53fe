"""Watches the declared layout of a head in the metadata of its instance, see `skyinfra.mig.layout_tag`.

On AWS that is a tag, which the metadata service shows (version 2, with tags allowed), on Google Cloud an attribute of
the instance. The service is closed to tasks and to the runner: `Watch` is a process of its own, with a user of its
own, and leaves the text of the tag for the runner, which reads it (`Declared`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from skyinfra import desired
from skyinfra.drain.notices import ec2_metadata, gce_metadata
from skyinfra.elastic.clouds import ATTRIBUTE, TAG, GroupWatch
from skyinfra.errors import InvalidField, SkyinfraError, StateDirectoryError
from skyinfra.mig import layout_tag
from skyinfra.node.folder import NodeDirectory, message, stamp
from skyinfra.node.node import directory_of, file_sha256
from skyinfra.protocol.fleet import VERSION, FleetLayout
from skyinfra.protocol.nodeconfig import NodeConfig

# By provider: how metadata are read, where the layout is, what the instance needs for it, and where its group is.
_READ: dict[str, tuple[Callable[..., str | None], str, str | None, str]] = {
    "aws": (
        ec2_metadata,
        f"tags/instance/{layout_tag.NAME}",
        "The instance needs http_endpoint and instance_metadata_tags enabled.",
        TAG,
    ),
    "gcp": (gce_metadata, f"attributes/{layout_tag.ATTRIBUTE}", None, ATTRIBUTE),
}

logger = logging.getLogger("skyinfra.runner")


@dataclass
class Watch:
    """Watches for the node with the configuration file *path*. Raises `InvalidNodeConfig`, `InvalidField`."""

    path: Path
    endpoint: str | None = None
    pause_s: ClassVar[float] = 10.0
    _left: str | None = None
    _group: GroupWatch | None = None

    def __post_init__(self) -> None:
        config = NodeConfig.load(self.path)
        if not config.head or config.provider not in _READ:
            known = ", ".join(_READ)
            raise InvalidField(f"only the head of a fleet on {known} has something to watch", field=str(self.path))
        self._provider = config.provider
        self._group = GroupWatch(config.provider, directory_of(self.path)) if config.max_nodes else None

    def check(self) -> None:
        """Leaves the text of the tag for the runner. Raises `NodeFailed` where the metadata service does not answer."""
        read, path, hint, group = _READ[self._provider]
        if self._group is not None:
            self._group.check(read(group, "which nodes there may be", base=self.endpoint))
        text = read(path, "which layout is wanted", base=self.endpoint, hint=hint)
        if text is None or text == self._left:
            return
        directory = directory_of(self.path)
        directory.write(directory.declared_file, text)
        self._left = text


class Declared:
    """The layout that the tag of the head declares. *path*: of the configuration. *directory*: of the node.

    refused: why it cannot be the layout.
    """

    def __init__(self, path: Path, directory: NodeDirectory) -> None:
        self.refused: SkyinfraError | None = None
        self._path = path
        self._directory = directory
        self._seen: object = None

    def take(self) -> bool:
        """Makes the layout of the tag the declared one, where either has changed; returns whether it did.

        Raises what `layout_tag.read_tag` raises, `InvalidNodeConfig`, `StateDirectoryError`.
        """
        seen = stamp(self._directory.declared_file), stamp(self._directory.desired_file)
        if seen[0] is None or seen == self._seen:
            return False
        self._seen, self.refused = seen, None
        try:
            return self._take()
        except SkyinfraError as error:
            self.refused = error
            if isinstance(error, StateDirectoryError):
                self._seen = None  # once there is space
            raise

    def _take(self) -> bool:
        file, config = self._directory.declared_file, NodeConfig.load(self._path)
        try:
            text = message(file).strip()
        except (OSError, ValueError) as error:
            raise InvalidField(f"cannot be read: {error}", field=str(file)) from None
        if (accelerator := config.accelerator) is None:
            return False
        layouts = layout_tag.read_tag(text, accelerator.mig_model, accelerator.count)
        now = desired.find(config, file_sha256(self._path), self._directory)
        if now.refused is None and now.layout.layouts == layouts:
            return False
        desired.declare(self._directory, FleetLayout(VERSION, None, layouts))
        logger.info("the tag %s says another layout: %s", layout_tag.NAME, text)
        return True
