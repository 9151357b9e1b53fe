"""The handshakes of peers that nobody knows yet: how many may be unfinished at once, and for how long.

A peer without the fleet secret gets no further than its handshake, so what stands here bounds what it costs. A
handshake over a cap takes the place of the oldest one: those of the fleet are done within some round trips, so the
oldest ones are those of strangers.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import resource
import time
from collections.abc import Callable, Iterator

logger = logging.getLogger("skyinfra.runner")

SECONDS = 10.0
# It is counted in parts, so that the time in which this process had no time for the peer is not the peer's.
_PART_S = 1.0
MOST = 1024
# The caps are that part of the files that this process may open, and of the handshakes of all. The slots of a node
# connect at the same moment, and those who share one address by NAT may.
_FILES_EACH = 4
_ADDRESSES = 4
_WARN_EACH_S = 60.0
# As in the service of a cloud node. With more, programs are slow that look at every number that a file may have.
_FILES = 2**20


class Handshakes:
    """The unfinished handshakes of this process."""

    def __init__(self) -> None:
        self._numbers = itertools.count()
        # By address and number, the oldest first: what closes the connection. And the address of each number.
        self._of: dict[str, dict[int, Callable[[], None]]] = {}
        self._all: dict[int, str] = {}
        self._unsaid = 0
        self._last = ("", "")
        self._silent_until = 0.0

    @contextlib.contextmanager
    def one(self, address: str, close: Callable[[], None]) -> Iterator[None]:
        """Counts a handshake with *address* while the block runs; calls *close* where it has to end before."""
        most = min(MOST, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // _FILES_EACH)
        if len(self._of.get(address, ())) >= most // _ADDRESSES:
            self._end(next(iter(self._of[address])), "too many of one address")
        elif len(self._all) >= most:
            self._end(next(iter(self._all)), "too many of all addresses")
        number = next(self._numbers)
        self._of.setdefault(address, {})[number] = close
        self._all[number] = address
        self._watch(number, SECONDS)
        try:
            yield
        finally:
            self._forget(number)

    def failed(self, address: str, why: str) -> None:
        """Says in the log that a handshake with *address* failed: the first at once, others together each minute."""
        self._unsaid += 1
        self._last = address, why
        if time.monotonic() >= self._silent_until:
            self._silent_until = time.monotonic() + _WARN_EACH_S
            self._warn()
            asyncio.get_running_loop().call_later(_WARN_EACH_S, self._warn)

    def _warn(self) -> None:
        if self._unsaid:
            text = "connections closed that did no handshake of this fleet: %d; the last one was from %s: %s"
            logger.warning(text, self._unsaid, *self._last)
            self._unsaid = 0

    def _watch(self, number: int, left: float) -> None:
        if left <= 0 and number in self._all:
            self._end(number, f"not done in {SECONDS:g} s")
        elif number in self._all:
            asyncio.get_running_loop().call_later(min(left, _PART_S), self._watch, number, left - _PART_S)

    def _end(self, number: int, why: str) -> None:
        address = self._all[number]
        close = self._of[address][number]
        self._forget(number)
        close()
        self.failed(address, why)

    def _forget(self, number: int) -> None:
        address = self._all.pop(number, None)
        if address is not None:
            del self._of[address][number]
            if not self._of[address]:
                del self._of[address]


# Of all listeners of this process, which share its files.
HANDSHAKES = Handshakes()


def allow_files() -> None:
    """Raises the soft limit of open files of this process and those that it starts, as far as it may."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _FILES if hard == resource.RLIM_INFINITY else min(hard, _FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
