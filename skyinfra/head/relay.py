"""Relay of the head: hands the questions of clients to the nodes, and the answers back.

A node is reached through the connection that it has made: its runner waits for questions with `take_questions`.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from skyinfra.engine.waiting import LONGEST_WAIT_S, Changes, within
from skyinfra.errors import NodeError
from skyinfra.protocol import rpc, services
from skyinfra.protocol.rpc import Envelope

# A node that has not asked for questions for that long is gone.
_GONE_S = 90.0
# Nodes connect to a head that has started within that long: they try every second.
_COMING_S = 20.0
# Questions that may wait for one node.
_MOST_PENDING = 100

# Answers a question with arguments; blocks meanwhile.
Respond = Callable[[str, dict[str, Any]], object]
Question = tuple[int, str, dict[str, Any]]


@dataclass
class _Line:
    """The questions for one node. asker: stands for its last call; seen: when that was."""

    pending: deque[Question] = field(default_factory=deque)
    changes: Changes = field(default_factory=Changes)
    asker: object = None
    seen: float = 0.0


class Relay:
    """Questions for nodes, by their names. *respond*: answers those for the head itself, which is the node *own*."""

    def __init__(self, own: str, respond: Respond) -> None:
        self._own = own
        self._respond = respond
        self._since = time.monotonic()
        self._came = Changes()
        self._numbers = itertools.count()
        self._lines: dict[str, _Line] = {}
        self._answers: dict[int, tuple[str, asyncio.Future[Envelope]]] = {}
        self.handlers = rpc.handlers(
            services.ask_node.by(self.ask),
            services.take_questions.by(self.questions),
            services.answer_question.by(self.answer),
        )

    async def ask(self, node: str, question: str, arguments: dict[str, Any], wait_s: float) -> Any:
        """The answer of *node*. Raises its error, or `NodeError` where there is no answer within *wait_s* seconds."""
        if node == self._own:
            return rpc.opened(await answered(self._respond, question, arguments), question)
        until = time.monotonic() + min(wait_s, LONGEST_WAIT_S)
        # It is waited for where the head has just started.
        await self._came.until(lambda: self._there(node), min(until, self._since + _COMING_S) - time.monotonic())
        if not self._there(node):
            there = ", ".join(sorted([self._own, *filter(self._there, self._lines)]))
            raise NodeError(f"node {node} is not connected to the head; these are: {there}")
        line = self._lines[node]
        if len(line.pending) >= _MOST_PENDING:
            raise NodeError(f"node {node} does not take its questions")
        number = next(self._numbers)
        answer: asyncio.Future[Envelope] = asyncio.get_running_loop().create_future()
        self._answers[number] = node, answer
        line.pending.append((number, question, arguments))
        line.changes.notify()
        try:
            envelope = await within(answer, max(0.0, until - time.monotonic()))
        except TimeoutError:
            raise NodeError(f"node {node} did not answer within {wait_s:g} s") from None
        finally:
            del self._answers[number]
        return rpc.opened(envelope, question)

    def is_gone(self, node: str, seconds: float = _GONE_S) -> bool:
        """Returns whether *node* was connected, and has not asked for questions for *seconds*."""
        return node in self._lines and time.monotonic() - self._lines[node].seen > seconds

    def _there(self, node: str) -> bool:
        return node in self._lines and time.monotonic() - self._lines[node].seen <= _GONE_S

    async def questions(self, node: str, wait_s: float) -> list[Question]:
        """Returns the questions for *node*, as soon as there are some; none after *wait_s* seconds."""
        line = self._lines.setdefault(node, _Line())
        # An earlier call of the node was on a connection that it has given up.
        mine = line.asker = object()
        line.changes.notify()
        line.seen = time.monotonic()
        self._came.notify()
        await line.changes.until(lambda: bool(line.pending) or line.asker is not mine, wait_s)
        if line.asker is not mine:
            return []
        found = list(line.pending)
        line.pending.clear()
        # A client may have gone away meanwhile.
        return [each for each in found if each[0] in self._answers]

    def answer(self, node: str, number: int, answer: Envelope) -> None:
        """Takes the answer of *node* to the question *number*; drops it where nobody waits for it any more."""
        asked, future = self._answers.get(number, ("", None))
        if asked == node and future is not None and not future.done():
            future.set_result(answer)


async def answered(respond: Respond, question: str, arguments: dict[str, Any]) -> Envelope:
    """The answer of *respond*, in a thread of its own; every error of it is an answer too, and the runner goes on."""
    return await rpc.answered(asyncio.to_thread(respond, question, arguments), Exception)
