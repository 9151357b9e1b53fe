"""Watches for preemption notices of a provider and requests a drain of the node in time.

What asks the provider (`PreemptionWatch`) is a process of its own, with a user of its own on cloud nodes, because
tasks, and the runner with them, cannot reach the metadata service. It leaves the notice in ``notice.json``; the runner
makes a request to drain the node of it (`NoticeHandler`), see `skyinfra.drain.request`.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
from dataclasses import dataclass, replace
from pathlib import Path

from skyinfra.drain import request
from skyinfra.drain.notices import Notice, notices
from skyinfra.drain.request import Drain
from skyinfra.errors import InvalidNodeConfig, NodeFailed
from skyinfra.node.folder import NodeDirectory, message, stamp, writing
from skyinfra.node.node import directory_of
from skyinfra.protocol._schema import Document
from skyinfra.protocol.nodeconfig import NodeConfig

logger = logging.getLogger("skyinfra.runner")


_VERSION = 1


@dataclass(frozen=True)
class NoticeDocument(Document, error=InvalidNodeConfig, source="notice.json", version=_VERSION):
    """The content of ``notice.json``. key: equal for the same notice. Both are None where there is no notice."""

    version: int
    key: str | None = None
    drain: Drain | None = None


class PreemptionWatch:
    """Watches for the node with the configuration file *path*. Raises `InvalidNodeConfig`, `NotSupported`."""

    def __init__(self, path: Path) -> None:
        config = NodeConfig.load(path)
        self._provider = config.provider
        self._notices = notices(config)
        self._directory = directory_of(path)
        self.pause_s = self._notices.pause_s
        self._acknowledged: str | None = None
        # What was told last. The files may be those of an earlier boot.
        self._logged: str | None = ""
        self._left: str | None = ""

    def poll(self) -> Notice | None:
        """Looks once, and leaves the notice, or that there is none, for the runner.

        Raises `NodeFailed` where the metadata service does not answer, `StateDirectoryError` where the message cannot
        be written.
        """
        try:
            notice = self._notices.poll()
        except NodeFailed as error:
            self._log_unwarned(f"{error.message} ({error.field})")
            raise
        self._log_unwarned(None)
        key = None if notice is None else notice.key
        if key != self._left:
            self._leave(notice)
            self._left = key
        if notice is not None:
            self._acknowledge(notice)
        return notice

    def _leave(self, notice: Notice | None) -> None:
        document = NoticeDocument(_VERSION)
        if notice is not None:
            why, until, boot = notice.why, notice.until, request.this_boot()
            drain = Drain(request.VERSION, self._provider, why, until, boot, if_others=not notice.certain)
            document = NoticeDocument(_VERSION, notice.key, drain)
            logger.info("%s", why)
        self._directory.write(self._directory.notice_file, json.dumps(document.to_json()) + "\n")

    def _log_unwarned(self, unwarned: str | None) -> None:
        """Tells the runner and `doctor` why no notice can be read, until one can."""
        file = self._directory.unwarned_file
        if unwarned != self._logged:
            if unwarned is not None:
                self._directory.write(file, unwarned)
            else:
                with writing(file):
                    file.unlink(missing_ok=True)
            self._logged = unwarned

    def _acknowledge(self, notice: Notice) -> None:
        """Acknowledges *notice* once nothing runs here any more, so that the provider need not wait."""
        status = self._directory.status()
        idle = self._directory.holder() is None or (status is not None and status.state == "drained")
        if idle and notice.acknowledge is not None and notice.key != self._acknowledged:
            notice.acknowledge()
            self._acknowledged = notice.key
            logger.info("acknowledged: nothing runs here any more")


class NoticeHandler:
    """Follows what ``notice.json`` says of the node in *directory*."""

    def __init__(self, directory: NodeDirectory) -> None:
        self._directory = directory
        self._stamp: tuple[int, int, int] | None = None

    def poll(self) -> None:
        """A new notice requests a drain of the node; one that is withdrawn lets it serve again.

        Raises `StateDirectoryError` where the request cannot be written.
        """
        file = self._directory.notice_file
        seen = stamp(file)
        # Without the file the service has not asked yet, or starts again: that withdraws nothing.
        if seen is None or seen == self._stamp:
            return
        try:
            document = NoticeDocument.load(file, text_of=message)
        except InvalidNodeConfig as error:
            logger.error("%s: %s", type(error).__name__, error)
        else:
            drain = document.drain
            if drain is not None and file.parent != self._directory.path:
                # Below /run: it is of this boot, for which a service in a container may have another name.
                drain = replace(drain, boot=request.this_boot())
            if drain is None:
                self._withdraw()
            elif not drain.over and document.key != self._handled():
                self._handle_notice(drain)
                # A drain that a person undid is not requested again.
                self._directory.write(self._directory.handled_notice_file, str(document.key))
        self._stamp = seen

    def _handle_notice(self, drain: Drain) -> None:
        present = self._request()
        # A person's request stays unless the provider ends tasks sooner; a recommendation never replaces any.
        ends = math.inf if drain.until is None else drain.until
        later = present is not None and present.by == request.OPERATOR and ends >= (present.until or math.inf)
        if present is not None and (drain.if_others or later):
            logger.info("%s; the node is to be drained already: %s", drain.why, present.why)
        else:
            if present is not None and present.by == request.OPERATOR:
                # It holds through reboots, and after the notice is withdrawn.
                drain = replace(drain, by=present.by, why=f"{present.why}; {drain.why}", boot=None)
            request.write(self._directory, drain)
            logger.info("%s; the node is to be drained", drain.why)

    def _handled(self) -> str | None:
        with contextlib.suppress(OSError, ValueError):
            return message(self._directory.handled_notice_file)
        return None

    def _withdraw(self) -> None:
        """Removes the request where its notice is gone, after a hibernation for instance."""
        present = self._request()
        if present is not None and present.by not in (request.OPERATOR, request.UPGRADE):
            logger.info("the notice is withdrawn: %s", present.why)
            request.clear(self._directory)
        with writing(self._directory.handled_notice_file):
            self._directory.handled_notice_file.unlink(missing_ok=True)

    def _request(self) -> Drain | None:
        with contextlib.suppress(InvalidNodeConfig):
            return request.find(self._directory)
        return None
