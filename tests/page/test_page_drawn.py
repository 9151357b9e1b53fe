"""The fleet page as it is drawn, of a fleet that stands still. What users of such pages complained of elsewhere stands
beside each test."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from front_ends.browser import PATIENCE_MS, Shown, findings, shown
from front_ends.still_fleet import HALVES, StillFleet, busy_fleet, job_of, slots_of
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from skyinfra.errors import NodeError
from skyinfra.page import KeptFleet, LiveFleet
from skyinfra.protocol.readings import Figures, FleetWork, Progress, SlotReading
from skyinfra.submission.fleet import RunningTask

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("fleet-page")]

GIB = 2**30


def test_a_person_goes_from_a_partition_to_its_task_and_log(chromium: Any) -> None:
    """skypilot#2108: logs of what runs and of what has ended; dstack#2498: a price without its time, and no sum."""
    with shown(chromium, LiveFleet(busy_fleet(), "2 p5.48xlarge in us-east-1", 98.32)) as found:
        page = found.page
        assert page.locator("[data-slot]").count() == 8
        for words in ("2 of 8", "3", "$98.32 per hour", "about $196.64", "since its head began, 2.0 h ago", "30"):
            assert words in page.locator("#numbers").inner_text()
        slot = page.locator("[data-slot='n1/0']")
        assert "train 1 min 37 %" in slot.inner_text()
        assert slot.locator(".done i").evaluate("drawn => drawn.style.width") == "37%"
        assert page.locator("[data-slot='n2/0'] .done").count() == 0, "it tells no progress"
        assert "to come: n1/5" in page.locator("[data-node=n1]").inner_text()
        slot.click()
        facts = page.locator("#slot").inner_text()
        for words in ("91 %", "20.0 GiB of 40.0 GiB", "61 °C", "402 W", "37 of 100: loss 0.31"):
            assert words in facts
        page.locator("#tasks button", has_text="log of train").click()
        page.wait_for_selector("#log-text:has-text('epoch 2')", timeout=PATIENCE_MS)


def test_keys_do_all_of_it(chromium: Any) -> None:
    with shown(chromium, LiveFleet(busy_fleet())) as found:
        page, focused = found.page, "document.activeElement.dataset.slot || document.activeElement.id"
        page.keyboard.press("Tab")
        assert page.evaluate(focused) == "n1/0"
        walked = []
        for key in ("ArrowRight", "ArrowDown", "ArrowUp", "End", "ArrowRight", "Home", "ArrowLeft"):
            page.keyboard.press(key)
            walked.append(page.evaluate(focused))
        assert walked == ["n1/1", "n1/4", "n1/0", "n2/2", "n2/2", "n1/0", "n1/0"]
        page.keyboard.press("Enter")
        assert page.evaluate(focused) == "slot-title"
        page.keyboard.press("Tab")
        page.keyboard.press("Enter")
        page.wait_for_selector("#log-text:has-text('epoch 2')", timeout=PATIENCE_MS)
        assert page.evaluate(focused) == "log-title"
        page.keyboard.press("Escape")
        assert page.evaluate(focused) == "n1/0"
        assert not page.locator("#details").is_visible()


@pytest.mark.parametrize("details", [False, True])
def test_axe_finds_nothing_and_no_width_is_too_narrow(chromium: Any, tmp_path: Path, details: bool) -> None:
    with shown(chromium, LiveFleet(busy_fleet(), "2 p5.48xlarge", 98.32)) as found:
        page = found.page
        found.source.asked.slots = [*slots_of("n1", [HALVES, ("2g.20gb",) * 3]), *slots_of("n2", [("7g.80gb",)])]
        found.again()
        page.wait_for_selector("#changes:not([hidden])", timeout=PATIENCE_MS)
        if details:
            page.locator("[data-slot='n1/0']").click()
            page.locator("#tasks button").click()
            page.wait_for_selector("#log-text:has-text('epoch 2')", timeout=PATIENCE_MS)
        page.emulate_media(reduced_motion="reduce")
        for width in (320, 390, 1440):
            for scheme in ("light", "dark"):
                page.set_viewport_size({"width": width, "height": 1000})
                page.emulate_media(color_scheme=scheme)
                assert findings(page) == [], (width, scheme)
                assert page.evaluate("document.documentElement.scrollWidth") <= width
                folder = Path(os.environ.get("SKYINFRA_SCREENSHOTS", tmp_path))
                page.screenshot(path=os.fspath(folder / f"still-{details}-{width}-{scheme}.png"), full_page=True)


# What is not known ---------------------------------------------------------------------------------------------------


def zeros(text: str) -> list[str]:
    """Returns the figures that are 0 in a text."""
    return re.findall(r"(?<![\d.,/])(?:\$0(?:\.0+)?(?![\d.])|0(?:\.0+)? ?(?:%|GiB|W\b|°C|Wh|s\b|min|steps|of))", text)


def test_what_the_driver_does_not_tell_is_not_known(chromium: Any) -> None:
    """dask/distributed#8739: utilization of MIG devices was shown as 0; ray#11313: null broke the page."""
    fleet = busy_fleet()
    fleet.readings = {"n1/0": SlotReading(fleet.slots[0], memory_total=40 * GIB)}
    fleet.counted = None
    with shown(chromium, LiveFleet(fleet)) as found:
        found.page.locator("[data-slot='n1/0']").click()
        facts = found.page.locator("#slot-facts").inner_text()
        assert "not known of 40.0 GiB" in facts
        assert re.search(r"use\s+not known", facts)
        numbers = found.page.locator("#numbers").inner_text()
        assert numbers.count("not known") == 3, "waiting, ended, price"
        assert zeros(found.text()) == []


@pytest.fixture
def opened(chromium: Any) -> Iterator[Shown]:
    """The page of any fleet, opened."""
    with shown(chromium, LiveFleet(busy_fleet())) as found:
        yield found


def maybe(kind: Any) -> Any:
    return st.none() | kind


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.tuples(maybe(st.integers(1, 100)), maybe(st.integers(GIB, 9 * GIB)), maybe(st.integers(10 * GIB, 80 * GIB))),
    st.tuples(maybe(st.integers(1, 90)), maybe(st.integers(1, 700)), maybe(st.floats(0.01, 900))),
    maybe(st.lists(maybe(st.integers(1, 50)), max_size=20)),
    maybe(st.builds(Progress, st.floats(1, 9) | st.just(float("nan")), maybe(st.floats(10, 20)))),
    st.just(61.0) | st.just(float("nan")),
    maybe(st.builds(Figures, st.just(1), st.just(1.0), maybe(st.just(GIB)), maybe(st.just(3600.0)))),
)
def test_nothing_unknown_is_a_0(
    opened: Shown, used: Any, device: Any, ended: Any, progress: Any, seconds: float, figures: Figures | None
) -> None:
    """No figure of this fleet is 0, some are not known: a 0 on the page is one that nobody has measured."""
    fleet = busy_fleet()
    reading = SlotReading(fleet.slots[0], *used, *device[:2])
    fleet.tasks = {"n1/0": [RunningTask("train-1", "train", seconds)]}
    fleet.readings = {"n1/0": reading}
    told = {"n1/0": progress} if progress else {}
    fleet.counted = None
    if ended is not None:
        fleet.counted = FleetWork(3600.0, 2, 10.0, (1,) * len(ended), tuple(ended), told)
    fleet.kept_jobs = [job_of(1, slot="n1/0", started=None, ended=None, figures=figures)]
    opened.source = LiveFleet(fleet, usd_per_hour=device[2])
    opened.again()
    opened.page.locator("[data-slot='n1/0']").click()
    text = opened.text()
    assert zeros(text) == []
    assert not re.search(r"NaN|undefined|null|Infinity|Invalid|does not answer", text)


def test_a_fleet_without_jobs_and_one_that_is_asked_are_told_apart(chromium: Any) -> None:
    """ray#17663: nothing runs, and the page seems to load for ever."""
    with shown(chromium, LiveFleet(StillFleet())) as found:
        assert "No jobs." in found.text()
        assert "Asking" not in found.text()


def test_a_fleet_that_does_not_answer_is_said_to_and_what_it_said_stays(chromium: Any) -> None:
    fleet = busy_fleet()
    with shown(chromium, LiveFleet(fleet)) as found:
        fleet.look = lambda: (_ for _ in ()).throw(NodeError("its head is away"))  # type: ignore[method-assign]
        found.again()
        found.page.wait_for_selector("#problem:has-text('its head is away')", timeout=PATIENCE_MS)
        assert found.page.locator("[data-slot]").count() == 8
        del fleet.look
        found.again()
        found.page.wait_for_selector("#problem", state="hidden", timeout=PATIENCE_MS)
        found.wrong[:] = [each for each in found.wrong if "503" not in each]


def test_the_log_of_a_node_that_is_gone_says_so(chromium: Any) -> None:
    """ray#46837, ray#14307: logs of nodes that left load for ever."""
    with shown(chromium, LiveFleet(busy_fleet())) as found:
        found.page.locator("[data-node=n2] button.log").click()
        found.page.wait_for_selector("#log-text:has-text('n2 does not answer')", timeout=PATIENCE_MS)
        found.wrong[:] = [each for each in found.wrong if "503" not in each]


# What comes from elsewhere -------------------------------------------------------------------------------------------

HOSTILE = "<img src=x onerror=alert(1)>\"'><script>alert(2)</script>\u202e\x1b[31m{{7*7}}"


def test_hostile_words_stay_words(chromium: Any) -> None:
    fleet = busy_fleet()
    fleet.tasks = {"n1/0": [RunningTask("t-1", HOSTILE, 1.0)]}
    fleet.counted = FleetWork(1.0, 1, 10.0, progress={"n1/0": Progress(1, 2, HOSTILE)})
    fleet.kept_jobs = [job_of(1, state="failed", slot="n1/0", problem=HOSTILE)]
    fleet.kept_jobs = [replace(each, task=HOSTILE) for each in fleet.kept_jobs]
    fleet.slots = [replace(slot, profile=HOSTILE, accelerator=HOSTILE, uuid=HOSTILE) for slot in fleet.slots]
    fleet.answers = {"n2": NodeError(HOSTILE)}
    fleet.logs = {"t-1": HOSTILE}
    with shown(chromium, LiveFleet(fleet, HOSTILE)) as found:
        page = found.page
        page.locator("[data-slot='n1/0']").click()
        page.locator("#tasks button").click()
        page.wait_for_selector("#log-text:has-text('onerror')", timeout=PATIENCE_MS)
        assert page.locator("img, main script, header script").count() == 0
        assert page.evaluate("document.scripts.length") == 1
        text = found.text()
        assert text.count("<img src=x onerror=alert(1)>") >= 7
        assert "\u202e" not in text and "\x1b" not in text


# Who reads ------------------------------------------------------------------------------------------------------------


def test_a_look_takes_nothing_from_who_reads(chromium: Any) -> None:
    """testkube#3823, opnsense#821: a refresh moved what people read, and took their selection."""
    fleet = busy_fleet()
    fleet.logs["train-1"] = "".join(f"line {number}\n" for number in range(400))
    with shown(chromium, LiveFleet(fleet)) as found:
        page = found.page
        page.locator("[data-slot='n1/0']").click()
        page.locator("#tasks button").click()
        page.wait_for_selector("#log-text:has-text('line 399')", timeout=PATIENCE_MS)
        page.evaluate("by('log-text').scrollTop = 50; getSelection().selectAllChildren(by('jobs-words'))")
        page.locator("#close").focus()
        fleet.logs["train-1"] += "line 400\n"
        found.again()
        page.evaluate("readLog()")
        page.wait_for_selector("#log-text:has-text('line 400')", timeout=PATIENCE_MS)
        where = "[by('log-text').scrollTop, document.activeElement.id, String(getSelection())]"
        assert page.evaluate(where) == [50, "close", "The newest first."]
        page.evaluate("by('log-text').scrollTop = 1e6")
        fleet.logs["train-1"] += "line 401\n"
        page.evaluate("readLog()")
        page.wait_for_selector("#log-text:has-text('line 401')", timeout=PATIENCE_MS)
        assert page.evaluate(
            "by('log-text').scrollTop + by('log-text').clientHeight >= by('log-text').scrollHeight - 1"
        )


# Layouts -------------------------------------------------------------------------------------------------------------


def test_slots_that_share_an_instance_share_its_place(chromium: Any) -> None:
    """dask#10331: the memory of a GPU was counted for each worker on it."""
    slots = slots_of("n1", [("3g.40gb",)])
    shared = [replace(slots[0], worker=n, slot=f"n1/{n}", profile="1c.3g.40gb", uuid=f"MIG-{n}") for n in range(3)]
    shared = [replace(slot, shared_by=3) for slot in shared]
    readings = {slot.slot: SlotReading(slot, memory_used=GIB, memory_total=40 * GIB) for slot in shared}
    with shown(chromium, LiveFleet(StillFleet(shared, readings=readings))) as found:
        widths = found.page.evaluate("[...document.querySelectorAll('.bar > *')].map((e) => e.offsetWidth)")
        assert len(widths) == 4, "three slots, and what is free"
        found.page.locator("[data-slot='n1/1']").click()
        assert "1.0 GiB of 40.0 GiB, shared by 3" in found.page.locator("#slot-facts").inner_text()
        assert max(widths[:3]) - min(widths[:3]) <= 1 and abs(sum(widths[:3]) - widths[3]) <= 3


def test_a_layout_change_is_drawn_as_it_happens(chromium: Any) -> None:
    fleet = StillFleet([*slots_of("n1", [HALVES, HALVES])])
    second = fleet.slots[2:]
    with shown(chromium, LiveFleet(fleet)) as found:
        page = found.page
        fleet.slots, fleet.draining = second, fleet.slots[:2]
        fleet.tasks = {"n1/0": [RunningTask("train-1", "train", 61.0)]}
        found.again()
        page.wait_for_selector("[data-slot].going >> nth=1", timeout=PATIENCE_MS)
        assert "train" in page.locator("[data-slot='n1/0']").inner_text()
        assert "goes" in page.locator("[data-slot='n1/1']").inner_text()
        # The old ones have gone, the new ones are not there yet: of a GPU without slots the fleet says nothing.
        names = ("n1/0", "n1/1", "n1/4")
        fleet.slots, fleet.draining, fleet.tasks, fleet.promised = second, [], {}, {"n1": (*names, "n1/2", "n1/3")}
        found.again()
        page.wait_for_selector("[data-slot='n1/0']", state="detached", timeout=PATIENCE_MS)
        rows = page.locator("[data-node=n1] .gpu")
        assert rows.all_inner_texts()[0] == "GPU 0 H100: no slot now", "it stays, and stays the first"
        assert rows.count() == 2 and rows.nth(1).inner_text().startswith("GPU 1 H100\n")
        assert page.locator(".gpu").first.locator("[data-slot]").count() == 0
        page.locator("[data-slot='n1/2']").focus()
        page.keyboard.press("ArrowUp")
        assert page.evaluate("document.activeElement.dataset.slot") == "n1/2", "there is no slot above it"
        new = slots_of("n1", [("2g.20gb",) * 3])
        new[2:] = [replace(new[2], worker=4, slot="n1/4")]
        fleet.slots = [*new, *second]
        found.again()
        page.wait_for_selector("[data-slot='n1/4']", timeout=PATIENCE_MS)
        assert page.locator(".gpu").first.locator("b").all_inner_texts() == ["2g.20gb"] * 3
        assert rows.first.inner_text().startswith("GPU 0 H100\n")
        assert page.locator("[data-slot].fresh").count() == 3
        [change] = page.locator("#seen li").all_inner_texts()
        assert "n1 GPU 0: 3g.40gb, 3g.40gb became 2g.20gb, 2g.20gb, 2g.20gb" in change
        assert page.locator("#seen .pair .slot").count() == 5
        # A GPU that has gone for good: nothing is to come.
        fleet.slots, fleet.promised = second, {}
        found.again()
        page.wait_for_selector("[data-slot='n1/4']", state="detached", timeout=PATIENCE_MS)
        assert rows.count() == 1 and rows.inner_text().startswith("GPU 1 H100\n")


def test_a_process_that_starts_anew_is_no_change_of_a_layout(chromium: Any) -> None:
    fleet = StillFleet([*slots_of("n1", [HALVES, HALVES])])
    first, second = fleet.slots[:2], fleet.slots[2:]
    with shown(chromium, LiveFleet(fleet)) as found:
        promised = tuple(slot.slot for slot in [*first, *second])
        fleet.slots, fleet.promised = [*first[:1], *second], {"n1": promised}
        found.again()
        found.page.wait_for_selector("[data-slot='n1/1']", state="detached", timeout=PATIENCE_MS)
        fleet.slots = second
        found.again()
        found.page.wait_for_selector("text=GPU 0 H100: no slot now", timeout=PATIENCE_MS)
        fleet.slots, fleet.promised = [*first, *second], {}
        found.again()
        found.page.wait_for_selector("[data-slot='n1/0']", timeout=PATIENCE_MS)
        assert found.page.locator("#seen li").count() == 0


# What is kept --------------------------------------------------------------------------------------------------------


class Kept:
    """A job that is kept."""

    kept, where, simulated = 1_000_500.0, ".skyinfra/.jobs/demo", True

    def __init__(self, number: int, text: str, note: str | None = None, **given: Any) -> None:
        self.info, self.text, self.note = job_of(number, **given), text, note

    def logs(self, lines: int = 1000) -> str:
        return self.text


def test_the_page_of_a_fleet_that_is_gone(chromium: Any) -> None:
    """ray#44561, ray#65696, dstack#2618, dstack#3195: jobs, logs, figures and ends of jobs went with the cluster."""
    figures = Figures(5, 10, 3 * GIB, 7200.0)
    kept = [Kept(1, "all done\n", slot="n1/0", started=1_000_010.0, ended=1_000_190.0, figures=figures)]
    kept.append(Kept(2, "", "the log could not be read", state="running", slot="n9/0", started=1_000_020.0))
    spent = {"at": 1_000_400.0, "where": "s3://states/jobs/", "hours": 40.0, "usd": 2201.6, "estimated": True}
    source = KeptFleet("demo/mig", kept, "the fleet is gone", {**spent, "unknown": []})
    with shown(chromium, source) as found:
        page, text = found.page, found.text()
        cost = page.locator("#numbers").inner_text().splitlines()
        assert cost[:2] == ["Has cost", "~$2,201.60"] and re.match("40.0 node hours, as kept .*1970.* in s3:", cost[2])
        assert "the fleet is gone: what was kept of it" in text
        assert "demo/mig (simulated)" in text
        assert page.locator("#jobs tr td:first-child").all_inner_texts() == ["job-2", "job-1"]
        assert "running when kept: the log could not be read" in text
        assert "3.0 GiB, 2.00 Wh (simulated)" in text
        ended = page.locator("#jobs tr td:nth-child(7)").all_inner_texts()
        assert ended[0] == "" and "1970" in ended[1]
        for nothing in ("Nodes", "slots busy", "Price", "Dask"):
            assert nothing not in text
        page.locator("[data-job=job-1]").click()
        page.wait_for_selector("#log-text:has-text('all done')", timeout=PATIENCE_MS)
        page.locator("[data-job=job-2]").click()
        page.wait_for_selector("#log-text:has-text('Nothing of it is kept')", timeout=PATIENCE_MS)
        assert findings(page) == []
        asked = [path for path, _ in found.answers]
        assert (asked.count("/fleet/state"), asked.count("/fleet/log")) == (1, 2), "what is kept does not change"
