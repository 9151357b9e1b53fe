"""The fleet page of a large fleet: what it loads and draws, and how long it takes."""

from __future__ import annotations

import statistics
from typing import Any

import pytest
from front_ends.browser import PATIENCE_MS, shown
from front_ends.still_fleet import GIB, StillFleet, job_of, slots_of

from skyinfra.page import LiveFleet
from skyinfra.protocol.readings import FleetWork, Progress, SlotReading
from skyinfra.submission.fleet import RunningTask

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("fleet-page")]

# When the slots are first painted, in ms since the page was asked for.
OPENED = """new MutationObserver((changes, all) => {
    if (!document.querySelector('[data-slot]')) return;
    all.disconnect();
    requestAnimationFrame(() => setTimeout(() => { window.opened = performance.now(); }));
}).observe(document, {subtree: true, childList: true})"""
# The time of a look whose tasks all run a minute longer, drawn and laid out: the middle one of five, in ms.
REDRAWN = """async () => {
    const times = [];
    for (let look = 1; look < 6; look++) {
        const found = await (await fetch('/fleet/state')).json(), began = performance.now();
        state = found;
        for (const slot of everySlot()) slot.tasks[0].seconds += 60 * look;
        draw();
        drawFigures();
        document.body.getBoundingClientRect();
        times.push(performance.now() - began);
    }
    return times.sort((one, other) => one - other)[2];
}"""


def large_fleet(nodes: int = 18, layout: tuple[str, ...] = ("1g.10gb",) * 7) -> StillFleet:
    """A fleet of nodes with 8 GPUs, by itself of 1,008 slots, each with a task and a reading."""
    slots = [slot for number in range(nodes) for slot in slots_of(f"n{number}", [layout] * 8)]
    readings = {each.slot: SlotReading(each, 50.0, GIB, 10 * GIB, 60, 400.0) for each in slots}
    tasks = {each.slot: [RunningTask(f"t-{each.slot}", "train", 61.0)] for each in slots}
    work = FleetWork(9e3, 7, 10.0, (1,) * 360, (900,) * 360, {each.slot: Progress(1, 3) for each in slots})
    return StillFleet(slots, readings=readings, tasks=tasks, counted=work, kept_jobs=[job_of(n) for n in range(1500)])


def test_a_thousand_slots_are_light(chromium: Any) -> None:
    """ray#22621: 158 MB for each request; skypilot#5108: 176 MB of jobs; ray#35202, #55010: many jobs."""
    fleet = large_fleet()
    with shown(chromium, LiveFleet(fleet)) as found:
        page = found.page
        assert page.locator("[data-slot]").count() == 1008
        sizes = dict(found.answers)
        assert set(sizes) == {"/fleet", "/fleet/fleet.css", "/fleet/fleet.js", "/fleet/state"}
        assert sum(size for path, size in sizes.items() if path != "/fleet/state") < 40_000
        assert sizes["/fleet/state"] < 1_500_000
        assert page.locator("#jobs tr").count() == 200
        # Out of view, where nothing is laid out before it comes into it.
        assert page.locator("#jobs tr td").first.text_content() == "job-1499", "the newest first"
        assert "The newest 200 of 1500" in found.text()
        watch = """() => { window.seen = 0; new MutationObserver((all) => { window.seen += all.length; })
            .observe(document.querySelector('main'), {subtree: true, childList: true, attributes: true}); }"""
        page.evaluate(watch)
        page.evaluate("draw()")
        assert page.evaluate("new Promise((done) => setTimeout(() => done(window.seen)))") == 0
        fleet.tasks["n3/9"] = [RunningTask("other", "other", 1.0)]
        page.evaluate("fetch('/fleet/state').then((a) => a.json()).then((found) => { state = found; draw(); })")
        assert 1 <= page.evaluate("new Promise((done) => setTimeout(() => done(window.seen)))") < 20
        assert page.locator("[data-slot='n3/9']").inner_text().startswith("1g.10gb")


@pytest.mark.parametrize(("slots", "fleet"), [(8, large_fleet(1, ("7g.80gb",))), (1008, large_fleet())])
def test_the_time_of_a_page(chromium: Any, slots: int, fleet: StillFleet, capsys: pytest.CaptureFixture[str]) -> None:
    """It prints what docs/performance.md says of it: a time decides no test, as machines do other things besides."""
    with shown(chromium, LiveFleet(fleet)) as found:
        found.page.add_init_script(OPENED)
        opened = []
        for _ in range(5):
            found.open()
            found.page.wait_for_function("window.opened", timeout=PATIENCE_MS)
            opened.append(found.page.evaluate("window.opened"))
        assert found.page.locator("[data-slot]").count() == slots
        middle, redrawn = statistics.median(opened), found.page.evaluate(REDRAWN)
        assert "6 min" in found.page.locator("[data-slot]").last.text_content(), "each was drawn: 1 min, and 5 more"
    with capsys.disabled():
        print(f"\nfleet page of {slots} slots: opened in {middle:.0f} ms, drawn again in {redrawn:.1f} ms")
