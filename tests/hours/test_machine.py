"""The hours of a machine: what bills is counted once, whatever runner, clock and boot do."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from support import missing, python_path

from skyinfra.hours.machine import FILE, MachineClock, Moment
from skyinfra.protocol.readings import MachineRun

DAY = 1_795_000_000.0
HOUR = 3600.0
NO_RUN = '{"version": 1, "machine": "a", "up": 1.0, "boot": "b", "booted": 0.0, "runs": []}'


def moment(wall: float, up: float, boot: str = "b1", booted: float | None = 0.0) -> Moment:
    return Moment(wall, up, booted, boot)


def measured(folder: Path, *moments: Moment, provider: str = "aws", given: bool = False) -> list[MachineRun]:
    """What a runner has after *moments*."""
    clock = MachineClock(folder)
    for each in moments:
        runs = clock.measure("n1", provider, given=given, now=each)
    return runs


def hours(runs: list[MachineRun]) -> list[tuple[float, float]]:
    """When each run began, after the day did, and how long it is, in hours."""
    return [((run.began - DAY) / HOUR, run.seconds / HOUR) for run in runs]


def test_the_boot_bills_and_is_counted(tmp_path: Path) -> None:
    # skypilot-org/skypilot#1751 counted machines that never were; here nobody counts but who runs.
    runs = measured(tmp_path, moment(DAY + 600, 600), moment(DAY + HOUR, HOUR))
    assert hours(runs) == [(0, 1)]
    (run,) = runs
    assert run.node == "n1" and run.ended == DAY + HOUR


def test_a_runner_that_was_away_misses_nothing_of_the_same_boot(tmp_path: Path) -> None:
    measured(tmp_path, moment(DAY + HOUR, HOUR))
    assert hours(measured(tmp_path, moment(DAY + 9 * HOUR, 9 * HOUR))) == [(0, 9)]


def test_a_reboot_bills_and_a_stop_does_not(tmp_path: Path) -> None:
    # skypilot-org/skypilot#2769: the hours of a stopped cluster went on.
    measured(tmp_path, moment(DAY + 2 * HOUR, 2 * HOUR))
    rebooted = measured(tmp_path, moment(DAY + 2 * HOUR + 120, 60, "b2"))
    assert hours(rebooted) == [(pytest.approx(0), pytest.approx(2 + 120 / HOUR))]
    stopped = measured(tmp_path, moment(DAY + 12 * HOUR, HOUR, "b3"))
    assert hours(stopped) == [(pytest.approx(0), pytest.approx(2 + 120 / HOUR)), (11, 1)]
    assert len({run.machine for run in stopped}) == 1


@pytest.mark.parametrize("jump", [-400 * 24 * HOUR, 400 * 24 * HOUR])
def test_a_clock_that_jumps_moves_the_hours_and_adds_none(tmp_path: Path, jump: float) -> None:
    runs = measured(tmp_path, moment(DAY + HOUR, HOUR), moment(DAY + 2 * HOUR + jump, 2 * HOUR))
    assert [run.seconds for run in runs] == [2 * HOUR] and runs[0].began == DAY + jump
    # It is set back later: the run lies where it was.
    assert hours(measured(tmp_path, moment(DAY + 3 * HOUR, 3 * HOUR))) == [(0, 3)]


@pytest.mark.parametrize("jump", [-10 * HOUR, 10 * HOUR])
def test_a_clock_that_jumps_over_a_reboot_makes_no_hours(tmp_path: Path, jump: float) -> None:
    measured(tmp_path, moment(DAY + 2 * HOUR, 2 * HOUR))
    runs = measured(tmp_path, moment(DAY + 2 * HOUR + 120 + jump, 60, "b2"))
    assert sum(run.seconds for run in runs) == 2 * HOUR + 60


@pytest.mark.parametrize(("provider", "given"), [("local", False), ("ssh", False), ("aws", True)])
def test_a_machine_that_ran_before_begins_when_it_is_measured(tmp_path: Path, provider: str, given: bool) -> None:
    moments = moment(DAY, 500 * HOUR), moment(DAY + HOUR, 501 * HOUR)
    assert hours(measured(tmp_path, *moments, provider=provider, given=given)) == [(0, 1)]


def test_a_container_has_the_clock_of_its_host_and_its_own_begin(tmp_path: Path) -> None:
    runs = measured(tmp_path, moment(DAY + HOUR, 500 * HOUR, booted=499 * HOUR), provider="runpod")
    assert hours(runs) == [(0, 1)]
    # Stopped for a day, and started again on the same host.
    runs = measured(tmp_path, moment(DAY + 25 * HOUR, 524 * HOUR, booted=523.5 * HOUR), provider="runpod")
    assert hours(runs) == [(0, 1), (24.5, 0.5)]
    unknown = measured(tmp_path / "other", moment(DAY, 500 * HOUR, booted=None), provider="runpod")
    assert hours(unknown) == [(0, 0)], "of a container that does not say when it began, not the days of its host"


@pytest.mark.parametrize("text", ["", "{", "[]", '{"version": 9}', "null", NO_RUN])
def test_a_file_that_is_damaged_counts_nothing_twice(
    tmp_path: Path, text: str, caplog: pytest.LogCaptureFixture
) -> None:
    measured(tmp_path, moment(DAY + HOUR, HOUR))
    (tmp_path / FILE).write_text(text)
    # The head has heard of the hour before, under another id of the machine.
    assert hours(measured(tmp_path, moment(DAY + 2 * HOUR, 2 * HOUR))) == [(2, 0)]
    assert "the hours of this machine begin anew" in caplog.text


def test_a_full_disk_stops_no_runner(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    clock = MachineClock(tmp_path / "gone")
    clock.measure("n1", "aws", now=moment(DAY + HOUR, HOUR))
    assert hours(clock.measure("n1", "aws", now=moment(DAY + 2 * HOUR, 2 * HOUR))) == [(0, 2)]
    assert "cannot be written" in caplog.text


def test_a_container_began_after_its_host() -> None:
    """In a namespace of processes, the first of which has just begun, as that of a container."""
    program = "from skyinfra.hours.machine import Moment; now = Moment.now(); print(now.up - now.booted, now.up)"
    command = ["unshare", "--fork", "--pid", "--mount-proc", sys.executable, "-c", program]
    if os.geteuid() != 0 or shutil.which("unshare") is None:
        missing("root and unshare")
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, env={**os.environ, "PYTHONPATH": python_path()}
    )
    if done.returncode:
        missing(f"a namespace of processes: {done.stderr.strip()}")
    since, up = map(float, done.stdout.split())
    assert 0 <= since < 60 <= up


def test_the_present_moment() -> None:
    now = Moment.now()
    assert now.wall > DAY - 400 * 24 * HOUR and now.up > 0 and now.booted is not None and now.booted <= now.up
