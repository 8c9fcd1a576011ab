"""Check a running gateway over HTTP: liveness, readiness and its clock, without sending a completion request."""

from __future__ import annotations

import http.client
import json
import ssl
from email.utils import parsedate_to_datetime
from typing import Any
from urllib.parse import urlsplit

from tandem.core.clock import Clock, wall_ns
from tandem.doctor.clock_skew import DATE_S, Skew
from tandem.doctor.finding import Finding, fail, ok, skip, warn
from tandem.doctor.tls import http_connection, tls_reason

ANSWER_S = 5.0
_MAX_BODY = 64 << 10


def check_gateway(url: str, clock: Clock, ca_file: str | None = None) -> tuple[Finding, Skew | None]:
    """Return the finding on the gateway at `url`, and how far its clock differs from this machine's.

    Blocks for up to `ANSWER_S` seconds for each of two requests. With an empty `url` the check is skipped. The clock
    difference is None if the check is skipped, or the gateway does not answer or sends no date. `ca_file`: the CA that
    signed the certificate of an https:// gateway; None for the system's CAs."""
    if not url:
        return skip("gateway", "set --url to check a running gateway"), None
    try:
        is_http = urlsplit(url).scheme in ("http", "https")
    except ValueError as error:
        return fail("gateway", f"--url {url} is no URL: {error}", "write http://HOST:PORT, or https://HOST:PORT"), None
    if not is_http:
        fix = f"write http://{url}, or https://{url} for a gateway with TLS"
        return fail("gateway", f"--url {url} is no URL of HTTP", fix), None
    try:
        context = ssl.create_default_context(cafile=ca_file)
    except OSError as error:  # SSLError is an OSError
        fix = "set --ca-file to a PEM file with the certificate of the CA"
        return fail("gateway", f"cannot use --ca-file {ca_file}: {error.strerror or error}", fix), None
    try:
        health, _, skew = _get(url, "/health", clock, context)
        ready, body, _ = _get(url, "/ready", clock, context)
    except ssl.SSLError as error:
        fix = (
            "set --ca-file to the CA that signed the gateway's certificate, and --url to a name in that certificate; "
            "http:// for a gateway without TLS (gateway.tls_cert_file)"
        )
        return fail("gateway", f"{url}: the TLS handshake failed: {tls_reason(error)}", fix), None
    except (OSError, http.client.HTTPException, ValueError) as error:
        fix = (
            "check that it runs and that the network lets you reach it: `curl -i URL/health`, with https:// for a "
            "gateway with TLS; in a pod check the Service, the Ingress and the NetworkPolicy"
        )
        return fail("gateway", f"{url} does not answer: {str(error) or type(error).__name__}", fix), None
    return _judge_answers(url, health, ready, body), skew


def _judge_answers(url: str, health: int, ready: int, body: bytes) -> Finding:
    """Return the finding on the status of /health (`health`), and on the status (`ready`) and body of /ready."""
    fix = "set --url to the address of Tandem's gateway itself, without a path"
    if health != 200:
        return fail("gateway", f"{url}/health is not ok: status {health}", fix)
    reply = _json_object(body)
    if reply is None:
        return fail("gateway", f"{url}/ready is not answered by a gateway: status {ready}, no JSON object", fix)
    if ready != 200:
        fix = "start workers of both roles, with the same Redis and the same secret: see the check `workers`"
        missing = reply.get("reason") or body.decode(errors="replace")
        return fail("gateway", f"{url} is not ready: {missing}", fix)
    if reply.get("warning"):
        found = f"{url} is ready, with a warning: {reply['warning']}"
        return warn("gateway", found, "correct what the warning names; the gateway's log has more")
    return ok("gateway", f"{url} is ready")


def _json_object(body: bytes) -> dict[str, Any] | None:
    """Return the JSON object in a response, {} for an empty response; None where it is something else."""
    try:
        found = json.loads(body or "{}")
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def _get(url: str, path: str, clock: Clock, context: ssl.SSLContext) -> tuple[int, bytes, Skew | None]:
    """Return status, body, and the difference of the server's clock."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError(f"{url!r} is not an http:// or https:// address")
    secured = context if parts.scheme == "https" else None
    with http_connection(parts.hostname, parts.port, ANSWER_S, secured) as connection:
        sent_at, began = wall_ns() / 1e9, clock.now()
        connection.request("GET", parts.path.rstrip("/") + path)
        answer = connection.getresponse()
        took = clock.now() - began
        body = answer.read(_MAX_BODY)
        return answer.status, body, _skew(answer.getheader("Date"), url, sent_at + took / 2, took / 2)


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
