"""Chooses the next job, fairly between submitters. It runs nothing."""

from __future__ import annotations

from collections.abc import Iterable

from skyinfra.protocol.jobs import JobInfo


class FairShare:
    """Chooses by priority; within one, submitters take turns; of each submitter, the job that was submitted first."""

    def __init__(self) -> None:
        # The number of the last turn of each submitter.
        self._last: dict[str, int] = {}
        self._turn = 0

    def choose(self, candidates: Iterable[JobInfo]) -> JobInfo | None:
        """Returns the job whose turn it is, or None. Submitters without a turn so far come first.

        *candidates*: the jobs that could run now, in the order of their submission.
        """
        # Of equal ones, it is the first.
        selected = min(candidates, key=lambda job: (-job.priority, self._last.get(job.submitter, 0)), default=None)
        if selected is not None:
            self._turn += 1
            self._last[selected.submitter] = self._turn
        return selected

    def forget(self) -> None:
        """Resets the turns, when no job waits."""
        self._last.clear()
