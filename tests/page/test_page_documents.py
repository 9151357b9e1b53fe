"""The documents of the fleet page: what they hold, in which order, and that what is not known is null."""

from __future__ import annotations

import json
from typing import Any

import pytest
from front_ends.still_fleet import StillFleet, job_of, slots_of

from skyinfra import page
from skyinfra.errors import FleetUnreachable
from skyinfra.page import KeptFleet, LiveFleet, Source
from skyinfra.protocol.readings import FleetWork, Progress, SlotReading
from skyinfra.submission.fleet import RunningTask


def document(source: Source, path: str = "state", **query: str) -> Any:
    """Returns the document at a path, as the browser reads it: strict JSON."""
    found = page.answer(source, f"{page.PATH}/{path}", {name: [value] for name, value in query.items()})
    return json.loads(found.body, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))


def test_the_fields_that_the_version_before_had_are_there() -> None:
    fleet = StillFleet(kept_jobs=[job_of(1)], tasks={"n1/0": [RunningTask("t-1", "train", 2.0)]})
    found = document(LiveFleet(fleet, "2 machines"))
    assert set(found) >= {"fleet", "provider", "simulated", "price", "nodes", "jobs", "changes"}
    [node] = found["nodes"]
    assert set(node) == {"name", "head", "machine", "zone", "problem", "missing", "gpus"}
    [gpu] = node["gpus"]
    assert set(gpu) == {"gpu", "accelerator", "units", "slots"}
    assert {"slot", "profile", "start", "size", "going", "sick", "tasks", "reading"} <= set(gpu["slots"][0])
    assert gpu["slots"][0]["tasks"] == [{"key": "t-1", "name": "train", "seconds": 2.0, "progress": None}]
    assert {"name", "id", "task", "state", "submitted", "key"} <= set(found["jobs"][0])


def test_a_head_of_before_counts_nothing_and_nothing_is_0() -> None:
    found = document(LiveFleet(StillFleet()))
    assert (found["work"], found["usd_per_hour"]) == (None, None)
    assert document(LiveFleet(StillFleet(), usd_per_hour=0.0))["usd_per_hour"] == 0


def test_jobs_are_the_newest_first_and_not_all_of_them() -> None:
    """ray#35202, ray#55010 and skypilot#5108: a page slows down with the jobs of weeks."""
    jobs = [job_of(number, state="queued" if number < 3 else "done") for number in range(page.MOST_JOBS + 50)]
    found = document(LiveFleet(StillFleet(kept_jobs=jobs)))
    assert [each["name"] for each in found["jobs"]] == [
        f"job-{number}" for number in range(page.MOST_JOBS + 49, 49, -1)
    ]
    assert (found["jobs_in_all"], found["jobs_queued"]) == (page.MOST_JOBS + 50, 3)


def test_what_is_no_number_is_null() -> None:
    """A task may tell any number, and a browser reads no NaN: one slot would take the page from all others."""
    slots = slots_of("n1", [("3g.40gb",)])
    nan, endless = float("nan"), float("inf")
    fleet = StillFleet(
        slots,
        tasks={"n1/0": [RunningTask("t-1", "train", nan)]},
        readings={"n1/0": SlotReading(slots[0], utilization=nan, power=endless)},
        counted=FleetWork(1.0, 0, 10.0, progress={"n1/0": Progress(nan, endless, "x")}),
    )
    [slot] = document(LiveFleet(fleet))["nodes"][0]["gpus"][0]["slots"]
    assert slot["tasks"][0] == {
        **{"key": "t-1", "name": "train", "seconds": None},
        "progress": {"done": None, "total": None, "note": "x"},
    }
    assert (slot["reading"]["utilization"], slot["reading"]["power"]) == (None, None)


def test_a_head_that_does_not_answer_is_a_problem_and_no_document() -> None:
    class Away(StillFleet):
        def look(self) -> Any:
            raise FleetUnreachable("its head is away")

    found = page.answer(LiveFleet(Away()), f"{page.PATH}/state", {})
    assert found.status == 503
    assert "its head is away" in json.loads(found.body)["problem"]


class Kept:
    """A job that is kept."""

    kept, where, note, simulated = 5.0, "s3://states/demo/jobs/", None, None

    def __init__(self, number: int) -> None:
        self.info = job_of(number)

    def logs(self, lines: int = 1000) -> str:
        return f"\x1b[31mlog of {self.info.name}\x1b[0m"


def test_what_is_kept_has_the_shape_of_a_fleet() -> None:
    source = KeptFleet("demo/mig", [Kept(1), Kept(2)], "the fleet is gone")
    found, live = document(source), document(LiveFleet(StillFleet()))
    assert set(live) - {"work", "usd_per_hour"} <= set(found)
    assert found["spent"] is None, "what it has cost is not kept, or it was free"
    assert found["kept"] == {"at": 5.0, "where": "s3://states/demo/jobs/", "why": "the fleet is gone"}
    assert found["simulated"] is None, "records of the version before do not say it"
    newest, _ = found["jobs"]
    assert document(source, "log", node="n1", task=newest["key"])["text"] == "log of job-2"
    assert "the fleet is gone" in document(source, "log", node="n1", task="")["problem"]
