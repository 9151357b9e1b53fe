"""Watches the desired layout of a head on AWS: a tag of the instance, see `skyinfra.mig.layout_tag`.

It is read through the instance's metadata service (version 2, with tags allowed).
"""

from __future__ import annotations

import logging
import os
import time
import urllib.error
import urllib.request
from pathlib import Path

from skyinfra.errors import InvalidField, NodeFailed, SkyinfraError
from skyinfra.gpu import desired
from skyinfra.mig import layout_tag
from skyinfra.node.folder import NodeDirectory
from skyinfra.node.node import file_sha256
from skyinfra.protocol.nodeconfig import NodeConfig

logger = logging.getLogger("skyinfra.runner")

# The variable that AWS's own tools have for another address.
_ENDPOINT = os.environ.get("AWS_EC2_METADATA_SERVICE_ENDPOINT", "http://169.254.169.254").rstrip("/")
_POLL_S = 10.0
_TIMEOUT_S = 5.0
_TOKEN_S = 300


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
        """Looks again and again, without end: a tag that cannot be read now may be readable later."""
        while True:
            try:
                self.look()
            except SkyinfraError as error:
                if str(error) != self._last:
                    logger.error("%s: %s", type(error).__name__, error)
                self._last = str(error)
            time.sleep(_POLL_S)

    def look(self) -> bool:
        """Makes the layout of the tag the desired one; returns whether it was another one before.

        Raises `NodeFailed` where the metadata service does not answer, and what `layout_tag.read_tag` raises.
        """
        text = self._tag()
        config = NodeConfig.load(self._path)
        if text is None or config.accelerator is None:
            return False
        layouts = layout_tag.read_tag(text, config.accelerator.mig_model, config.accelerator.count)
        now = desired.find(config, file_sha256(self._path), self._directory)
        if now.refused is None and now.layout.layouts == layouts:
            return False
        desired.write_desired(self._directory.path, layouts)
        logger.info("the tag %s says another layout: %s", layout_tag.NAME, text)
        return True

    def _tag(self) -> str | None:
        """The value of the tag; None where the instance has none."""
        try:
            seconds = {"X-aws-ec2-metadata-token-ttl-seconds": str(_TOKEN_S)}
            token = self._ask("PUT", "/latest/api/token", seconds)
            path = f"/latest/meta-data/tags/instance/{layout_tag.NAME}"
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
