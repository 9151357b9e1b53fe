"""The fleet page in a real browser: Debian's Chromium, driven by Playwright, with a running fleet behind it."""

from __future__ import annotations

import os
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from front_ends.browser import PATIENCE_MS, findings
from support import ROOT, missing
from terraform_projects.commands import copy_quickstart, skyinfra, until

import skyinfra as sky
from tools import site

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("fleet-page")]


@sky.compute
def speak() -> None:
    import time

    for number in range(600):
        print("line", number, "<b>bold</b>", flush=True)
        sky.progress(number + 1, 600, "<i>note</i>")
        time.sleep(0.5)


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = copy_quickstart(tmp_path_factory.mktemp("page"))
    skyinfra(folder, "deploy", "--auto-approve")
    yield folder
    skyinfra(folder, "destroy", "--auto-approve")


def test_open_drill_into_a_slot_follow_a_log_see_a_layout_change(
    chromium: Any, project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(project)
    with sky.connect("quickstart", "mig") as pool:
        future = pool.submit(speak)
        url = pool.dashboard()
        context = chromium.new_context(bypass_csp=True, viewport={"width": 1440, "height": 1000})
        page = context.new_page()
        wrong: list[str] = []
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.goto(url)
        page.wait_for_selector("[data-slot]", timeout=PATIENCE_MS)
        assert page.locator("[data-slot]").count() == 4
        assert "(simulated)" in page.locator("#fleet").inner_text()
        busy = page.locator("[data-slot]", has_text="speak")
        busy.wait_for(timeout=PATIENCE_MS)

        busy.click()
        assert page.locator("#slot-title").inner_text().startswith("Slot mig-")
        page.locator("#tasks button", has_text="log of").click()
        page.wait_for_function(
            "document.getElementById('log-text').textContent.includes('line 0')", timeout=PATIENCE_MS
        )
        grown = "n => document.getElementById('log-text').textContent.split('\\n').length > n"
        page.wait_for_function(grown, arg=page.locator("#log-text").inner_text().count("\n") + 2, timeout=PATIENCE_MS)
        # As far as it is: of the heartbeat of its worker.
        page.wait_for_selector("#tasks :text('of 600: <i>note</i>')", timeout=PATIENCE_MS)
        assert busy.locator(".done i").evaluate("drawn => parseFloat(drawn.style.width) > 0")
        # What a task prints stays text.
        assert page.locator("#log-text b").count() == 0
        assert "<b>bold</b>" in page.locator("#log-text").inner_text()

        for width in (390, 1440):
            for scheme in ("light", "dark"):
                page.set_viewport_size({"width": width, "height": 1000})
                page.emulate_media(color_scheme=scheme)
                assert findings(page) == []
                assert page.evaluate("document.documentElement.scrollWidth") <= width
                folder = Path(os.environ.get("SKYINFRA_SCREENSHOTS", tmp_path))
                page.screenshot(path=os.fspath(folder / f"fleet-{width}-{scheme}.png"), full_page=True)

        future.cancel()
        main = project / "main.py"
        main.write_text(main.read_text().replace('mig="3g.40gb"', 'mig="2g.20gb*3"'))
        skyinfra(project, "deploy", "--auto-approve")
        page.wait_for_function("document.querySelectorAll('[data-slot]').length === 6", timeout=PATIENCE_MS)
        assert set(page.locator("[data-slot] b").all_inner_texts()) == {"2g.20gb"}
        assert "3g.40gb, 3g.40gb became 2g.20gb, 2g.20gb, 2g.20gb" in page.locator("#seen").inner_text()
        assert wrong == []
        context.close()


def test_a_wrong_token_is_refused(chromium: Any, project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(project)
    with sky.connect("quickstart", "mig") as pool:
        url = pool.dashboard()
        context = chromium.new_context()
        page = context.new_page()
        assert page.goto(url[:-1]).status == 403
        assert page.locator("[data-slot]").count() == 0
        context.close()
        with pytest.raises(urllib.error.HTTPError, match="403"):
            urllib.request.urlopen(url.partition("?")[0].replace("/fleet", "/fleet/state"), timeout=30)


def test_a_job_and_its_log(chromium: Any, project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(project)
    with sky.connect("quickstart", "mig") as pool:
        job = pool.submit(speak, detach="talk")
        context = chromium.new_context(bypass_csp=True)
        page = context.new_page()
        page.goto(pool.dashboard())
        button = page.locator("[data-job=talk]")
        button.wait_for(timeout=PATIENCE_MS)
        button.click()
        page.wait_for_function(
            "document.getElementById('log-text').textContent.includes('line 1')", timeout=PATIENCE_MS
        )
        job.cancel()
        page.wait_for_function("document.getElementById('jobs').textContent.includes('cancelled')", timeout=PATIENCE_MS)
        context.close()
        until(job.done)
        job.forget()


def test_the_documents_can_be_read_by_everyone(chromium: Any, tmp_path: Path) -> None:
    if not site.TOOLS.is_dir():
        missing("what `make docs` builds with, in build/docs-tools,")
    site.prepare(tmp_path / "site-source")
    (tmp_path / "zensical.toml").write_text(site.configuration(tmp_path / "site-source"))
    site.build(tmp_path / "zensical.toml")
    pages = ["index", "laptop", "architecture", "gpu-run", "testing", "modules/aws", "tutorials/lab", "tutorials/sweep"]
    pages += [f"gallery/{name}" for name in ("index", "a30_24gb", "h100_80gb", "h200_141gb")]
    pages += [f"reference/{name}" for name in ("benchmarks", "commands", "index", "json", "pool", "traits")]
    for width in (390, 1440):
        for scheme in ("light", "dark"):
            context = chromium.new_context(viewport={"width": width, "height": 1000}, color_scheme=scheme)
            page = context.new_page()
            for name in pages:
                page.goto((tmp_path / "site" / f"{name}.html").as_uri())
                assert findings(page) == [], (name, width, scheme)
                assert page.evaluate("document.documentElement.scrollWidth") <= width
                if name == "index":
                    parts = page.locator(".front .md-button, .front .highlight, .front img").all()
                    places = [part.bounding_box() for part in parts]
                    assert len(places) == 6, "two doors, installation, program, output, recording"
                    seen = {390: 844, 1440: 900}[width]
                    assert max(each["y"] + each["height"] for each in places) <= seen, "all of it is seen at once"
                    recording = page.locator(".front img").bounding_box()
                    # No half of it is empty.
                    assert width == 390 or (recording["x"] > 720 and recording["width"] > 500), recording
            context.close()


def test_the_picture_of_the_terminal_plays_once(chromium: Any) -> None:
    picture = (ROOT / "docs" / "pictures" / "quickstart.svg").as_uri()
    hidden = """() => [...document.querySelectorAll('text[clip-path^="url(#quickstart-line"], [shape-rendering]')]
        .filter(each => getComputedStyle(each).opacity === '0').length"""
    context = chromium.new_context()
    page = context.new_page()
    page.goto(picture)
    assert page.evaluate(hidden) > 0
    # To the end of it, without the time that it takes.
    page.evaluate("document.getAnimations().forEach(each => each.finish())")
    assert page.evaluate(hidden) == 0
    context.close()
    for wanted in ({"reduced_motion": "reduce"}, {"media": "print"}):
        context = chromium.new_context()
        page = context.new_page()
        page.emulate_media(**wanted)
        page.goto(picture)
        assert page.evaluate(hidden) == 0 and page.evaluate("document.getAnimations().length") == 0, wanted
        context.close()
