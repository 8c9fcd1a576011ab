"""Test the console in a browser over a real cluster under load: live data, keyboard use, small screens, no foreign
requests, and a gateway that is gone. Screenshots are kept in `.artifacts/console`.
"""

from __future__ import annotations

import itertools
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from playwright.sync_api import Browser, expect

from tandem.core.request_stages import Stage
from tests.e2e.gateway.browser import LAPTOP, PHONE, Look, chromium, look
from tests.e2e.gateway.pair import Pair
from tests.e2e.gateway.processes import Gateway
from tests.e2e.gateway.tenants import key_of, tenants_file

_salts = itertools.count(7_000_000)
TYPED = "Tell me of Paris"
LENGTHS = """() => {
  window.lengths = [];
  new MutationObserver(() => {
    const words = document.querySelector(".turn.model .words");
    if (words && words.textContent.length !== window.lengths.at(-1)) window.lengths.push(words.textContent.length);
  }).observe(document.getElementById("talk"), {subtree: true, childList: true, characterData: true});
}"""


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as browser:
        yield browser


@pytest.fixture(scope="module")
def busy(calm: Pair) -> Iterator[Pair]:
    """Send one request after another during the test."""
    is_over = threading.Event()

    def send_requests() -> None:
        while not is_over.is_set():
            calm.complete(90, next(_salts), 12)
            is_over.wait(0.05)

    thread = threading.Thread(target=send_requests)
    thread.start()
    yield calm
    is_over.set()
    thread.join()


@pytest.fixture(scope="module")
def locked(calm: Pair, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    """Run another gateway over the same workers, which requires keys."""
    file: Path = tmp_path_factory.mktemp("console") / "tenants.yaml"
    file.write_text(tenants_file({"acme": ""}))
    gateway = calm.cluster.gateway("console", "--auth", "keys", "--tenants", str(file))
    gateway.wait_serving()
    yield gateway
    assert gateway.stop() == 0


def assert_calm(seen: Look) -> None:
    assert seen.complaints == [] and seen.strangers() == []


def chat(seen: Look) -> None:
    """Submit a question by keyboard and wait for the end of the answer."""
    seen.page.locator("#chat-text").press_sequentially(TYPED)
    seen.page.keyboard.press("Enter")
    seen.wait("document.querySelector('.turn.model')?.dataset.state === 'done'")


def test_the_page_shows_live_state(busy: Pair, browser: Browser) -> None:
    """The page shows both workers, the flow between them, points in both charts, and requests with their stages."""
    with look(browser, busy.gateway.url) as seen:
        seen.wait("[...document.querySelectorAll('.worker')].map(({dataset}) => dataset.id).sort().join() === 'd,p'")
        seen.wait("document.querySelector('.flow:not([data-idle])')?.textContent.includes('p → d')")
        seen.wait("document.querySelector('.wire.handoff:not([data-idle]) .base')?.getAttribute('d').length > 0")
        seen.wait("[...document.querySelectorAll('.worker b')].some((b) => /tok.s/.test(b.textContent))")
        seen.wait(
            "[...document.querySelectorAll('.worker .lanes')].some((p) => /^interactive \\d/.test(p.textContent))"
        )
        for chart in ("ttft", "itl"):
            seen.wait(f"document.querySelector('#{chart} .lane.interactive .p50')?.getAttribute('d').length > 0")
        seen.wait("document.querySelectorAll('.rows .row').length > 3")
        widths = "[...document.querySelectorAll('.row .stages')].map((bar) => bar.querySelectorAll('i').length)"
        assert set(seen.page.evaluate(widths)) == {len(Stage)}
        seen.wait("[...document.querySelectorAll('.row .stage-decode')].some((piece) => piece.offsetWidth > 0)")
        expect(seen.page.locator("#tenants-body tbody tr")).to_have_count(1)
        before = int(seen.page.locator(".row").first.get_attribute("data-number") or 0)
        seen.wait("(before) => Number(document.querySelector('.row')?.dataset.number) > before", before)
        assert_calm(seen)


def test_an_answer_streams_and_shows_its_path_and_timing(busy: Pair, browser: Browser) -> None:
    with look(browser, busy.gateway.url) as seen:
        seen.wait("document.querySelector('#chat-model').options.length > 0")
        seen.page.evaluate(LENGTHS)
        chat(seen)
        lengths = seen.page.evaluate("window.lengths")
        assert len(lengths) > 3 and lengths == sorted(lengths)
        expect(seen.page.locator(".turn.model .chip")).to_have_text("remote")
        expect(seen.page.locator(".turn.model .foot")).to_contain_text("first token")
        expect(seen.page.locator(".turn.model .stage-table tbody tr")).to_have_count(len(Stage))
        seen.wait("document.querySelector('.turn.model .stage-decode').offsetWidth > 0")
        expect(seen.page.locator(".turn.model pre")).to_contain_text('"prefill": "p"')
        assert_calm(seen)


@pytest.mark.nightly
def test_keys_alone_are_enough(busy: Pair, browser: Browser) -> None:
    """From the top: the skip link, then a request is opened by Enter and closed by Escape, then a question."""
    with look(browser, busy.gateway.url, reduced_motion="reduce") as seen:
        keys, focused = seen.page.keyboard, "document.activeElement"
        seen.wait("document.querySelectorAll('.rows .row').length > 3")
        keys.press("Tab")
        assert seen.page.evaluate(f"{focused}.className") == "skip"
        reached: list[str] = []
        for _ in range(60):
            keys.press("Tab")
            reached.append(seen.page.evaluate(f"{focused}.id || {focused}.hash || {focused}.getAttribute('class')"))
            outline = seen.page.evaluate(f"getComputedStyle({focused}).outlineStyle")
            assert outline != "none", f"no focus is seen at {reached[-1]}"
            if reached[-1] == "row":
                break
        assert reached[0] == "#map" and reached[-1] == "row" and "requests-pause" in reached
        first = seen.page.evaluate(f"{focused}.dataset.number")
        keys.press("ArrowDown")
        assert seen.page.evaluate(f"{focused}.dataset.number") != first
        keys.press("Enter")
        expect(seen.page.locator("#detail")).to_be_visible()
        assert seen.page.locator("#detail .stage-table tbody th").all_inner_texts()[0] == "Receive"
        for fact in ("Path", "Workers", "Attempts", "Tokens", "Trace"):
            expect(seen.page.locator("#detail dt", has_text=fact).first).to_be_visible()
        seen.keep("request")
        keys.press("Escape")
        expect(seen.page.locator("#detail")).to_be_hidden()
        seen.page.locator("#chat-text").focus()
        keys.type(TYPED)
        keys.press("Enter")
        expect(seen.page.locator(".turn.model[data-state=running]")).to_be_visible()
        keys.press("Escape")
        expect(seen.page.locator(".turn.model[data-state=done]")).to_be_visible()
        assert seen.page.evaluate("getComputedStyle(document.querySelector('.drops')).animationName") == "none"
        assert_calm(seen)


@pytest.mark.nightly
def test_the_page_fits_a_laptop_and_a_phone_in_both_colour_schemes(busy: Pair, browser: Browser) -> None:
    pages: dict[tuple[str, str], str] = {}
    for device, size in (("laptop", LAPTOP), ("phone", PHONE)):
        for theme in ("light", "dark"):
            with look(browser, busy.gateway.url, size, color_scheme=theme) as seen:
                seen.wait("document.querySelectorAll('.rows .row').length > 3")
                chat(seen)
                seen.wait("document.querySelector('.flow:not([data-idle])')")
                assert seen.overflow() <= 0, (device, theme)
                pages[device, theme] = seen.page.evaluate("getComputedStyle(document.body).backgroundColor")
                seen.keep(f"{device}-{theme}")
                if (device, theme) == ("phone", "light"):
                    seen.page.get_by_role("button", name="Dark").click()
                    chosen = seen.page.evaluate("getComputedStyle(document.body).backgroundColor")
                    assert chosen == pages["laptop", "dark"]
                assert_calm(seen)
    assert pages["laptop", "light"] == pages["phone", "light"] != pages["laptop", "dark"] == pages["phone", "dark"]


@pytest.mark.nightly
def test_the_page_cannot_reach_another_origin(calm: Pair, browser: Browser) -> None:
    with look(browser, calm.gateway.url) as seen:
        seen.wait("document.querySelector('#link').dataset.state === 'live'")
        assert_calm(seen)
        blocked = seen.page.evaluate(
            """async (url) => {
              const found = [];
              document.addEventListener("securitypolicyviolation", (event) => found.push(event.effectiveDirective));
              await fetch(url).catch(() => {});
              const script = document.createElement("script");
              try { script.textContent = "window.wasRun = 1"; } catch { found.push("trusted types"); }
              document.body.append(script);
              await new Promise((done) => setTimeout(done, 50));
              return [...found, String(window.wasRun)];
            }""",
            calm.whole.url + "/health",
        )
        assert "connect-src" in blocked and "trusted types" in blocked and blocked[-1] == "undefined"


def test_the_console_can_be_switched_off(calm: Pair) -> None:
    gateway = calm.cluster.gateway("no-console", "--no-console")
    gateway.wait_ready()
    for path, status in (("/console", 404), ("/console/state", 404), ("/console/main.js", 404), ("/health", 200)):
        assert httpx.get(gateway.url + path, trust_env=False).status_code == status
    assert gateway.stop() == 0


@pytest.mark.nightly
def test_with_keys_the_page_requests_one_and_waits_for_a_lost_gateway(locked: Gateway, browser: Browser) -> None:
    with look(browser, locked.url) as seen:
        dialog, status = seen.page.locator("#key-dialog"), seen.page.locator("#key-status")
        expect(dialog).to_be_visible()
        expect(status).to_have_text("")
        seen.keep("key")
        seen.page.keyboard.type("schlüssel")
        seen.page.keyboard.press("Enter")
        expect(status).to_contain_text("letters, digits")
        seen.page.locator("#key-input").fill("tdm_wrong")
        seen.page.keyboard.press("Enter")
        expect(status).to_contain_text("unknown or expired")
        assert seen.page.evaluate("document.querySelectorAll('.worker').length") == 0
        seen.page.locator("#key-input").fill(key_of("acme"))
        seen.page.keyboard.press("Enter")
        expect(dialog).to_be_hidden()
        seen.wait("document.querySelectorAll('.worker').length === 2")
        expect(seen.page.locator("#key")).to_have_text("Key: acme")
        chat(seen)
        seen.wait("document.querySelectorAll('.rows .row').length === 1")
        expect(seen.page.locator("#requests-note")).to_contain_text("tenant acme")
        # The browser logs a refusal for an invalid key as an error.
        assert all("401" in complaint for complaint in seen.complaints) and seen.strangers() == []
        locked.signal(signal.SIGSTOP)
        try:
            expect(seen.page.locator("#link")).to_have_text("reconnecting")
            expect(seen.page.locator("#notice")).to_contain_text("does not answer")
            seen.keep("gone")
        finally:
            locked.signal(signal.SIGCONT)
        expect(seen.page.locator("#link")).to_have_text("live")
        expect(seen.page.locator("#notice")).to_be_hidden()
