"""A gateway as its clients see it: whether it lives, serves, and what its clock says; never sends it a request."""

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
    """`problem`: why nobody answered, else empty. `missing`: why it is not ready, `warning`: what it says is wrong
    although it is."""

    url: str
    problem: str = ""
    is_alive: bool = False
    is_ready: bool = False
    missing: str = ""
    warning: str = ""
    skew: Skew | None = None


def read_front(url: str, clock: Clock) -> GatewayFacts:
    try:
        health = _get(url, "/health", clock)
        ready = _get(url, "/ready", clock)
        said = json.loads(ready.body or "{}")
    except (OSError, http.client.HTTPException, ValueError) as error:
        return GatewayFacts(url, problem=str(error) or type(error).__name__)
    reason = said.get("reason") or ready.body.decode(errors="replace")
    return GatewayFacts(
        url,
        is_alive=health.status == 200,
        is_ready=ready.status == 200,
        missing="" if ready.status == 200 else str(reason),
        warning=str(said.get("warning") or ""),
        skew=health.skew,
    )


def judge_front(front: GatewayFacts | None) -> Finding:
    if front is None:
        return skip("gateway", "--url says where a running gateway is to be asked")
    if front.problem:
        fix = (
            "is it running, and is the way there open? `curl -i URL/health`; in a pod the Service, the Ingress and the "
            "NetworkPolicy"
        )
        return fail("gateway", f"{front.url} does not answer: {front.problem}", fix)
    if not front.is_alive:
        return fail("gateway", f"{front.url}/health is not ok", "a --url of Tandem's gateway itself, without a path")
    if not front.is_ready:
        fix = (
            "workers of both roles that reach the same Redis with the same secret: the checks of workers say which lack"
        )
        return fail("gateway", f"{front.url} is not ready: {front.missing}", fix)
    if front.warning:
        return warn("gateway", f"{front.url} is ready, and says: {front.warning}", "what it says; its log has more")
    return ok("gateway", f"{front.url} is ready")


@dataclass(frozen=True, slots=True)
class _Answer:
    status: int
    body: bytes
    skew: Skew | None


def _get(url: str, path: str, clock: Clock) -> _Answer:
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError(f"{url!r} is no http:// or https:// address")
    kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    with closing(kind(parts.hostname, parts.port, timeout=ANSWER_S)) as connection:
        asked, began = wall_ns() / 1e9, clock.now()
        connection.request("GET", parts.path.rstrip("/") + path)
        answer = connection.getresponse()
        took = clock.now() - began
        body = answer.read(_MAX_BODY)
        return _Answer(answer.status, body, _skew(answer.getheader("Date"), url, asked + took / 2, took / 2))


def _skew(date: str | None, who: str, at: float, within: float) -> Skew | None:
    """A date stands for the second that it begins."""
    if date is None:
        return None
    try:
        told = parsedate_to_datetime(date).timestamp()
    except ValueError:
        return None
    return Skew(who, told + DATE_S / 2 - at, DATE_S / 2 + within)
