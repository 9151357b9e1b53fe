"""Chooses the next job, fairly between submitters. It runs nothing."""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Callable
from typing import Any, Protocol

from skyinfra.protocol.jobs import JobInfo

# What a slot must have to take a job, and how much of each; equal for jobs that the same slots take.
Needs = tuple[tuple[str, int], ...]


class Candidate(Protocol):
    """A job. number: of those that were submitted. waits: whether it may be started."""

    number: int
    needs: Needs

    @property
    def info(self) -> JobInfo:
        """Its submitter and its priority."""

    @property
    def waits(self) -> bool:
        """See the class."""


class FairShare:
    """Chooses by priority; within one, submitters take turns; of each submitter, the job that was submitted first.

    A choice looks at one job of each line, however many wait: those of a submitter, of a priority and of equal needs.
    """

    def __init__(self) -> None:
        self._lines: defaultdict[tuple[Needs, int, str], list[tuple[int, Any]]] = defaultdict(list)
        # The number of the last turn of each submitter.
        self._last: dict[str, int] = {}
        self._turn = 0

    def add(self, job: Candidate) -> None:
        """Puts a job in its line. One that does not wait when its turn comes leaves it: add it again once it does."""
        heapq.heappush(self._lines[job.needs, job.info.priority, job.info.submitter], (job.number, job))

    def choose(self, fits: Callable[[Needs], bool]) -> Any:
        """Returns the job whose turn it is, and takes it out of its line; None where none waits that *fits*.

        Submitters without a turn so far come first. Where no job waits, the turns begin anew.
        """
        for line in self._lines.values():
            while line and not line[0][1].waits:
                heapq.heappop(line)
        self._lines = defaultdict(list, {of: line for of, line in self._lines.items() if line})
        if not self._lines:
            self._last.clear()
        fitting = (
            ((-priority, self._last.get(submitter, 0), line[0][0]), submitter, line)
            for (needs, priority, submitter), line in self._lines.items()
            if fits(needs)
        )
        selected = min(fitting, key=lambda line: line[0], default=None)
        if selected is None:
            return None
        _, submitter, line = selected
        self._turn += 1
        self._last[submitter] = self._turn
        return heapq.heappop(line)[1]
