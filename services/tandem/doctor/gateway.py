"""Check a running gateway over HTTP: liveness, readiness and its clock, without sending a completion request."""

from __future__ import annotations

import http.client
import json
from contextlib import closing
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from urllib.parse import urlsplit

from tandem.core.clock import Clock, wall_ns
from tandem.doctor.clock_skew import DATE_S, Skew
from tandem.doctor.finding import Finding, fail, ok, skip, warn

ANSWER_S = 5.0
_MAX_BODY = 64 << 10


@dataclass(frozen=True, slots=True)
class GatewayFacts:
    """State of a gateway.

    `problem`: why it did not answer, else empty. `missing`: why it is not ready, else empty. `warning`: problem that it
    reports although it is ready.
    """

    url: str
    problem: str = ""
    is_alive: bool = False
    is_ready: bool = False
    missing: str = ""
    warning: str = ""
    skew: Skew | None = None


def read_gateway(url: str, clock: Clock) -> GatewayFacts:
    try:
        health = _get(url, "/health", clock)
        ready = _get(url, "/ready", clock)
        reply = json.loads(ready.body or "{}")
    except (OSError, http.client.HTTPException, ValueError) as error:
        return GatewayFacts(url, problem=str(error) or type(error).__name__)
    reason = reply.get("reason") or ready.body.decode(errors="replace")
    return GatewayFacts(
        url,
        is_alive=health.status == 200,
        is_ready=ready.status == 200,
        missing="" if ready.status == 200 else str(reason),
        warning=str(reply.get("warning") or ""),
        skew=health.skew,
    )


def judge_gateway(facts: GatewayFacts | None) -> Finding:
    if facts is None:
        return skip("gateway", "set --url to check a running gateway")
    if facts.problem:
        fix = (
            "check that it runs and that the network lets you reach it: `curl -i URL/health`; in a pod the Service, "
            "the Ingress and the NetworkPolicy"
        )
        return fail("gateway", f"{facts.url} does not answer: {facts.problem}", fix)
    if not facts.is_alive:
        return fail("gateway", f"{facts.url}/health is not ok", "a --url of Tandem's gateway itself, without a path")
    if not facts.is_ready:
        fix = "workers of both roles that reach the same Redis with the same secret: see the checks of workers"
        return fail("gateway", f"{facts.url} is not ready: {facts.missing}", fix)
    if facts.warning:
        return warn(
            "gateway", f"{facts.url} is ready, with a warning: {facts.warning}", "see the warning; its log has more"
        )
    return ok("gateway", f"{facts.url} is ready")


@dataclass(frozen=True, slots=True)
class _Answer:
    status: int
    body: bytes
    skew: Skew | None


def _get(url: str, path: str, clock: Clock) -> _Answer:
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError(f"{url!r} is not an http:// or https:// address")
    kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    with closing(kind(parts.hostname, parts.port, timeout=ANSWER_S)) as connection:
        sent_at, began = wall_ns() / 1e9, clock.now()
        connection.request("GET", parts.path.rstrip("/") + path)
        answer = connection.getresponse()
        took = clock.now() - began
        body = answer.read(_MAX_BODY)
        return _Answer(answer.status, body, _skew(answer.getheader("Date"), url, sent_at + took / 2, took / 2))


def _skew(date: str | None, who: str, at: float, within: float) -> Skew | None:
    """Compare a Date header with the time `at` (seconds since the epoch, plus or minus `within`) of this machine.

    A date is taken as the middle of its second.
    """
    if date is None:
        return None
    try:
        date_s = parsedate_to_datetime(date).timestamp()
    except ValueError:
        return None
    return Skew(who, date_s + DATE_S / 2 - at, DATE_S / 2 + within)
