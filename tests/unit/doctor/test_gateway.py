"""Test the check of a gateway with a scripted HTTP server."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tandem.core.clock import SystemClock
from tandem.core.config import GatewayConfig
from tandem.doctor.gateway import check_gateway
from tandem.wire.tls import TlsFiles
from tests.certificates import Authority
from tests.ports import free_port
from tests.unit.doctor.verdicts import assert_fails, assert_fine, assert_skips, assert_warns
from tests.unit.http_server import QuietHandler, serving

CLOCK = SystemClock()


@contextmanager
def answering(
    answers: Mapping[str, tuple[int, Any]], date: str = "", files: GatewayConfig | None = None
) -> Iterator[str]:
    """Serve `answers` (path -> status and JSON, or bytes as they are); yields the URL. `files`: serve TLS with
    these."""

    class Handler(QuietHandler):
        def do_GET(self) -> None:
            status, reply = answers.get(self.path, (404, {}))
            self.answer(status, reply if isinstance(reply, bytes) else json.dumps(reply).encode())

        def date_time_string(self, timestamp: float | None = None) -> str:
            return date or super().date_time_string(timestamp)

    with serving(Handler, TlsFiles.of_gateway(files).context() if files else None) as server:
        yield f"http{'s' if files else ''}://127.0.0.1:{server.server_port}"


def test_one_that_is_ready() -> None:
    with answering({"/health": (200, {"status": "ok"}), "/ready": (200, {"status": "ready"})}) as url:
        finding, skew = check_gateway(url, CLOCK)
    assert_fine(finding, "gateway", f"{url} is ready")
    assert skew is not None and abs(skew.ahead_s) <= skew.within_s + 2


def test_one_that_is_not() -> None:
    not_ready = {"/health": (200, {}), "/ready": (503, {"status": "not_ready", "reason": "no worker prefills"})}
    with answering(not_ready) as url:
        assert_fails(check_gateway(url, CLOCK)[0], "gateway", "not ready: no worker prefills", "workers of both roles")
    warning = {"/health": (200, {}), "/ready": (200, {"status": "ready", "warning": "tenants file rejected"})}
    with answering(warning) as url:
        assert_warns(check_gateway(url, CLOCK)[0], "gateway", "tenants file rejected", "the gateway's log")
    with answering({}) as url:
        assert_fails(check_gateway(url, CLOCK)[0], "gateway", "/health is not ok", "Tandem's gateway itself")


def test_a_server_that_is_no_gateway() -> None:
    page = b"<html>It works!</html>"
    with answering({"/health": (404, page), "/ready": (404, page)}) as url:
        found = "/health is not ok: status 404"
        assert_fails(check_gateway(url, CLOCK)[0], "gateway", found, "Tandem's gateway itself")
    for body in (page, ["a list"]):
        with answering({"/health": (200, page), "/ready": (200, body)}) as url:
            found = "/ready is not answered by a gateway: status 200"
            assert_fails(check_gateway(url, CLOCK)[0], "gateway", found, "Tandem's gateway itself")


def test_one_that_does_not_answer() -> None:
    url = f"http://127.0.0.1:{free_port()}"
    assert_fails(check_gateway(url, CLOCK)[0], "gateway", "does not answer: [Errno 111]", "`curl -i URL/health`")
    assert_fails(check_gateway("nonsense:8000", CLOCK)[0], "gateway", "is no URL of HTTP", "write http://nonsense:8000")
    assert_fails(check_gateway("http://[::1", CLOCK)[0], "gateway", "is no URL: Invalid IPv6 URL", "http://HOST:PORT")
    assert check_gateway("nonsense", CLOCK)[1] is None
    assert_skips(check_gateway("", CLOCK)[0], "gateway", "set --url")


def test_one_with_tls(tmp_path: Path) -> None:
    authority = Authority(tmp_path / "ours")
    healthy = {"/health": (200, {}), "/ready": (200, {"status": "ready"})}
    with answering(healthy, files=authority.issue_for_gateway("one")) as url:
        finding, skew = check_gateway(url, CLOCK, str(authority.ca))
        assert_fine(finding, "gateway", f"{url} is ready")
        assert skew is not None
        unknown, _ = check_gateway(url, CLOCK)
        assert_fails(unknown, "gateway", "handshake failed: unable to get local issuer certificate", "set --ca-file")
        missing, _ = check_gateway(url, CLOCK, str(tmp_path / "none"))
        assert_fails(missing, "gateway", "No such file", "set --ca-file")
        plain, _ = check_gateway(url.replace("https", "http"), CLOCK)
        assert_fails(plain, "gateway", "does not answer", "https:// for a gateway with TLS")
    with answering(healthy) as url:
        finding, _ = check_gateway(url.replace("http", "https"), CLOCK, str(authority.ca))
        assert_fails(finding, "gateway", "WRONG_VERSION_NUMBER", "http:// for a gateway without TLS")


def test_the_gateway_s_clock_is_read_from_its_responses() -> None:
    healthy = {"/health": (200, {}), "/ready": (200, {"status": "ready"})}
    with answering(healthy, "Mon, 01 Jan 2001 00:00:00 GMT") as url:
        old = check_gateway(url, CLOCK)[1]
    assert old is not None and old.who == url and old.ahead_s < -(20 * 365 * 86_400)
    with answering(healthy, "no date") as url:
        assert check_gateway(url, CLOCK)[1] is None
