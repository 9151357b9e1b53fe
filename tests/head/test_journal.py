"""The journal of the head's jobs."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from journals import samples as journal_samples
from journals.samples import CALL, IDENTITY, OUTCOME, wanted

import skyinfra as sky
from skyinfra.head.journal import Journal, Record, settled
from skyinfra.protocol import failures, jobs
from skyinfra.protocol.calls import Ending, Outcome


def kept(journal: Journal, identity: str = IDENTITY, name: str = "nightly", **fields: Any) -> Record:
    journal.stage(identity, 0, CALL)
    record = Record.of(wanted(name, identity, **fields), now=1000.0)
    journal.add(record, len(CALL))
    return record


def test_a_job_is_read_as_it_was_written(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "jobs")
    assert journal.load() == []
    record = kept(journal, retries=2, resources={"slot": 1, "profile:3g.40gb": 1}, priority=-3)
    assert Journal(tmp_path / "jobs").load() == [record]
    assert journal.call(record) == CALL
    ending = Ending.of(OUTCOME)
    over = settled(record, ending, now=2000.0)
    journal.end(over, ending.dumps())
    assert Journal(tmp_path / "jobs").load() == [over]
    assert (over.info.state, over.info.ended, over.info.problem) == ("done", 2000.0, None)
    data, size = journal.outcome(IDENTITY, 3, 4)
    assert (data, size) == (ending.dumps()[3:7], len(ending.dumps()))
    # The call is not needed any more, and may hold what is nobody's business.
    assert sorted(file.name for file in (tmp_path / "jobs" / IDENTITY).iterdir()) == ["job.json", "outcome"]
    assert (tmp_path / "jobs").stat().st_mode & 0o077 == 0
    journal.forget(IDENTITY)
    assert Journal(tmp_path / "jobs").load() == []


def test_jobs_come_back_in_the_order_of_their_submission(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "jobs")
    for number in (3, 1, 2):
        identity = f"{number}" * 32
        journal.stage(identity, 0, CALL)
        journal.add(Record.of(wanted(f"job{number}", identity), now=float(10 - number)), len(CALL))
    assert [record.info.name for record in journal.load()] == ["job3", "job2", "job1"]


def test_a_failed_job_says_why_in_one_line(tmp_path: Path) -> None:
    outcome = Outcome(failure=failures.of(ValueError("two\nlines"), below=__file__))
    info = settled(Record.of(wanted(), now=1.0), Ending.of(outcome), now=2.0).info
    assert (info.state, info.problem) == ("failed", "ValueError: two")
    for error, summary in (
        (sky.TaskTooLarge("x", hint="y"), "skyinfra.TaskTooLarge: x"),
        (SystemExit(3), "SystemExit: 3"),
        (SyntaxError("bad", ("f.py", 1, 2, "text")), "SyntaxError: bad"),
        (KeyboardInterrupt(), "KeyboardInterrupt"),
    ):
        assert failures.of(error, below=__file__).summary == summary


def test_parts_of_a_call_arrive_in_any_way(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "jobs")
    assert journal.stage(IDENTITY, 0, CALL[:100]) == 100
    assert journal.stage(IDENTITY, 0, CALL[:100]) == 100  # again, after a lost answer
    assert journal.stage(IDENTITY, 500, CALL[500:]) == 100  # what is between is asked for
    with pytest.raises(sky.InvalidField, match=r"100 of its 2048 bytes"):
        journal.add(Record.of(wanted(), now=1.0), len(CALL))
    assert journal.stage(IDENTITY, 100, CALL[100:]) == len(CALL)
    record = Record.of(wanted(), now=1.0)
    journal.add(record, len(CALL))
    assert journal.call(record) == CALL
    with pytest.raises(sky.InvalidField, match="id"):
        journal.stage("../../../etc/cron.d/evil".ljust(32, "0"), 0, b"x")


def test_a_call_that_becomes_a_job_while_others_are_cleared_is_in_nobodys_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, glob = tmp_path / "jobs", Path.glob

    def with_one_that_goes(self: Path, pattern: str) -> list[Path]:
        return [*glob(self, pattern), *([self / f".{'f' * 32}"] if self == folder else [])]

    monkeypatch.setattr(Path, "glob", with_one_that_goes)
    folder.mkdir()
    assert Journal(folder).stage(IDENTITY, 0, CALL) == len(CALL)


def test_a_call_is_stale_when_none_of_its_parts_came_for_long(tmp_path: Path) -> None:
    folder = tmp_path / "jobs"
    place, other = folder / f".{IDENTITY}", "f" * 32
    Journal(folder).stage(IDENTITY, 0, CALL[:100])
    os.utime(place, (0, 0))
    Journal(folder).stage(other, 0, CALL)
    assert Journal(folder).stage(IDENTITY, 100, CALL[100:]) == len(CALL)
    for each in (place / "call", place):
        os.utime(each, (0, 0))
    Journal(folder).stage(other, 0, CALL)
    assert not place.exists()


def test_a_call_that_is_too_large_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobs, "LARGEST", 4 * 2**20)
    journal = Journal(tmp_path / "jobs")
    with pytest.raises(sky.TaskTooLarge, match=r"5 MiB are more .* which is 4 MiB"):
        journal.stage(IDENTITY, 4 * 2**20, bytes(2**20))


def test_a_job_that_cannot_be_read_is_left_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    journal = Journal(tmp_path / "jobs")
    record = kept(journal)
    newer = tmp_path / "jobs" / ("f" * 32)
    newer.mkdir()
    (newer / "job.json").write_text(json.dumps({"version": 99}))
    with caplog.at_level(logging.WARNING, "skyinfra.runner"):
        assert journal.load() == [record]
    assert "is left alone" in caplog.text
    assert newer.exists()


def test_a_head_that_is_killed_at_any_step_keeps_each_job_as_a_whole_or_not_at_all(tmp_path: Path) -> None:
    program = Path(journal_samples.__file__).with_name("kills.py")
    source = Path(sky.__file__).parents[1]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(source), str(program.parents[1])])}
    done = subprocess.run(
        [sys.executable, str(program), str(tmp_path)], capture_output=True, text=True, check=False, env=environment
    )
    assert done.returncode == 0, done.stderr
    steps = int(done.stdout)
    assert steps > 25
    seen = set()
    for number in range(steps):
        folder = tmp_path / str(number)
        said = (folder / "said").read_text().split() if (folder / "said").exists() else []
        journal = Journal(folder / "jobs")
        found = journal.load()
        assert len(found) <= 1
        state = found[0].info.state if found else "none"
        seen.add((*said, state))
        if state == "queued":
            assert journal.call(found[0]) == CALL
            assert "ended" not in said
        elif state == "done":
            assert "added" in said
            assert Ending.loads(journal.outcome(IDENTITY, 0, 10_000)[0]) == Ending.of(OUTCOME)
        else:
            # Not yet acknowledged, or being forgotten.
            assert "added" not in said or "ended" in said
        # It is what it is, and the next load finds the same.
        assert journal.load() == found
        left = {file.relative_to(folder / "jobs").parts[0] for file in (folder / "jobs").rglob(".*")}
        assert left <= {f".{IDENTITY}"}, "a call that may still arrive"
    assert ("added", "ended", "forgotten", "none") in seen
    # The outcome was on the disk, and the head ended before it wrote that the job had ended.
    assert ("added", "done") in seen


def test_a_record_has_a_key_for_each_attempt() -> None:
    record = Record.of(wanted(), now=1.0)
    keys = [replace(record, info=replace(record.info, attempts=n)).attempt().key for n in (1, 2)]
    assert keys == [f"nightly-{IDENTITY}.{n}" for n in (1, 2)]
    assert all(key.startswith(record.info.key) for key in keys)
