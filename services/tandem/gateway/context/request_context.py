"""Describe who sent a request and what it requires, as read from HTTP headers or gRPC metadata."""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar, get_args

from tandem.admission.tenant import OPEN, Tenant
from tandem.core.config import Disaggregation
from tandem.core.errors import invalid_request
from tandem.core.lane import Lane

LANE_HEADER = "x-tandem-lane"
OBJECTIVE_HEADERS = ("x-llm-d-inference-objective", "x-gateway-inference-objective")
"""Headers by which clients of llm-d name a priority class: its present name and the deprecated one."""
FAIRNESS_HEADERS = ("x-llm-d-inference-fairness-id", "x-gateway-inference-fairness-id")
"""Headers by which llm-d's proxies name the tenant of a request: the present name and the deprecated one."""
TIMEOUT_HEADER = "x-request-timeout-ms"
SESSION_HEADER = "x-tandem-session"
DISAGGREGATION_HEADER = "x-tandem-disaggregation"
EXPLAIN_HEADER = "x-tandem-explain"
TIMING_HEADER = "x-tandem-timing"
TRACEPARENT_HEADER, TRACESTATE_HEADER = "traceparent", "tracestate"
MAX_TIMEOUT_MS = 24 * 3600 * 1000
_LANES = {lane.label: lane for lane in Lane}
_MODES: dict[str, Disaggregation] = {mode: mode for mode in get_args(Disaggregation)}
_FLAGS = {"0": False, "1": True}
_Value = TypeVar("_Value")

_MILLIS = re.compile(r"[0-9]{1,8}")
_SANE_ID = re.compile(r"[\x21-\x7e]{1,128}")
_ONE_LANE, _FLAG = {"enum": [*_LANES]}, {"enum": [*_FLAGS]}
DOCUMENTED_HEADERS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    LANE_HEADER: ("Lane (priority class) of the request, at most the highest lane that the key allows.", _ONE_LANE),
    OBJECTIVE_HEADERS[0]: (f"llm-d's name of {LANE_HEADER}, which takes precedence.", _ONE_LANE),
    FAIRNESS_HEADERS[0]: (
        "Tenant of the request, from a proxy that authenticates clients itself; ignored from all others.",
        {},
    ),
    TIMEOUT_HEADER: (
        "The client's deadline: a request that would miss it is refused at once, one that misses it is ended.",
        {"type": "integer", "minimum": 1, "maximum": MAX_TIMEOUT_MS},
    ),
    SESSION_HEADER: (
        "Session: its requests go to the same workers where that costs nothing. Default: the field `user`.",
        {},
    ),
    EXPLAIN_HEADER: (
        "1: the response's field `tandem` has the reasons of the placement, with the predicted costs.",
        _FLAG,
    ),
    TIMING_HEADER: (
        "1: the response's field `tandem` has the time of each stage; unless streamed, so has a header.",
        _FLAG,
    ),
    TRACEPARENT_HEADER: ("The client's trace, which the request joins where the gateway exports traces.", {}),
}
"""Meaning of each header of a completion, and its JSON schema where that is not just a string, for openapi.json."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestContext:
    """Describe the caller of one request and what its headers or metadata require, alike for HTTP and gRPC.

    `request_id`: the client's label of the request, which need not be unique. `received_at`: when the HTTP exchange or
    RPC began, in seconds of the gateway's clock. `lane`: the priority class; None where the client named none.
    `timeout_s`: seconds until the client's own deadline; None where it has none. `session`: name of the client's
    session; among nearly equal placements, requests of one tenant and session get the same one. `disaggregation`: when
    prefill and decode of the request run on different workers (`off`, `auto`, `prefer`, `strict`); None where the
    client named no mode. `explain`: the response includes the reasons of the placement, what the request waited for,
    and which sequences were preempted in favour of the request. `include_timing`: the response includes the seconds of
    each stage. `traceparent`, `tracestate`: the headers of W3C Trace Context as received; empty where they were
    missing."""

    request_id: str
    received_at: float
    tenant: Tenant = OPEN
    lane: Lane | None = None
    timeout_s: float | None = None
    session: str = ""
    disaggregation: Disaggregation | None = None
    explain: bool = False
    include_timing: bool = False
    traceparent: str = ""
    tracestate: str = ""

    @property
    def tenant_session(self) -> str:
        """Return tenant id and session name together, so that equal names of two tenants differ; empty where there is
        no session."""
        return f"{self.tenant.id} {self.session}" if self.session else ""


def read_context(
    headers: Mapping[str, str], tenant: Tenant, *, request_id: str, received_at: float, timeout_s: float | None
) -> RequestContext:
    """Build the context of a request from its `headers` or metadata, whose names are in lower case.

    The other arguments are fields of the result. Raises TandemError(INVALID_REQUEST) for an unknown lane, whichever
    header names it, for an unknown mode of disaggregation, and for a flag other than 0 or 1."""
    lane_headers = (LANE_HEADER, *OBJECTIVE_HEADERS)
    lane_header = next((name for name in lane_headers if name in headers), LANE_HEADER)
    return RequestContext(
        request_id=request_id,
        received_at=received_at,
        tenant=tenant,
        lane=_named(_LANES, headers, lane_header),
        timeout_s=timeout_s,
        session=headers.get(SESSION_HEADER, ""),
        disaggregation=_named(_MODES, headers, DISAGGREGATION_HEADER),
        explain=bool(_named(_FLAGS, headers, EXPLAIN_HEADER)),
        include_timing=bool(_named(_FLAGS, headers, TIMING_HEADER)),
        traceparent=headers.get(TRACEPARENT_HEADER, ""),
        tracestate=headers.get(TRACESTATE_HEADER, ""),
    )


def label_of(given: str | None) -> str:
    """Return `given`, the client's `x-request-id`, where it is 1 to 128 visible ASCII characters, otherwise a new
    random id."""
    return given if given and _SANE_ID.fullmatch(given) else secrets.token_hex(16)


def _named(values: Mapping[str, _Value], headers: Mapping[str, str], header: str) -> _Value | None:
    """Return the one of `values` that the header named `header` names; None where `headers` lack it.

    Raises TandemError(INVALID_REQUEST) where it names none of them."""
    if header not in headers:
        return None
    name = headers[header].strip().lower()
    if name not in values:
        raise invalid_request(f"{header} must be {' or '.join(values)}", header)
    return values[name]


def timeout_of(given: str | None) -> float | None:
    """Return the seconds in the header `x-request-timeout-ms`, the deadline of an HTTP client; None where it is
    missing.

    Raises TandemError(INVALID_REQUEST) for anything but a whole number of milliseconds from 1 to MAX_TIMEOUT_MS."""
    if given is None:
        return None
    text = given.strip()
    if not _MILLIS.fullmatch(text) or not 1 <= int(text) <= MAX_TIMEOUT_MS:
        message = f"{TIMEOUT_HEADER} must be a whole number of milliseconds from 1 to {MAX_TIMEOUT_MS}"
        raise invalid_request(message, TIMEOUT_HEADER)
    return int(text) / 1000
