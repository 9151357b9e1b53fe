"""The use of a whole fleet, as its head knows it: what the head sees itself, and what the nodes report."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

from skyinfra.protocol.nodeconfig import NodeBudget
from skyinfra.protocol.services import UseOfFleet

# A node that has reported nothing for that long is gone, or does not count.
_SILENT_S = 60.0
# Parts of a budget that are said to who is to be notified; from the second on, to everybody.
_SAID = (0.5, 0.8, 1.0)


class FleetUse:
    """When a fleet was used last. *busy*: whether the head has something to do now. *now*: a clock that never jumps.

    stops: says that and when nodes end themselves, once that is near, by their names. on_stops: gets a node and that
    sentence when it says so first. on_keep: is called when somebody keeps the fleet. budget: what the fleet may cost,
    by the name of its head; None for any amount. spent: gives what it has cost, in USD. budget_stops: whether nodes end
    themselves once it is spent.
    """

    def __init__(self, busy: Callable[[], bool], now: Callable[[], float] = time.monotonic) -> None:
        self.stops: dict[str, str] = {}
        self.on_stops: Callable[[str, str], object] = lambda node, text: None
        self.on_keep: Callable[[], object] = lambda: None
        self.budget: tuple[str, NodeBudget] | None = None
        self.budget_stops = True
        self.spent: Callable[[str, NodeBudget], float] = lambda head, budget: 0.0
        self._part_said = 0.0
        self._busy = busy
        self._now = now
        self._used = -math.inf
        self._kept = -math.inf
        # Whether it was said to this head; until then it has it from its nodes.
        self._keeps = False
        self._begun = False
        # For how long a node knows of no use, when it said so, and whether it ends itself at some time.
        self._reports: dict[str, tuple[float, float, bool]] = {}

    @property
    def ends(self) -> bool:
        """Whether a node of the fleet ends itself at some time."""
        return any(ends for _, _, ends in self._reports.values())

    @property
    def idle_s(self) -> float | None:
        """For how long nobody knows of a use, 0 while the fleet is kept; None before a node, that of the head at least,
        has said something."""
        if self._busy():
            self.note()
        now = self._now()
        return None if not self._reports else 0.0 if self._kept > now else self._least(now)

    def _least(self, now: float) -> float:
        return min(now - self._used, *(idle + now - said for idle, said, _ in self._reports.values()))

    def note(self) -> None:
        """Notes that the fleet is used now."""
        self._used, self._begun = self._now(), True

    def keep(self, seconds: float) -> float:
        """Keeps the fleet from being idle for so many *seconds* from now on, 0 for no longer; returns them."""
        self._kept, self._keeps = self._now() + seconds, True
        self.on_keep()
        return max(0.0, seconds)

    def report(
        self,
        node: str,
        idle_s: float,
        keep_s: float,
        begun: bool = False,
        stops: str | None = None,
        ends: bool = True,
    ) -> UseOfFleet:
        """Notes what *node* knows: for how long there was no use, for how long it is kept, whether there was a use at
        all; and whether it *ends* itself. Returns these of the fleet, and for how long its budget lasts while all nodes
        run.

        A head that started anew has from its nodes what it has forgotten.
        """
        now = self._now()
        if self._busy():
            self.note()
        self._reports = {name: report for name, report in self._reports.items() if now - report[1] < _SILENT_S}
        # Later a node says only what it heard here, some moments ago.
        if not self._keeps and node not in self._reports:
            self._kept = max(self._kept, now + keep_s)
        self._reports[node] = idle_s, now, ends
        self._begun = self._begun or begun
        before, self.stops = self.stops, {name: text for name, text in self.stops.items() if name in self._reports}
        self.stops.pop(node, None)
        if stops is not None:
            self.stops[node] = stops
            if node not in before:
                self.on_stops(node, stops)
        return self._least(now), max(0.0, self._kept - now), self._begun, self._budget_s()

    def _budget_s(self) -> float | None:
        """Returns for how long the budget lasts while all nodes run, and says how much is spent when that is half of
        it and more."""
        if self.budget is None:
            return None
        head, budget = self.budget
        spent = self.spent(head, budget)
        said, self._part_said = self._part_said, max((part for part in _SAID if spent >= part * budget.usd), default=0)
        if self._part_said > said:
            self.on_stops(head, self._spent_text(budget))
        return max(0.0, (budget.usd - spent) / budget.pool * 3600) if self.budget_stops else None

    def _spent_text(self, budget: NodeBudget) -> str:
        if not self.budget_stops:
            return f"says that {self._part_said:.0%} of the budget of {budget} is spent"
        return f"ends once the budget of {budget} is spent: {self._part_said:.0%} of it is"

    @property
    def announced(self) -> dict[str, str]:
        """The ends that are near, in words, by node; of a budget that is nearly spent, by the head."""
        if self.budget is None or self._part_said < _SAID[1]:
            return dict(self.stops)
        head, budget = self.budget
        return {head: self._spent_text(budget), **self.stops}
