"""What the provider tells a head while it runs: the wanted layout, which AWS keeps in a tag of the instance.

The tag ``skyinfra:layout`` is written by Terraform and read through the instance's metadata service (version 2, with
tags allowed). Tags take letters, digits, spaces and ``+ - = . _ : / @``: ``:`` stands for ``*`` and ``/`` for ``|``, so
that ``3g.40gb+1g.10gb:2/7g.80gb`` is ``3g.40gb+1g.10gb*2`` on one GPU and ``7g.80gb`` on the other; ``off`` is no MIG.
"""

from __future__ import annotations

import logging
import os
import time
import urllib.error
import urllib.request
from pathlib import Path

from skyinfra import mig
from skyinfra.errors import InvalidField, InvalidLayout, LayoutError, NodeFailed, SkyinfraError
from skyinfra.gpu import desired
from skyinfra.node.folder import NodeDirectory
from skyinfra.node.node import file_sha256
from skyinfra.protocol.nodeconfig import NodeAccelerator, NodeConfig, PlacedPartition

logger = logging.getLogger("skyinfra.runner")

# The variable that AWS's own tools have for another address.
_ENDPOINT = os.environ.get("AWS_EC2_METADATA_SERVICE_ENDPOINT", "http://169.254.169.254").rstrip("/")
_TAG = "skyinfra:layout"
_OFF = "off"
_POLL_S = 10.0
_TIMEOUT_S = 5.0
_TOKEN_S = 300

Layouts = tuple[tuple[PlacedPartition, ...], ...]


class Watch:
    """Watches for the node whose configuration is the file *path*. Raises `InvalidNodeConfig`, `InvalidField`."""

    def __init__(self, path: Path, *, endpoint: str = _ENDPOINT) -> None:
        self._path = path
        self._directory = NodeDirectory(path.absolute().parent)
        self._endpoint = endpoint
        self._last: str | None = None
        config = NodeConfig.load(path)
        if not config.head or config.provider != "aws":
            raise InvalidField("only the head of a fleet on AWS has something to watch", field=str(path))

    def run(self) -> None:
        """Looks again and again, and never ends by itself: what cannot be read now may be later."""
        while True:
            try:
                self.look()
            except SkyinfraError as error:
                if str(error) != self._last:
                    logger.error("%s: %s", type(error).__name__, error)
                self._last = str(error)
            time.sleep(_POLL_S)

    def look(self) -> bool:
        """Takes over the layout of the tag where it is another one than is desired; whether it was.

        Raises `NodeFailed` where the metadata service does not answer, `InvalidLayout` and its like for the tag.
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
        """The value of the tag; None where the instance has none."""
        try:
            seconds = {"X-aws-ec2-metadata-token-ttl-seconds": str(_TOKEN_S)}
            token = self._ask("PUT", "/latest/api/token", seconds)
            path = f"/latest/meta-data/tags/instance/{_TAG}"
            return self._ask("GET", path, {"X-aws-ec2-metadata-token": token}).strip()
        except urllib.error.HTTPError as error:
            if error.code == 404:
                return None
            raise self._silent(f"it answers {error.code}") from None
        except (OSError, UnicodeDecodeError) as error:
            raise self._silent(str(error)) from None

    def _ask(self, method: str, path: str, headers: dict[str, str]) -> str:
        request = urllib.request.Request(f"{self._endpoint}{path}", headers=headers, method=method)  # noqa: S310 - http
        # The address of the node is not behind a proxy.
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with opener.open(request, timeout=_TIMEOUT_S) as answer:
            return str(answer.read().decode())

    def _silent(self, why: str) -> NodeFailed:
        return NodeFailed(
            f"the metadata service does not say which layout is wanted: {why}",
            field=self._endpoint,
            hint="The instance needs http_endpoint and instance_metadata_tags enabled.",
        )


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
