"""Whose turn it is, and what the head makes of its jobs, without a fleet."""

from __future__ import annotations

import asyncio
import errno
import os
from pathlib import Path
from types import SimpleNamespace

import pytest
from distributed.core import Status
from journals.heads import Head, Slots, on_head, until
from journals.samples import OUTCOME, wanted
from local_fleets.local_peer import LocalPeer

import skyinfra as sky
from skyinfra.engine.carried import KEY
from skyinfra.head import queue
from skyinfra.head.carried import Adoption
from skyinfra.head.journal import Journal
from skyinfra.protocol import failures, jobs, services
from skyinfra.protocol.calls import Ending, Header, Outcome
from skyinfra.protocol.readings import Figures


@pytest.fixture(autouse=True)
def nothing_comes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """A head that starts waits for no slot on which a job may still run."""
    monkeypatch.setattr(queue, "_BACK_S", 0.0)


@pytest.mark.parametrize("ends", ["done", "cancelled"])
def test_the_record_of_a_job_says_what_it_used(tmp_path: Path, ends: str) -> None:
    async def test(head: Head, fleet: Slots) -> None:
        await head.submit("measured")
        await head.submit("short")
        await until(lambda: fleet.started == ["measured"])
        if ends == "done":
            fleet.end("measured")
        else:
            await head.ask(services.job_cancel, job="measured")
        await until(lambda: fleet.started[1:] == ["short"])
        fleet.end("short")
        await until(lambda: not fleet.tasks)
        found = await head.info("measured", wait_s=5)
        assert (found.state, found.figures) == (ends, Figures(2, memory_peak=7))
        assert (await head.info("short", wait_s=5)).figures is None

    on_head(tmp_path, test)
    (record,) = [each for each in Journal(tmp_path / "jobs").load() if each.info.name == "measured"]
    assert record.info.figures == Figures(2, memory_peak=7), "also after the head has started again"


def test_no_more_run_than_there_are_slots_and_submitters_take_turns(tmp_path: Path) -> None:
    async def test(head: Head, fleet: Slots) -> None:
        await head.submit("first")
        await until(lambda: fleet.started == ["first"])
        for name, who, priority in (("a1", "a", 0), ("a2", "a", 0), ("b1", "b", 0), ("late", "a", -1), ("now", "a", 9)):
            await head.submit(name, submitter=f"{who}@host", priority=priority)
        assert [(await head.info(name)).state for name in ("first", "a1")] == ["running", "queued"]
        await asyncio.sleep(0.05)
        assert fleet.started == ["first"]
        for name in ("first", "now", "b1", "a1", "a2", "late"):
            await until(lambda name=name: fleet.started[-1] == name)
            fleet.end(name)
            assert (await head.info(name, 10)).state == "done"
        assert [job.name for job in await head.ask(services.job_list)] == ["first", "a1", "a2", "b1", "late", "now"]

    on_head(tmp_path, test)


def test_a_job_on_a_slot_that_drains_keeps_no_other_slot_idle(tmp_path: Path) -> None:
    async def test(head: Head, fleet: Slots) -> None:
        for name in ("drained", "next", "last"):
            await head.submit(name)
        await until(lambda: fleet.started == ["drained"])
        # Its slot takes no more, and another one is there.
        fleet.closed.add("drained")
        await until(lambda: fleet.started == ["drained", "next"])
        fleet.end("drained")
        assert (await head.info("drained", 10)).state == "done"
        assert (await head.info("last")).state == "queued"

    on_head(tmp_path, test)


def test_a_job_without_a_slot_says_so_and_holds_up_no_other(tmp_path: Path) -> None:
    async def test(head: Head, fleet: Slots) -> None:
        await head.submit("big", resources={"slot": 1, "profile:7g.80gb": 1}, priority=5)
        await head.submit("small")
        await until(lambda: fleet.started == ["small"])
        assert (await head.info("big")).problem == "no slot of the fleet takes it now"
        fleet.there.append({"slot": 1, "profile:7g.80gb": 1})
        await until(lambda: fleet.started == ["small", "big"])
        assert (await head.info("big")).problem is None

    on_head(tmp_path, test)


def test_jobs_outlive_the_head_and_those_that_ended_do_not_run_again(tmp_path: Path) -> None:
    async def first(head: Head, fleet: Slots) -> None:
        for name in ("done", "lost", "waits"):
            await head.submit(name)
        await until(lambda: fleet.started == ["done"])
        fleet.end("done")
        await until(lambda: fleet.started == ["done", "lost"])

    async def second(head: Head, fleet: Slots) -> None:
        assert (await head.info("done")).state == "done"
        await until(lambda: fleet.started == ["lost"])
        fleet.end("lost")
        await until(lambda: fleet.started == ["lost", "waits"])
        fleet.end("waits")
        assert [(await head.info(name, 10)).attempts for name in ("done", "lost", "waits")] == [1, 2, 1]
        part, _ = await head.ask(services.job_outcome, job="lost", offset=0, length=10_000)
        assert Ending.loads(part) == Ending.of(OUTCOME)

    on_head(tmp_path, first)
    on_head(tmp_path, second)


def test_a_scheduler_that_is_started_anew_gets_what_the_other_had(tmp_path: Path) -> None:
    async def test(head: Head, fleet: Slots) -> None:
        await head.submit("one")
        await until(lambda: fleet.started == ["one"])
        await head.jobs.stop()
        assert (await head.info("one")).state == "queued"
        again = Slots()
        head.jobs.start(again)  # type: ignore[arg-type]
        await until(lambda: again.started == ["one"])
        again.end("one")
        assert (await head.info("one", 10)).state == "done"

    on_head(tmp_path, test)


async def _one_runs(head: Head, fleet: Slots) -> None:
    await head.submit("one")
    await until(lambda: fleet.started == ["one"])


def test_an_attempt_that_goes_on_is_taken_over_and_not_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queue, "_BACK_S", 60.0)

    async def second(head: Head, fleet: Slots) -> None:
        info = await head.info("one")
        assert (info.state, info.problem) == ("queued", "it ran on a slot when the head ended, which is waited for")
        with pytest.raises(KeyError):
            head.jobs.claim(f"{info.key}.2", "n2/0")
        claim = head.jobs.claim(f"{info.key}.1", "n2/0")
        assert claim is not None and Header.loads(claim.header).adopted
        await until(lambda: fleet.adopted == ["one"])
        with pytest.raises(KeyError):  # another slot has it, too
            head.jobs.claim(f"{info.key}.1", "n2/1")
        fleet.end("one")
        info = await head.info("one", 10)
        assert (info.state, info.attempts, info.repeated, fleet.started) == ("done", 1, None, [])
        with pytest.raises(KeyError):
            head.jobs.claim(f"{info.key}.1", "n2/0")

    on_head(tmp_path, _one_runs)
    on_head(tmp_path, second, slots=Slots(0))


def test_an_attempt_that_its_worker_has_lost_begins_again_and_that_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(queue, "_BACK_S", 60.0)

    async def second(head: Head, fleet: Slots) -> None:
        head.jobs.claim(f"{(await head.info('one')).key}.1", "n2/0")
        await until(lambda: fleet.adopted == ["one"])
        next(iter(fleet.tasks.values())).set_result(None)
        await until(lambda: fleet.started == ["one"])
        fleet.end("one")
        info = await head.info("one", 10)
        said = "attempt 1 on n2/0 was lost while the head was away: it began again"
        assert (info.state, info.attempts, info.repeated) == ("done", 2, said)

    on_head(tmp_path, _one_runs)
    on_head(tmp_path, second)


def test_where_an_attempt_was_lost_stays_said_when_the_next_head_ends_as_well(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(queue, "_BACK_S", 60.0)
    first = "attempt 1 on n2/0 was lost while the head was away: it began again"

    async def lost(head: Head, fleet: Slots) -> None:
        # The head ends before it knows to which slot the second attempt went.
        monkeypatch.setattr(fleet, "sent_to", lambda key: None)
        head.jobs.claim(f"{(await head.info('one')).key}.1", "n2/0")
        await until(lambda: fleet.adopted == ["one"])
        next(iter(fleet.tasks.values())).set_result(None)
        await until(lambda: fleet.started == ["one"])
        assert (await head.info("one")).repeated == first

    async def third(head: Head, fleet: Slots) -> None:
        await until(lambda: fleet.started == ["one"])
        fleet.end("one")
        info = await head.info("one", 10)
        second = "attempt 2 was lost while the head was away: it began again"
        assert (info.attempts, info.repeated) == (3, f"{first}; {second}")

    on_head(tmp_path, _one_runs)
    on_head(tmp_path, lost)
    monkeypatch.setattr(queue, "_BACK_S", 0.0)
    on_head(tmp_path, third)


def test_an_attempt_that_was_taken_over_is_not_lost_with_the_scheduler(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(queue, "_BACK_S", 60.0)

    async def second(head: Head, fleet: Slots) -> None:
        key = f"{(await head.info('one')).key}.1"
        head.jobs.claim(key, "n2/0")
        await until(lambda: fleet.adopted == ["one"])
        monkeypatch.setattr(fleet, "ended", True)
        next(iter(fleet.tasks.values())).set_result(None)
        await until(lambda: not fleet.tasks)
        await head.jobs.stop()
        # The next scheduler of the same head.
        monkeypatch.setattr(fleet, "ended", False)
        head.jobs.start(fleet)  # type: ignore[arg-type]
        head.jobs.claim(key, "n2/0")
        await until(lambda: fleet.adopted == ["one"] * 2)
        fleet.end("one")
        info = await head.info("one", 10)
        assert (info.attempts, info.repeated, fleet.started) == (1, None, [])

    on_head(tmp_path, _one_runs)
    on_head(tmp_path, second, slots=Slots(0))


@pytest.mark.parametrize("late", [False, True])
def test_an_attempt_that_is_claimed_while_the_scheduler_closes_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, late: bool
) -> None:
    monkeypatch.setattr(queue, "_BACK_S", 60.0)

    async def second(head: Head, fleet: Slots) -> None:
        key = f"{(await head.info('one')).key}.1"
        if late:
            stopping = asyncio.create_task(head.jobs.stop())
            await asyncio.sleep(0)
        head.jobs.claim(key, "n2/0")
        await (stopping if late else head.jobs.stop())
        head.jobs.start(fleet)  # type: ignore[arg-type]
        assert (await head.info("one")).problem == "it ran on n2/0 when the head ended, which is waited for"
        head.jobs.claim(key, "n2/0")
        await until(lambda: fleet.adopted == ["one"])
        fleet.end("one")
        info = await head.info("one", 10)
        assert (info.attempts, info.repeated, fleet.started) == (1, None, [])

    on_head(tmp_path, _one_runs)
    on_head(tmp_path, second, slots=Slots(0))


def test_a_scheduler_that_closes_takes_nothing_over(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    sent: list[object] = []

    def claim(key: str, slot: str) -> None:
        asked.append(key)

    for status in ("closing", "closed", "running"):
        worker = SimpleNamespace(extra={KEY: ["one.1"]}, name="n2/0")
        scheduler = SimpleNamespace(
            status=Status[status], workers={"tls://n2": worker}, worker_send=lambda *message: sent.append(message)
        )
        Adoption(claim).add_worker(scheduler, "tls://n2")  # type: ignore[arg-type]
        assert (len(asked), sent) == (status == "running", [])


def test_a_job_that_is_cancelled_while_its_slot_is_away_is_not_taken_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(queue, "_BACK_S", 60.0)

    async def second(head: Head, fleet: Slots) -> None:
        assert await head.ask(services.job_cancel, job="one")
        info = await head.info("one")
        with pytest.raises(KeyError):
            head.jobs.claim(f"{info.key}.1", "n2/0")
        assert (info.state, fleet.started, fleet.adopted) == ("cancelled", [], [])

    on_head(tmp_path, _one_runs)
    on_head(tmp_path, second)


def test_a_task_that_the_scheduler_lost_runs_again(tmp_path: Path) -> None:
    async def test(head: Head, fleet: Slots) -> None:
        await head.submit("one")
        await until(lambda: bool(fleet.tasks))
        next(iter(fleet.tasks.values())).set_result(None)
        await until(lambda: len(fleet.started) == 2)
        # Under a key of its own: the nodes count how often one was started without having ended.
        (key,) = fleet.tasks
        assert key.endswith(".2")

    on_head(tmp_path, test)


def test_names_are_taken_until_they_are_given_free(tmp_path: Path) -> None:
    async def test(head: Head, fleet: Slots) -> None:
        first = await head.submit("nightly")
        # The same again is the answer that was lost.
        assert (await head.submit("nightly", identity=first.id)).id == first.id
        for replaces in (False, True):
            with pytest.raises(sky.JobNameTaken, match=r"given: 'nightly'.*\n.*cancel that job"):
                await head.submit("nightly", replace=replaces)
        await until(lambda: bool(fleet.tasks))
        fleet.end("nightly")
        await head.info("nightly", 10)
        with pytest.raises(sky.JobNameTaken, match="is done"):
            await head.submit("nightly")
        second = await head.submit("nightly", replace=True)
        assert [job.id for job in await head.ask(services.job_list)] == [second.id]
        assert (await head.info(second.id[:6])).name == "nightly"
        with pytest.raises(sky.JobNotFound, match=r"given: 'nightl'.*\nDid you mean nightly"):
            await head.info("nightl")
        with pytest.raises(sky.InvalidField, match="Cancel it first"):
            await head.ask(services.job_forget, job="nightly")
        assert await head.ask(services.job_cancel, job="nightly")
        await head.ask(services.job_forget, job="nightly")
        assert await head.ask(services.job_list) == []

    on_head(tmp_path, test)


def test_cancelled_jobs_never_start_or_are_stopped(tmp_path: Path) -> None:
    async def test(head: Head, fleet: Slots) -> None:
        for name in ("runs", "waits", "last"):
            await head.submit(name)
        await until(lambda: fleet.started == ["runs"])
        assert await head.ask(services.job_cancel, job="waits")
        assert await head.ask(services.job_cancel, job="runs")
        assert len(fleet.stopped) == 1
        await until(lambda: fleet.started == ["runs", "last"])
        fleet.end("last")
        assert [(await head.info(name, 10)).state for name in ("runs", "waits", "last")] == [
            "cancelled",
            "cancelled",
            "done",
        ]
        assert not await head.ask(services.job_cancel, job="last")

    on_head(tmp_path, test)
    on_head(tmp_path, lambda head, fleet: _nothing_starts(fleet))


async def _nothing_starts(fleet: Slots) -> None:
    await asyncio.sleep(0.1)
    assert fleet.started == []


def failing(error: Exception) -> Outcome:
    return Outcome(failure=failures.of(error, below=__file__))


def test_retries_are_for_what_may_pass(tmp_path: Path) -> None:
    async def test(head: Head, fleet: Slots) -> None:
        for name, error, starts in (("hard", ValueError("x"), 3), ("lasting", sky.TaskNotPicklable("x"), 1)):
            await head.submit(name, retries=2)
            for number in range(starts):
                await until(lambda name=name, number=number: fleet.started.count(name) == number + 1)
                fleet.end(name, failing(error))
            found = await head.info(name, 10)
            assert (found.state, found.attempts) == ("failed", starts)

    on_head(tmp_path, test)


def test_a_device_without_room_after_other_tasks_costs_a_start_and_no_retry(tmp_path: Path) -> None:
    async def test(head: Head, fleet: Slots) -> None:
        crowded = Outcome(
            failure=failures.of(MemoryError("CUDA out of memory"), below=__file__, shortage={"held": 6e10})
        )
        await head.submit("wants")
        await until(lambda: fleet.started.count("wants") == 1)
        fleet.end("wants", crowded)
        await until(lambda: fleet.started.count("wants") == 2)
        # In a process that has run nothing before, it is the task itself.
        fleet.end("wants", crowded)
        found = await head.info("wants", 10)
        assert (found.state, found.attempts) == ("failed", 2)

    on_head(tmp_path, test)


def test_an_outcome_that_is_too_large_fails_the_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobs, "LARGEST", 1_000_000)

    async def test(head: Head, fleet: Slots) -> None:
        await head.submit("big")
        await until(lambda: bool(fleet.tasks))
        fleet.end("big", Outcome(result=bytes(2_000_000)))
        found = await head.info("big", 10)
        assert found.state == "failed"
        assert (found.problem or "").startswith("skyinfra.TaskTooLarge: 2 MiB are more than")

    on_head(tmp_path, test)


def test_a_task_that_does_not_end_in_its_time_is_given_up(tmp_path: Path) -> None:
    class Slow(Slots):
        def running(self) -> dict[str, tuple[str, float]]:
            return dict.fromkeys(self.tasks, ("n1/0", 3600.0))

    async def test(head: Head, fleet: Slots) -> None:
        header = Header("train-1", "train", "", timeout=60).dumps().decode()
        await head.submit("slow", header=header)
        found = await head.info("slow", 10)
        assert (found.state, found.slot) == ("failed", "n1/0")
        assert (found.problem or "").startswith("skyinfra.TaskTimeout: train ran for more than 60 s")
        assert len(fleet.stopped) == 1

    on_head(tmp_path, test, Slow())


def test_the_oldest_that_ended_go(tmp_path: Path) -> None:
    async def test(head: Head, fleet: Slots) -> None:
        await head.submit("waits", resources={"slot": 1, "profile:none": 1})
        for number in range(5):
            await head.submit(f"job{number}")
            await until(lambda number=number: fleet.started[-1:] == [f"job{number}"])
            fleet.end(f"job{number}")
            await head.info(f"job{number}", 10)
        assert [job.name for job in await head.ask(services.job_list)] == ["waits", "job3", "job4"]

    on_head(tmp_path / "count", test, kept_jobs=2)
    size = sum(
        file.stat().st_size for file in next((tmp_path / "count" / "jobs").glob("[!.]*/outcome")).parent.iterdir()
    )
    on_head(tmp_path / "bytes", test, kept_bytes=2 * size + size // 2)


def test_a_full_disk_refuses_and_keeps_what_there_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queue, "_RETRY_S", 0.02)
    full = [False]
    fsync = os.fsync

    def no_room(handle: int) -> None:
        if full[0]:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        fsync(handle)

    monkeypatch.setattr(os, "fsync", no_room)

    async def test(head: Head, fleet: Slots) -> None:
        await head.submit("runs")
        await until(lambda: bool(fleet.tasks))
        full[0] = True
        with pytest.raises(sky.StateDirectoryError, match="No space left"):
            await head.submit("refused")
        with pytest.raises(sky.StateDirectoryError, match="No space left"):
            await head.ask(services.job_cancel, job="runs")
        fleet.end("runs")
        assert (await head.info("runs", 0.2)).state != "done"
        full[0] = False
        assert (await head.info("runs", 10)).state == "done"
        assert fleet.started == ["runs"]
        assert [job.name for job in await head.ask(services.job_list)] == ["runs"]

    on_head(tmp_path, test)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("name", "../x"),
        ("name", ""),
        ("priority", 1001),
        ("id", "../../etc"),
        ("retries", -1),
        ("resources", {}),
        ("header", "{}"),
        ("size", "many"),
        ("version", 99),
    ],
)
def test_a_submission_that_makes_no_sense_is_refused_with_its_field(tmp_path: Path, field: str, value: object) -> None:
    async def test(head: Head, fleet: Slots) -> None:
        submission = {**wanted().to_json(), field: value}
        with pytest.raises(sky.InvalidField) as caught:
            await head.ask(services.job_submit, submission=submission)
        assert (caught.value.field or "").endswith(field)

    on_head(tmp_path, test)


def test_a_head_that_keeps_no_jobs_is_of_another_version() -> None:
    with pytest.raises(sky.NotSupported, match=r"does not know this call \(given: 'skyinfra_job_list'\)\n.*version"):
        asyncio.run(services.job_list(LocalPeer({})))
