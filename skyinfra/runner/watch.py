"""Watches the desired layout of a head on AWS: a tag of the instance, see `skyinfra.mig.layout_tag`.

It is read through the instance's metadata service (version 2, with tags allowed).
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from skyinfra.drain.notices import ec2_metadata
from skyinfra.errors import InvalidField
from skyinfra.gpu import desired
from skyinfra.mig import layout_tag
from skyinfra.node.node import directory_of, file_sha256
from skyinfra.protocol.nodeconfig import NodeConfig

logger = logging.getLogger("skyinfra.runner")


@dataclass
class Watch:
    """Watches for the node with the configuration file *path*. Raises `InvalidNodeConfig`, `InvalidField`."""

    path: Path
    endpoint: str | None = None
    pause_s: ClassVar[float] = 10.0

    def __post_init__(self) -> None:
        config = NodeConfig.load(self.path)
        if not config.head or config.provider != "aws":
            raise InvalidField("only the head of a fleet on AWS has something to watch", field=str(self.path))

    def look(self) -> bool:
        """Makes the layout of the tag the desired one; returns whether it changed.

        Raises `NodeFailed` where the metadata service does not answer, and what `layout_tag.read_tag` raises.
        """
        hint = "The instance needs http_endpoint and instance_metadata_tags enabled."
        path, base = f"tags/instance/{layout_tag.NAME}", self.endpoint
        text = ec2_metadata(path, "which layout is wanted", base=base, hint=hint)
        config = NodeConfig.load(self.path)
        if text is None or config.accelerator is None:
            return False
        layouts = layout_tag.read_tag(text.strip(), config.accelerator.mig_model, config.accelerator.count)
        directory = directory_of(self.path)
        now = desired.find(config, file_sha256(self.path), directory)
        if now.refused is None and now.layout.layouts == layouts:
            return False
        desired.write_desired(directory.path, layouts)
        logger.info("the tag %s says another layout: %s", layout_tag.NAME, text.strip())
        return True
