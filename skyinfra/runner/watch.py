"""Watches the desired layout of a head on AWS: a tag of the instance, see `skyinfra.mig.layout_tag`.

It is read through the instance's metadata service (version 2, with tags allowed).
"""

from __future__ import annotations

import logging
from pathlib import Path

from skyinfra.drain.notices import ec2_metadata
from skyinfra.errors import InvalidField
from skyinfra.gpu import desired
from skyinfra.mig import layout_tag
from skyinfra.node.folder import NodeDirectory
from skyinfra.node.node import file_sha256
from skyinfra.protocol.nodeconfig import NodeConfig

logger = logging.getLogger("skyinfra.runner")


class Watch:
    """Watches for the node with the configuration file *path*. Raises `InvalidNodeConfig`, `InvalidField`."""

    pause_s = 10.0

    def __init__(self, path: Path, *, endpoint: str | None = None) -> None:
        self._path = path
        self._directory = NodeDirectory(path.absolute().parent)
        self._endpoint = endpoint
        config = NodeConfig.load(path)
        if not config.head or config.provider != "aws":
            raise InvalidField("only the head of a fleet on AWS has something to watch", field=str(path))

    def look(self) -> bool:
        """Makes the layout of the tag the desired one; returns whether it changed.

        Raises `NodeFailed` where the metadata service does not answer, and what `layout_tag.read_tag` raises.
        """
        hint = "The instance needs http_endpoint and instance_metadata_tags enabled."
        path, base = f"tags/instance/{layout_tag.NAME}", self._endpoint
        text = ec2_metadata(path, "which layout is wanted", base=base, hint=hint)
        config = NodeConfig.load(self._path)
        if text is None or config.accelerator is None:
            return False
        layouts = layout_tag.read_tag(text.strip(), config.accelerator.mig_model, config.accelerator.count)
        now = desired.find(config, file_sha256(self._path), self._directory)
        if now.refused is None and now.layout.layouts == layouts:
            return False
        desired.write_desired(self._directory.path, layouts)
        logger.info("the tag %s says another layout: %s", layout_tag.NAME, text.strip())
        return True
