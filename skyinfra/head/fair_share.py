"""Which job runs next: fair between those who submit jobs. Nothing here runs anything."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Candidate:
    """A job that could run now. number: grows with every submission."""

    id: str
    submitter: str
    priority: int
    number: int


class Turns:
    """Chooses by priority; within one, submitters take turns; of each submitter, the job that was submitted first."""

    def __init__(self) -> None:
        # When each submitter had its last turn, counted in turns.
        self._last: dict[str, int] = {}
        self._turn = 0

    def choose(self, candidates: Iterable[Candidate]) -> Candidate | None:
        """The job whose turn it is; None where there is none. Who never had a turn comes before who had one."""
        chosen = min(candidates, key=self._rank, default=None)
        if chosen is not None:
            self._turn += 1
            self._last[chosen.submitter] = self._turn
        return chosen

    def forget(self) -> None:
        """Nobody waits: all begin anew."""
        self._last.clear()

    def _rank(self, job: Candidate) -> tuple[int, int, int]:
        return -job.priority, self._last.get(job.submitter, 0), job.number
