"""The fleet page in Debian's Chromium, driven by Playwright."""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
from collections.abc import Iterator
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest
from support import ROOT, missing

from skyinfra import page as fleet_page

TOOLS = ROOT / "build" / "browser"
AXE = ROOT / "tests" / "npm" / "node_modules" / "axe-core" / "axe.min.js"
ADDRESS = "http://127.0.0.1:9"
PATIENCE_MS = 60_000


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    """Debian's Chromium."""
    program = shutil.which("chromium")
    if program is None or not TOOLS.is_dir():
        missing("Chromium with Playwright (`make browser`)")
    sys.path.insert(0, os.fspath(TOOLS))
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        yield browser
        browser.close()
    sys.path.remove(os.fspath(TOOLS))


def findings(page: Any, *impacts: str) -> list[str]:
    """Returns the findings of axe on the page, those of *impacts* or of any."""
    if not AXE.is_file():
        missing("axe-core, of tests/npm,")
    # Not as a script of the page, which its policy refuses.
    page.evaluate(AXE.read_text(encoding="utf-8"))
    found = page.evaluate("async () => (await axe.run()).violations")
    return [
        f"{each['id']}: {each['help']}: {[node['target'] for node in each['nodes']]}"
        for each in found
        if not impacts or each["impact"] in impacts
    ]


class Shown:
    """The fleet page of *source* in a page of the browser, with the headers that it has. answers: the paths that were
    asked for, with the bytes of their answers. wrong: errors of its scripts, and what its policy has refused."""

    def __init__(self, page: Any, source: Any) -> None:
        self.page = page
        self.source = source
        self.answers: list[tuple[str, int]] = []
        self.wrong: list[str] = []
        page.on("pageerror", lambda error: self.wrong.append(str(error)))
        page.on("console", lambda said: self.wrong.append(said.text) if said.type == "error" else None)
        page.on("dialog", lambda dialog: (self.wrong.append(dialog.message), dialog.dismiss()))
        page.route("**/*", self._answer)

    def _answer(self, route: Any) -> None:
        asked = urlsplit(route.request.url)
        found = fleet_page.answer(self.source, asked.path, parse_qs(asked.query))
        self.answers.append((asked.path, len(found.body)))
        headers = {"Content-Type": found.kind, "Content-Security-Policy": fleet_page.POLICY}
        route.fulfill(status=found.status, headers=headers, body=found.body)

    def open(self) -> Any:
        """Opens it, and waits until it is drawn."""
        self.page.goto(f"{ADDRESS}/fleet")
        self.page.wait_for_selector("#jobs-part:not([hidden])", timeout=PATIENCE_MS)
        return self.page

    def again(self) -> None:
        """Asks the fleet once more, at once, and draws what it says."""
        self.page.evaluate("look()")

    def text(self) -> str:
        """Returns what a person reads on it."""
        return str(self.page.locator("body").inner_text())


@contextlib.contextmanager
def shown(browser: Any, source: Any, **options: Any) -> Iterator[Shown]:
    """The fleet page of *source*, opened. options: of the context of Playwright."""
    context = browser.new_context(**{"viewport": {"width": 1440, "height": 1000}, **options})
    try:
        found = Shown(context.new_page(), source)
        found.open()
        yield found
        assert found.wrong == []
    finally:
        context.close()
