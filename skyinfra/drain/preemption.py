"""Watches for the notices of a provider that takes the machine back, and has the node drained in time.

It is a process of its own, because tasks, and the runner with them, cannot reach the metadata service. The runner
follows ``drain.json``, see `skyinfra.drain.request`.
"""

from __future__ import annotations

import logging
import time
from pathlib import Path

from skyinfra.drain import request
from skyinfra.drain.notices import Notice, notices
from skyinfra.drain.request import Drain
from skyinfra.errors import InvalidNodeConfig, SkyinfraError
from skyinfra.node.folder import NodeDirectory
from skyinfra.protocol.nodeconfig import NodeConfig

logger = logging.getLogger("skyinfra.runner")

# After what did not work.
_RETRY_S = 2.0


class Interrupt:
    """Watches for the node whose configuration is the file *path*. Raises `InvalidNodeConfig`, `NotSupported`."""

    def __init__(self, path: Path) -> None:
        config = NodeConfig.load(path)
        self._provider = config.provider
        self._notices = notices(config)
        self._directory = NodeDirectory(path.absolute().parent)
        # The notice that was followed last: one that a person undid is not followed again.
        self._followed: str | None = None
        self._acknowledged: str | None = None

    def run(self) -> None:
        """Looks again and again, and never ends by itself: what cannot be read now may be later."""
        last: str | None = None
        while True:
            pause_s = self._notices.pause_s
            try:
                self.look()
                last = None
            except SkyinfraError as error:
                if str(error) != last:
                    logger.error("%s: %s", type(error).__name__, error)
                last, pause_s = str(error), _RETRY_S
            time.sleep(pause_s)

    def look(self) -> Notice | None:
        """Looks, and follows what is found: a notice drains the node, one that was withdrawn lets it serve again.

        Raises `NodeFailed` where the metadata service does not say, `StateDirectoryError` where it cannot be written.
        """
        notice = self._notices.look()
        if notice is None:
            self._withdrawn()
        elif notice.key != self._followed:
            self._follow(notice)
        if notice is not None and notice.acknowledge is not None:
            self._acknowledge(notice.acknowledge)
        return notice

    def _follow(self, notice: Notice) -> None:
        asked = Drain(
            request.VERSION,
            self._provider,
            notice.why,
            notice.until,
            boot=request.this_boot(),
            if_others=not notice.certain,
        )
        mine = self._asked()
        # What a person asked for stays where it ends tasks sooner; a recommendation changes nothing then.
        if mine is not None and mine.by == request.OPERATOR and not _sooner(asked, mine):
            logger.info("%s; the node is drained by hand already", notice.why)
        else:
            request.write(self._directory, asked)
            logger.info("%s; the node is to be drained", notice.why)
        self._followed = notice.key

    def _withdrawn(self) -> None:
        """Nothing stands any more, after a hibernation for instance."""
        asked = self._asked()
        if asked is not None and asked.by == self._provider:
            logger.info("the notice is withdrawn: %s", asked.why)
            request.clear(self._directory)
        self._followed = None

    def _asked(self) -> Drain | None:
        try:
            return request.find(self._directory)
        except InvalidNodeConfig:
            return None

    def _acknowledge(self, what: str) -> None:
        """Once nothing runs here any more, so that the provider need not wait."""
        status = self._directory.status()
        gone = self._directory.holder() is None or (status is not None and status.state == "drained")
        if gone and what != self._acknowledged:
            self._notices.acknowledge(what)
            self._acknowledged = what
            logger.info("acknowledged: nothing runs here any more")


def _sooner(new: Drain, old: Drain) -> bool:
    if new.if_others or new.until is None:
        return False
    return old.until is None or new.until < old.until
