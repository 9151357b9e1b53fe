"""`skyinfra jobs result --patience`: a fleet that is gone, at the first question or later, and one in its place."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from skyinfra.cli import jobs
from skyinfra.errors import CredentialsRefused, FleetNotDeployed, FleetUnreachable, JobNotFound, PoolNotFound

SAID = "waiting for it, or for one in its place"


class Fleet:
    """What becomes of each time that somebody connects to it, asks it for the job, and waits for that; an error is
    raised, and the last one repeats."""

    def __init__(self, *happens: Exception | tuple[Exception | None, Exception | None]) -> None:
        self._happens = list(happens)
        self.connected, self.asked_for = 0, list[str]()
        self.id = "0123456789abcdef"

    @contextmanager
    def __call__(self, name: str) -> Iterator[Fleet]:
        self.connected += 1
        now = self._happens.pop(0) if len(self._happens) > 1 else self._happens[0]
        if isinstance(now, Exception):
            raise now
        self._now = now
        yield self

    def job(self, name: str) -> Fleet:
        self.asked_for.append(name)
        if self._now[0] is not None:
            raise self._now[0]
        return self

    def outcome(self, timeout: float | None) -> None:
        if self._now[1] is not None:
            raise self._now[1]


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobs, "_AGAIN_S", 0.01)


def waited(monkeypatch: pytest.MonkeyPatch, fleet: Fleet, patience: float = 60.0) -> Any:
    monkeypatch.setattr(jobs, "asked", fleet)
    with jobs.ExitStack() as inside:
        return jobs._waited(inside, "here/cpu", "train", None, patience)


GONE = FleetUnreachable("the head does not answer: Connection refused")


def test_a_fleet_that_is_gone_before_the_first_question_is_waited_for(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # The next one has the job a moment after it answers.
    fleet = Fleet(GONE, FleetNotDeployed("here/cpu is not deployed"), (JobNotFound("no job train"), None), (None, None))
    assert waited(monkeypatch, fleet) == (fleet, fleet)
    assert fleet.asked_for == ["train", "train"] and capsys.readouterr().err.count(SAID) == 1


def test_a_fleet_that_goes_later_is_waited_for_each_time_anew(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fleet = Fleet((None, GONE), GONE, (None, GONE), (None, None))
    assert waited(monkeypatch, fleet) == (fleet, fleet)
    # By its id from then on: another job may have its name.
    assert fleet.asked_for == ["train", fleet.id, fleet.id] and capsys.readouterr().err.count(SAID) == 2


@pytest.mark.parametrize(
    "happens", [(JobNotFound("no job train"), None), PoolNotFound("no pool cpu"), CredentialsRefused("another secret")]
)
def test_a_name_that_nobody_has_is_said_at_once(monkeypatch: pytest.MonkeyPatch, happens: Any) -> None:
    fleet = Fleet(happens)
    with pytest.raises((JobNotFound, PoolNotFound, CredentialsRefused)):
        waited(monkeypatch, fleet)
    assert fleet.connected == 1


def test_patience_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    fleet = Fleet(GONE)
    with pytest.raises(FleetUnreachable):
        waited(monkeypatch, fleet, patience=0.2)
    assert fleet.connected > 2
