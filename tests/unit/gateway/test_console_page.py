"""Test the scripts of the console's page in a browser, which gets all its answers from the test."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from playwright.sync_api import Browser, BrowserContext, Route, expect

from tandem.gateway.console.routes import PAGE, load_assets
from tests.e2e.gateway.browser import Look, chromium

pytestmark = pytest.mark.slow

URL = "http://console.test"
STAGES = ["receive", "decode"]
PARTIAL = """() => {
  const answer = window.fetch;
  window.bodies = [];
  window.fetch = async (path, options) => {
    if (path !== "v1/chat/completions") return answer(path, options);
    window.bodies.push(JSON.parse(options.body));
    const chunk = new TextEncoder().encode('data: {"choices": [{"delta": {"content": "Par"}}]}\\n\\n');
    return new Response(new ReadableStream({
      start(stream) {
        stream.enqueue(chunk);
        options.signal.addEventListener("abort", () => stream.error(new DOMException("gone", "AbortError")));
      },
    }));
  };
}"""
"""Makes each answer of the chat begin with "Par" and go on until it is aborted."""


class Page:
    """Own a console page whose gateway has served `answers` since it started its life `life`."""

    def __init__(self, context: BrowserContext) -> None:
        self.life = "gw-1"
        self.answers: list[dict[str, Any]] = []
        self._assets = load_assets()
        context.route("**/*", self._answer)
        self.look = Look(context, URL)

    def _answer(self, route: Route) -> None:
        name = route.request.url.removeprefix(f"{URL}/console").partition("?")[0].removeprefix("/")
        if name == "state":
            route.fulfill(status=200, content_type="application/json", body=json.dumps(self._state()))
        else:
            asset = self._assets[name or PAGE]
            route.fulfill(status=200, content_type=asset.kind, body=asset.content)

    def _state(self) -> dict[str, Any]:
        figures = {"num_answers": 0, "num_failed": 0, "num_prompt": 0, "num_cached": 0, "num_output": 0}
        return {
            "number": len(self.answers),
            "gateway": {
                "life": self.life, "version": "1", "now": 0, "up_s": 1, "missing": None, "num_running": 0,
                "num_waiting": 0,
            },
            "viewer": {"tenant": "", "is_operator": True},
            "models": ["tiny"],
            "stages": STAGES,
            "num_workers": 0,
            "workers": [],
            "flows": [],
            "recent": {**figures, "gap": 0, "ttft": None, "itl": None},
            "slice_s": 5.0,
            "slice_now": 100,
            "num_slices": 60,
            "slices": [],
            "tenants": [],
            "tenants_s": 300.0,
            "answers": self.answers,
        }  # fmt: skip


def answer(number: int, model: str) -> dict[str, Any]:
    texts = ("id", "label", "trace", "path", "reason", "tenant", "error")
    return {
        **dict.fromkeys(texts, ""), "number": number, "model": model, "endpoint": "chat", "lane": "batch",
        "outcome": "finished", "num_attempts": 1, "workers": [], "is_streamed": True, "num_prompt": 1,
        "num_cached": 0, "num_output": 1, "at": 0, "total": 2, "ttft": 1, "itl": None, "gap": 0, "stages": [1, 1],
    }  # fmt: skip


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as browser:
        yield browser


@pytest.fixture
def page(browser: Browser) -> Iterator[Page]:
    context = browser.new_context()
    yield Page(context)
    context.close()


def test_a_cleared_conversation_is_not_sent_with_the_next_message(page: Page) -> None:
    seen = page.look
    seen.wait("document.querySelector('#chat-model').options.length > 0")
    seen.page.evaluate(PARTIAL)
    for text in ("first", "second"):
        seen.page.locator("#chat-text").fill(text)
        seen.page.keyboard.press("Enter")
        expect(seen.page.locator(".turn.model .words")).to_have_text("Par")
        if text == "first":
            seen.page.locator("#chat-clear").click()
            expect(seen.page.locator("#chat-send")).to_be_visible()
    assert [body["messages"] for body in seen.page.evaluate("window.bodies")] == [
        [{"role": "user", "content": "first"}],
        [{"role": "user", "content": "second"}],
    ]


def test_after_a_restart_the_list_has_the_requests_of_the_new_gateway(page: Page) -> None:
    page.answers = [answer(2, "old"), answer(1, "old")]
    models = page.look.page.locator(".rows .row .who")
    expect(models).to_have_text(["old", "old"])
    page.life, page.answers = "gw-2", [answer(1, "new")]
    expect(models).to_have_text(["new"])
