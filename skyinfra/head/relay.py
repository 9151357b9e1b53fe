"""The head's desk: takes the questions of clients, and hands them to the nodes that they are for."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from skyinfra.engine.waiting import within
from skyinfra.protocol.questions import Answer, refused

# A node that waits for questions is answered after that long where there is none.
_LONGEST_WAIT_S = 60.0
# A node that has not asked for questions for that long is gone.
_GONE_S = 90.0
# For that long after a head has started, nodes come to it: they try again every second, and a connection may take some.
_COMING_S = 20.0
# Questions that wait for one node; what is asked beyond that is refused.
_MOST = 100

Respond = Callable[[str, dict[str, Any]], Answer]
Question = tuple[int, str, dict[str, Any]]


@dataclass
class _Line:
    """The questions for one node. waiter: is woken when there are some; seen: when the node asked last."""

    pending: deque[Question] = field(default_factory=deque)
    waiter: asyncio.Future[None] | None = None
    seen: float = 0.0

    def wake(self) -> None:
        if self.waiter is not None and not self.waiter.done():
            self.waiter.set_result(None)


class Desk:
    """Questions for nodes by name. *respond*: answers those for the node *own*, the head itself, in a thread."""

    def __init__(self, own: str, respond: Respond) -> None:
        self._own = own
        self._respond = respond
        self._since = time.monotonic()
        self._came = asyncio.Event()
        self._numbers = itertools.count()
        self._lines: dict[str, _Line] = {}
        self._answers: dict[int, tuple[str, asyncio.Future[Answer]]] = {}

    async def ask(self, node: str, question: str, arguments: dict[str, Any], wait_s: float) -> Answer:
        """The answer of *node*, or why there is none within *wait_s* seconds."""
        if node == self._own:
            return await answered(self._respond, question, arguments)
        until = time.monotonic() + min(wait_s, _LONGEST_WAIT_S)
        line = await self._line(node, until)
        if line is None:
            there = ", ".join(sorted([self._own, *filter(self._there, self._lines)]))
            return refused(LookupError(f"node {node} is not connected to the head; these are: {there}"))
        if len(line.pending) >= _MOST:
            return refused(LookupError(f"node {node} does not take its questions"))
        number = next(self._numbers)
        answer: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._answers[number] = node, answer
        line.pending.append((number, question, arguments))
        line.wake()
        try:
            return await within(answer, max(0.0, until - time.monotonic()))
        except TimeoutError:
            return refused(TimeoutError(f"node {node} did not answer within {wait_s:g} s"))
        finally:
            del self._answers[number]

    def _there(self, node: str) -> bool:
        return node in self._lines and time.monotonic() - self._lines[node].seen <= _GONE_S

    async def _line(self, node: str, until: float) -> _Line | None:
        """The line of *node*. One that is not there may be on its way to a head that has just started."""
        until = min(until, self._since + _COMING_S)
        while not self._there(node):
            left = until - time.monotonic()
            if left <= 0:
                return None
            with contextlib.suppress(TimeoutError):
                await within(self._came.wait(), left)
        return self._lines[node]

    async def questions(self, node: str, wait_s: float) -> list[Question]:
        """What *node* is asked: at once where something is, else within *wait_s* seconds."""
        line = self._lines.setdefault(node, _Line())
        # Whoever waited before was on a connection that the node has given up.
        line.wake()
        line.seen = time.monotonic()
        came, self._came = self._came, asyncio.Event()
        came.set()
        mine = line.waiter = asyncio.get_running_loop().create_future()
        if not line.pending:
            await asyncio.wait({mine}, timeout=min(wait_s, _LONGEST_WAIT_S))
        if line.waiter is not mine:
            return []
        found = list(line.pending)
        line.pending.clear()
        # Who asked may have gone away meanwhile.
        return [each for each in found if each[0] in self._answers]

    def answer(self, node: str, number: int, answer: Answer) -> None:
        """Takes the answer of *node* to the question *number*; one that nobody waits for any more is dropped."""
        asked, future = self._answers.get(number, ("", None))
        if asked == node and future is not None and not future.done():
            future.set_result(answer)


async def answered(respond: Respond, question: str, arguments: dict[str, Any]) -> Answer:
    """What *respond* answers, in a thread of its own; what it raises is an answer too."""
    try:
        return await asyncio.to_thread(respond, question, arguments)
    except Exception as error:  # noqa: BLE001 - it is told to who asked; the runner goes on
        return refused(error)
