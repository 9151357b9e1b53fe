"""Whether a node is to end, and ending it: its slots are closed first, then it looks again, and only then it ends.

One that declares no end counts all the same for how long nothing has used it: a client may ask. Every node has a
`IdleWatch` of its own, in its runner, and needs neither the head nor a client for it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from skyinfra.drain import request
from skyinfra.drain.request import Drain
from skyinfra.errors import InvalidNodeConfig, NodeFailed, StateDirectoryError
from skyinfra.idle import ending
from skyinfra.idle.meter import FILE, Meter, since_boot, span
from skyinfra.node.folder import NodeDirectory
from skyinfra.node.node import Node
from skyinfra.protocol.nodeconfig import SETUP_S, UNHEARD_S, NodeConfig
from skyinfra.protocol.services import UseOfFleet

logger = logging.getLogger("skyinfra.runner")

# Between two looks, at most this part of the idle time; and where the end is near.
_LOOK_S, _LOOKS = 20.0, 10
_NEAR_S, _LOOK_LEAST_S = 5.0, 0.5
# A fleet that nothing has used yet waits for its other nodes, which boot: machines, containers, processes.
_FIRST_S = {"machine": 900.0, "container": 300.0, "process": 60.0}
# Part of the idle time, and of the lifetime, for which its end is announced, and the longest.
_WARN, _WARN_S = 5, 600.0
# For how long before the end of its lifetime a node takes no new task.
_LAST_S = 120.0
# The meter is written that often, and at each use; a runner that was killed has lost no more.
_WRITE_S = 30.0
# Looks at closed slots before the end.
_AGAIN = 2
# After that long a node of a fleet that goes on ends without the word of its head: none answers, or it never was ready.
_LOST_S = 3600.0
# Terminals: also those of containers.
_TERMINALS = Path("/dev/pts")

# Reports to the head for how long there was no use, for how long the node is kept, whether there was any use, and what
# is said of its end; gives what the head knows, None where it does not answer.
Report = Callable[[Node, float, float, bool, str | None], Awaitable[UseOfFleet | None]]


async def _stays(_: Node, last: bool) -> bool | None:
    return False


@dataclass(eq=False)
class IdleWatch:
    """Watches the node in *directory*.

    used: whether something runs on the node, tasks on closed slots included. closed: whether its slots get no task any
    more. report: see `Report`. ready: whether every slot is there. retire: asks the head whether a node without tasks
    may leave a fleet that goes on, and with True whether it may now; None where it does not answer. over: why the node
    is to end now; None while it is not. stops: what is said of its end, once that is near. problem: why it has not
    ended.
    """

    directory: NodeDirectory
    used: Callable[[], Awaitable[bool]]
    closed: Callable[[], bool]
    report: Report
    ready: Callable[[], bool]
    retire: Callable[[Node, bool], Awaitable[bool | None]] = _stays
    over: str | None = None
    stops: str | None = None
    problem: str | None = None
    _node: Node | None = None
    _meter: Meter | None = None
    _written: Meter | None = None
    _looks: int = 0
    # Whether the disk takes no request for a drain: the slots stay open then, and the looks at them count all the same.
    _refused: bool = False
    _terminals: dict[str, tuple[float, float]] | None = None
    _asked: float | None = None
    # When the head answered last, or the watch began.
    _answered: float = field(default_factory=lambda: since_boot())
    _said: str | None = field(default=None, repr=False)

    def update(self, node: Node) -> None:
        """Follows the configuration of *node* from now on."""
        self._node = node

    async def run(self) -> None:
        """Looks again and again, until it is cancelled."""
        while True:
            await asyncio.sleep(self._pause_s)
            if self._node is not None:
                await self._look(self._node)

    @property
    def _pause_s(self) -> float:
        config = self._node.config if self._node is not None else None
        least = min((seconds for seconds in _lengths(config) if seconds), default=math.inf) if config else 1.0
        return max(_LOOK_LEAST_S, min(_LOOK_S if self.stops is None else _NEAR_S, least / _LOOKS))

    async def _look(self, node: Node) -> None:
        meter = self._meter or self._found(node)
        boot, used = request.this_boot(), await self.used() or self._typed(node)
        meter = meter.advanced(boot=boot, now=since_boot(), ready=self.ready(), config=node.sha256)
        if used:
            meter = meter.used()
        heard = await self.report(node, meter.idle_s, meter.keep_s, meter.begun, self.stops)
        if heard is not None:
            self._answered = since_boot()
            meter = meter.heard(*heard)
            if meter.budget_s is None and (budget := node.config.budget) is not None:
                # A head that keeps no account of it: each node takes its own time for that of all.
                meter = replace(meter, budget_s=max(0.0, budget.seconds - meter.lived_s))
        self._meter = replace(meter, idle_s=0.0, unused_s=0.0) if meter.keep_s else meter
        self._write(self._meter)
        leaves = await self._leaves(node, self._meter) if node.config.node_idle_seconds and not used else None
        self._decide(node, self._meter, running=used, leaves=leaves)

    async def _leaves(self, node: Node, meter: Meter) -> str | None:
        """Returns why a node without tasks ends, of a fleet that goes on without it; None where it stays."""
        idle_s = node.config.node_idle_seconds
        if not meter.served:
            return _unready(_LOST_S) if meter.setup_s >= _LOST_S else None
        if meter.unused_s < idle_s:
            return None
        allowed = await self.retire(node, self._looks >= _AGAIN and self._done)
        alone_s = max(_LOST_S, idle_s)
        if allowed is None and since_boot() - self._answered >= alone_s:
            return f"it had no task and no head for {span(alone_s)}"
        return f"it had no task for {span(idle_s)} (idle_seconds)" if allowed else None

    def _found(self, node: Node) -> Meter:
        """Returns the meter of before. A container and a process that is started again is as a machine that boots:
        whoever deploys it wants to use it, and the time when it did not run is none without use."""
        machine = ending.form(node.config) == "machine"
        found = Meter.find(self.directory.path, machine=machine)
        if machine:
            return found
        found = found.advanced(boot=request.this_boot(), now=since_boot(), ready=False, config=found.config)
        return replace(found, served=False, begun=False, setup_s=0.0)

    def _decide(self, node: Node, meter: Meter, *, running: bool, leaves: str | None) -> None:
        config = node.config
        idle_s = config.idle_seconds if meter.begun else max(config.idle_seconds, _FIRST_S[ending.form(config)])
        idle_left = idle_s - meter.idle_s if config.idle_seconds else math.inf
        life_left, life_s, what, over = _life(config, meter)
        self._warn(idle_s, idle_left, life_s, life_left, meter, f"{what} is {over}")
        if life_left <= 0:
            self._end(f"{what} is {over}", node)
        elif life_left <= min(_LAST_S, _notice(life_s)):
            self._close(request.LIFETIME, what.removeprefix("its "), life_left)
        elif (idle_left > 0 and not leaves) or running:
            self._serve_on()
        else:
            why = f"not used for {span(idle_s)} (stop_after_idle)" if meter.served else _unready(SETUP_S)
            if idle_left > 0 and leaves is not None:
                why = leaves
            self._close(request.IDLE, why, None)
            self._looks = self._looks + 1 if self._done else 0
            # A runner that fails at each start looks once; no task has come to it.
            if self._looks > _AGAIN or (self.closed() and not meter.served):
                self._end(why, node)

    def _warn(self, idle_s: float, idle_left: float, life_s: float, life_left: float, meter: Meter, over: str) -> None:
        """Says that the node ends soon, the less often the longer that takes."""
        text = None
        if life_left <= _notice(life_s):
            text = f"ends in {_about(life_left)}: {over} then, whatever runs"
        elif idle_left <= _notice(idle_s) and meter.served:
            text = f"stops in {_about(idle_left)}: nothing has used it for {span(idle_s)} then (stop_after_idle)"
        if text is not None and self.stops is None:
            logger.warning("the node %s", text)
        self.stops = text

    @property
    def _done(self) -> bool:
        """Whether no more can be done to keep tasks away."""
        return self.closed() or self._refused

    def _close(self, by: str, why: str, until_s: float | None) -> None:
        """Requests the drain, unless there is one already: a person's stays. A recommendation that the node does not
        follow, as no other one has slots, is none."""
        self._refused, found = False, self._request()
        if found is not None and (self.closed() or not found.if_others):
            return
        until = None if until_s is None else time.time() + until_s
        try:
            request.write(self.directory, Drain(request.VERSION, by, why, until, request.this_boot()))
        except StateDirectoryError as error:
            self._refused = True
            self._log(str(error))

    def _serve_on(self) -> None:
        """Takes the node back into service where it was about to end, and not one that ends already."""
        if self.by_itself or (self._asked is not None and since_boot() - self._asked < ending.PATIENCE_S):
            return
        self._looks, self.over, self.problem, self._asked = 0, None, None, None
        if self._meter is not None and self._meter.ended is not None:
            self._meter = replace(self._meter, ended=None)
        found = self._request()
        if found is not None and found.by in (request.IDLE, request.LIFETIME):
            with contextlib.suppress(StateDirectoryError):
                request.clear(self.directory)
            logger.info("the node does not end now: it is used again, or another end is declared")

    def _end(self, why: str, node: Node) -> None:
        """Ends the node: the runner does it, or root, who is asked again where the machine is still there."""
        if self.over is None:
            logger.warning("the node ends: %s", why)
            self.over = why
        assert self._meter is not None  # noqa: S101 - it was read before
        # A machine that is stopped, and not deleted, is used when a deploy starts it again.
        self._meter = replace(self._meter, ended=why)
        self._write(self._meter)
        if ending.form(node.config) != "machine":
            return
        now = since_boot()
        if self._asked is not None and now - self._asked < ending.PATIENCE_S:
            return
        if self._asked is not None:
            self.problem = f"the machine was to end {span(ending.PATIENCE_S)} ago and more, and is still there: {why}"
            self._log(self.problem)
        self._asked = now
        try:
            ending.ask(self.directory, why)
        except StateDirectoryError as error:
            self._log(str(error))

    def use(self, running: bool) -> dict[str, Any]:
        """Returns what a client asks for, see `questions.USE`. Raises `NodeFailed` before the first look.

        running: whether a program of a client runs, or has run since the last look.
        """
        if self._meter is None or self._node is None:
            raise NodeFailed("its runner has just started, and does not know yet for how long it was not used")
        used = running or _moved(self._terminals, _terminals(self._node))
        return {"idle_s": 0.0 if used else self._meter.idle_s, "keep_s": self._meter.keep_s}

    @property
    def by_itself(self) -> bool:
        """Whether the end of the runner is the end of the node."""
        return self.over is not None and self._node is not None and ending.form(self._node.config) != "machine"

    def _request(self) -> Drain | None:
        with contextlib.suppress(InvalidNodeConfig):
            return request.find(self.directory)
        return None

    def _typed(self, node: Node) -> bool:
        """Returns whether somebody has typed, or a program printed, in a terminal since the last look."""
        before, self._terminals = self._terminals, _terminals(node)
        return _moved(before, self._terminals)

    def _write(self, meter: Meter) -> None:
        last = self._written
        gained = math.inf if last is None else meter.lived_s - last.lived_s
        states = [(each.ended, each.served, each.begun) for each in (meter, last) if each is not None]
        moved = last is None or meter.idle_s < last.idle_s or states[0] != states[1]
        if not moved and gained < min(_WRITE_S, self._pause_s * _LOOKS):
            return
        try:
            self.directory.write(self.directory.path / FILE, meter.dumps())
        except StateDirectoryError as error:
            self._log(str(error))
        else:
            self._written = meter

    def _log(self, text: str) -> None:
        if text != self._said:
            logger.error("%s", text)
        self._said = text


def _terminals(node: Node) -> dict[str, tuple[float, float]]:
    """Returns when something was typed and printed last in each terminal of a bought machine or container."""
    found: dict[str, tuple[float, float]] = {}
    if node.config.folder is None:
        return found
    with contextlib.suppress(OSError), os.scandir(_TERMINALS) as entries:
        for entry in entries:
            if entry.name.isdigit():
                with contextlib.suppress(OSError):
                    seen = entry.stat()
                    found[entry.name] = seen.st_atime, seen.st_mtime
    return found


def _moved(before: dict[str, tuple[float, float]] | None, now: dict[str, tuple[float, float]]) -> bool:
    return before is not None and any(before.get(name) != times for name, times in now.items())


def _life(config: NodeConfig, meter: Meter) -> tuple[float, float, str, str]:
    """Returns for how long a node has still to live, whatever runs, of how long; and in words, by what and why.

    What the head said of the budget counts on while it is away, as if all nodes ran. A node that never heard of it
    lives for the one hour that every budget pays: a head that has ended, as all is spent, says nothing to nodes that
    boot later.
    """
    life_s, budget = config.lifetime_seconds, config.budget
    limits = [(life_s - meter.lived_s, life_s, f"its max_lifetime of {span(life_s)}", "over")] if life_s else []
    if budget is not None:
        left_s = min(budget.seconds, UNHEARD_S) - meter.lived_s if meter.budget_s is None else meter.budget_s
        limits.append((left_s, budget.seconds, f"the budget of {budget}", "spent"))
    return min(limits, default=(math.inf, 0.0, "", ""))


def _lengths(config: NodeConfig) -> tuple[float, ...]:
    """Returns the lengths of time after which the node of *config* ends itself, 0 for never."""
    budget_s = config.budget.seconds if config.budget is not None else 0.0
    return config.idle_seconds, config.lifetime_seconds, config.node_idle_seconds, budget_s


def _unready(seconds: float) -> str:
    return f"it was not ready within {span(seconds)}"


def _notice(seconds: float) -> float:
    """Returns for how long before its end a node that ends after so many *seconds* says so."""
    return min(_WARN_S, seconds / _WARN)


def _about(seconds: float) -> str:
    """Returns a length of time that does not change with each look."""
    if seconds < 60:
        return "less than a minute"
    return span(math.ceil(seconds / 60) * 60)
