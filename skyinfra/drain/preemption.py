"""Watches for preemption notices of a provider and requests a drain of the node in time.

It is a process of its own, because tasks, and the runner with them, cannot reach the metadata service. The runner
follows ``drain.json``, see `skyinfra.drain.request`.
"""

from __future__ import annotations

import contextlib
import logging
import math
from pathlib import Path

from skyinfra.drain import request
from skyinfra.drain.notices import Notice, notices
from skyinfra.drain.request import Drain
from skyinfra.errors import InvalidNodeConfig, NodeFailed
from skyinfra.node.folder import writing
from skyinfra.node.node import directory_of
from skyinfra.protocol.nodeconfig import NodeConfig

logger = logging.getLogger("skyinfra.runner")


class PreemptionWatch:
    """Watches for the node with the configuration file *path*. Raises `InvalidNodeConfig`, `NotSupported`."""

    def __init__(self, path: Path) -> None:
        config = NodeConfig.load(path)
        self._provider = config.provider
        self._notices = notices(config)
        self._directory = directory_of(path)
        self.pause_s = self._notices.pause_s
        # The last notice that was followed: a drain that a person undid is not requested again.
        self._followed: str | None = None
        self._acknowledged: str | None = None
        # What was told last. The file may be that of an earlier boot.
        self._told: str | None = ""

    def look(self) -> Notice | None:
        """Looks once: a notice drains the node, a withdrawn notice lets it serve again.

        Raises `NodeFailed` where the metadata service does not answer, `StateDirectoryError` where the request cannot
        be written.
        """
        try:
            notice = self._notices.look()
        except NodeFailed as error:
            self._tell(f"{error.message} ({error.field})")
            raise
        self._tell(None)
        if notice is None:
            self._withdraw()
        elif notice.key != self._followed:
            self._follow(notice)
        if notice is not None:
            self._acknowledge(notice)
        return notice

    def _follow(self, notice: Notice) -> None:
        why, until, boot = notice.why, notice.until, request.this_boot()
        drain = Drain(request.VERSION, self._provider, why, until, boot, if_others=not notice.certain)
        present = self._request()
        # A person's request stays unless the provider ends tasks sooner; a recommendation never replaces it.
        ends = math.inf if drain.if_others or drain.until is None else drain.until
        if present is not None and present.by == request.OPERATOR and ends >= (present.until or math.inf):
            logger.info("%s; the node is drained by hand already", notice.why)
        else:
            request.write(self._directory, drain)
            logger.info("%s; the node is to be drained", notice.why)
        self._followed = notice.key

    def _tell(self, unwarned: str | None) -> None:
        """Tells the runner and `doctor` why no notice can be read, until one can."""
        file = self._directory.unwarned_file
        if unwarned != self._told:
            if unwarned is not None:
                self._directory.write(file, unwarned)
            else:
                with writing(file):
                    file.unlink(missing_ok=True)
            self._told = unwarned

    def _withdraw(self) -> None:
        """Removes the request where its notice is gone, after a hibernation for instance."""
        present = self._request()
        if present is not None and present.by == self._provider:
            logger.info("the notice is withdrawn: %s", present.why)
            request.clear(self._directory)
        self._followed = None

    def _request(self) -> Drain | None:
        with contextlib.suppress(InvalidNodeConfig):
            return request.find(self._directory)
        return None

    def _acknowledge(self, notice: Notice) -> None:
        """Acknowledges *notice* once nothing runs here any more, so that the provider need not wait."""
        status = self._directory.status()
        idle = self._directory.holder() is None or (status is not None and status.state == "drained")
        if idle and notice.acknowledge is not None and notice.key != self._acknowledged:
            notice.acknowledge()
            self._acknowledged = notice.key
            logger.info("acknowledged: nothing runs here any more")
