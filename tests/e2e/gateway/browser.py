"""Run a headless browser on a console page, and record its complaints and requests."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, BrowserContext, Page, expect, sync_playwright

from tests.e2e.cluster import PATIENCE_S

ARTIFACTS = Path(__file__).resolve().parents[3] / ".artifacts" / "console"
LAPTOP, PHONE = (1440, 900), (390, 844)
_QUIET = ("--disable-quic", "--no-first-run", "--disable-background-networking", "--disable-component-update")
_OPTIONS = ("--no-sandbox", "--disable-gpu", "--disable-sync", *_QUIET)


@contextmanager
def chromium() -> Iterator[Browser]:
    """Start the machine's own browser. Without one the test is skipped; in CI that is an error."""
    program = shutil.which("chromium")
    if program is None:
        if os.environ.get("CI"):
            pytest.fail("there is no chromium, which .ci/system installs")
        pytest.skip("there is no chromium; `make test` installs it where it may")
    expect.set_options(timeout=PATIENCE_S * 1000)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=list(_OPTIONS))
        yield browser
        browser.close()


class Look:
    """Own one page of one console. `requests` are the addresses that it requested, `complaints` its console's
    messages.
    """

    def __init__(self, context: BrowserContext, url: str) -> None:
        self.url = url
        self.requests: list[str] = []
        self.complaints: list[str] = []
        self.page: Page = context.new_page()
        self.page.set_default_timeout(PATIENCE_S * 1000)
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("console", self._on_console_message)
        self.page.goto(f"{url}/console")

    def _on_console_message(self, message: Any) -> None:
        if message.type in ("error", "warning"):
            self.complaints.append(message.text)

    def strangers(self) -> list[str]:
        """Return requested addresses that are not the gateway's own."""
        return [address for address in self.requests if not address.startswith(f"{self.url}/")]

    def wait(self, expression: str, argument: Any = None) -> Any:
        """Wait until the expression is true in the page; return its value."""
        deadline = time.monotonic() + PATIENCE_S
        # Playwright's own method evaluates text in the page, which the page's policy forbids.
        while not (answer := self.page.evaluate(expression, argument)):
            assert time.monotonic() < deadline, f"never came: {expression}"
            self.page.wait_for_timeout(20)
        return answer

    def overflow(self) -> int:
        """Return by how many pixels the page is wider than its window."""
        found: int = self.page.evaluate("document.documentElement.scrollWidth - window.innerWidth")
        return found

    def keep(self, name: str) -> None:
        """Keep a screenshot of the whole page for inspection."""
        ARTIFACTS.mkdir(parents=True, exist_ok=True)
        self.page.screenshot(path=ARTIFACTS / f"{name}.png", full_page=True, animations="disabled")


@contextmanager
def look(browser: Browser, url: str, size: tuple[int, int] = LAPTOP, **options: Any) -> Iterator[Look]:
    """Open a page. `options` are those of a browser context: `color_scheme`, `reduced_motion`."""
    width, height = size
    context = browser.new_context(viewport={"width": width, "height": height}, **options)
    try:
        yield Look(context, url)
    finally:
        context.close()
