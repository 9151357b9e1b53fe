"""Watches the desired layout of a head on AWS, which is a tag of the instance.

The tag ``skyinfra:layout`` is written by Terraform and read through the instance's metadata service (version 2, with
tags allowed). Tags take letters, digits, spaces and ``+ - = . _ : / @``: ``:`` stands for ``*`` and ``/`` for ``|``, so
that ``3g.40gb+1g.10gb:2/7g.80gb`` is ``3g.40gb+1g.10gb*2`` on one GPU and ``7g.80gb`` on the other; ``off`` is no MIG.
"""

from __future__ import annotations

import logging
from pathlib import Path

from skyinfra import mig
from skyinfra.drain.notices import ec2_metadata
from skyinfra.errors import InvalidField, InvalidLayout, LayoutError
from skyinfra.gpu import desired
from skyinfra.node.folder import NodeDirectory
from skyinfra.node.node import file_sha256
from skyinfra.protocol.nodeconfig import NodeAccelerator, NodeConfig, PlacedPartition

logger = logging.getLogger("skyinfra.runner")

_TAG = "skyinfra:layout"
_OFF = "off"

Layouts = tuple[tuple[PlacedPartition, ...], ...]


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

        Raises `NodeFailed` where the metadata service does not answer, `LayoutError` for the tag.
        """
        text = self._tag()
        config = NodeConfig.load(self._path)
        if text is None or config.accelerator is None:
            return False
        layouts = read_tag(text, config.accelerator)
        now = desired.find(config, file_sha256(self._path), self._directory)
        if now.refused is None and now.layout.layouts == layouts:
            return False
        desired.write_desired(self._directory.path, layouts)
        logger.info("the tag %s says another layout: %s", _TAG, text)
        return True

    def _tag(self) -> str | None:
        """Returns the value of the tag; None where the instance has none."""
        hint = "The instance needs http_endpoint and instance_metadata_tags enabled."
        path, base = f"tags/instance/{_TAG}", self._endpoint
        text = ec2_metadata(path, "which layout is wanted", base=base, hint=hint)
        return None if text is None else text.strip()


def read_tag(text: str, accelerator: NodeAccelerator) -> Layouts:
    """One layout for each GPU; none where MIG is off. Raises `InvalidLayout` and its like with the tag's name."""
    if text.strip().lower() == _OFF:
        return ()
    parts = [part.strip().replace(":", "*") for part in text.split("/")]
    try:
        if accelerator.mig_model is None:
            raise InvalidLayout(f"{accelerator.name} cannot be partitioned", given=text)
        geometry = mig.geometry(accelerator.mig_model)
        declared = parts[0] if len(parts) == 1 else mig.per_gpu(*parts)
        found = mig.resolve(declared, geometry, accelerator.count)
    except LayoutError as error:
        error.at(f"tag {_TAG}")
        raise
    return tuple(tuple(PlacedPartition(p.profile, p.start, p.size) for p in layout) for layout in found)
