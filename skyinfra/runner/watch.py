"""Watches the desired layout of a head in the metadata of its instance, see `skyinfra.mig.layout_tag`.

On AWS that is a tag, which the metadata service shows (version 2, with tags allowed), on Google Cloud an attribute of
the instance. The service is closed to tasks and to the runner: `Watch` is a process of its own, with a user of its
own, and leaves the tag for the runner, which takes the layout over (`Follower`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from skyinfra.drain.notices import ec2_metadata, gce_metadata
from skyinfra.errors import InvalidField, StateDirectoryError
from skyinfra.gpu import desired
from skyinfra.mig import Layout, layout_tag
from skyinfra.node.folder import NodeDirectory, message, stamp
from skyinfra.node.node import directory_of, file_sha256
from skyinfra.protocol.nodeconfig import NodeConfig

# By provider: how the layout is read, where, and what the instance needs for it.
_READ: dict[str, tuple[Callable[..., str | None], str, str | None]] = {
    "aws": (
        ec2_metadata,
        f"tags/instance/{layout_tag.NAME}",
        "The instance needs http_endpoint and instance_metadata_tags enabled.",
    ),
    "gcp": (gce_metadata, f"attributes/{layout_tag.ATTRIBUTE}", None),
}

logger = logging.getLogger("skyinfra.runner")


@dataclass
class Watch:
    """Watches for the node with the configuration file *path*. Raises `InvalidNodeConfig`, `InvalidField`."""

    path: Path
    endpoint: str | None = None
    pause_s: ClassVar[float] = 10.0
    _left: str | None = None

    def __post_init__(self) -> None:
        config = NodeConfig.load(self.path)
        if not config.head or config.provider not in _READ:
            known = ", ".join(_READ)
            raise InvalidField(f"only the head of a fleet on {known} has something to watch", field=str(self.path))
        self._provider = config.provider

    def look(self) -> None:
        """Leaves the layout of the tag for the runner.

        Raises `NodeFailed` where the metadata service does not answer, and what `layout_tag.read_tag` raises.
        """
        read, path, hint = _READ[self._provider]
        text = read(path, "which layout is wanted", base=self.endpoint, hint=hint)
        config = NodeConfig.load(self.path)
        if text is None or text == self._left or _layouts(text, config) is None:
            return
        directory = directory_of(self.path)
        directory.write(directory.tag_file, text)
        self._left = text


class Follower:
    """Takes over what the tag of the head with the configuration file *path* says, in the node's *directory*."""

    def __init__(self, path: Path, directory: NodeDirectory) -> None:
        self._path = path
        self._directory = directory
        self._seen: object = None

    def look(self) -> bool:
        """Makes the layout of the tag the desired one, where either has changed; returns whether it did.

        Raises what `layout_tag.read_tag` raises, `InvalidNodeConfig`, `StateDirectoryError`.
        """
        file = self._directory.tag_file
        seen = stamp(file), stamp(self._directory.desired_file)
        if seen[0] is None or seen == self._seen:
            return False
        self._seen = seen
        try:
            text = message(file)
        except (OSError, ValueError) as error:
            raise InvalidField(f"cannot be read: {error}", field=str(file)) from None
        config = NodeConfig.load(self._path)
        layouts = _layouts(text, config)
        now = desired.find(config, file_sha256(self._path), self._directory)
        if layouts is None or (now.refused is None and now.layout.layouts == layouts):
            return False
        try:
            desired.write_desired(self._directory.path, layouts)
        except StateDirectoryError:
            self._seen = None  # once there is space
            raise
        logger.info("the tag %s says another layout: %s", layout_tag.NAME, text.strip())
        return True


def _layouts(tag: str, config: NodeConfig) -> tuple[Layout, ...] | None:
    """The layouts of the text *tag*; None for a node without accelerators. Raises what `layout_tag.read_tag` raises."""
    if config.accelerator is None:
        return None
    return layout_tag.read_tag(tag.strip(), config.accelerator.mig_model, config.accelerator.count)
