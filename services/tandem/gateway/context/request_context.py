"""Who asks, and under which terms, as both fronts tell it; never checks a key."""

from __future__ import annotations

import re
from dataclasses import dataclass
from uuid import uuid4

from tandem.admission.tenant import OPEN, Tenant
from tandem.core.errors import ErrorKind, TandemError
from tandem.core.lane import Lane

LANE_HEADER = "x-tandem-lane"
TIMEOUT_HEADER = "x-request-timeout-ms"
SESSION_HEADER = "x-tandem-session"
EXPLAIN_HEADER = "x-tandem-explain"
TIMING_HEADER = "x-tandem-timing"
TRACEPARENT_HEADER, TRACESTATE_HEADER = "traceparent", "tracestate"
MAX_TIMEOUT_MS = 24 * 3600 * 1000
_LANES = {lane.label: lane for lane in Lane}

_MILLIS = re.compile(r"[0-9]{1,8}")
_SANE_ID = re.compile(rb"[\x21-\x7e]{1,128}")


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestContext:
    """`request_id` is a label that clients choose and repeat. `lane`: None where the client asked for none.
    `timeout_s`: what the client's own deadline leaves; None where it has none. `session`: requests of one key and
    session go to the same workers where that costs nothing. `wants_explanation`: the answer tells why it went where.
    `wants_timing`: it tells where its time went. `received_at`: when the exchange or the call began, on the gateway's
    clock. `traceparent` and `tracestate` are the headers of the W3C's trace context as they came, empty where none
    did."""

    request_id: str
    received_at: float
    tenant: Tenant = OPEN
    lane: Lane | None = None
    timeout_s: float | None = None
    session: str = ""
    wants_explanation: bool = False
    wants_timing: bool = False
    traceparent: str = ""
    tracestate: str = ""

    @property
    def tenant_session(self) -> str:
        """Not the same as anybody else's of that name; empty: there is none."""
        return f"{self.tenant.id} {self.session}" if self.session else ""


def label_of(given: bytes | None) -> str:
    """A client's `x-request-id` where that is 1 to 128 visible ASCII characters, else a new one."""
    return given.decode("ascii") if given and _SANE_ID.fullmatch(given) else uuid4().hex


def lane_of(given: str | None) -> Lane | None:
    """The lane that a client names. Raises INVALID_REQUEST for one that is none."""
    if given is None:
        return None
    label = given.strip().lower()
    if label not in _LANES:
        message = f"{LANE_HEADER} must be one of {', '.join(_LANES)}"
        raise TandemError(ErrorKind.INVALID_REQUEST, message, param=LANE_HEADER)
    return _LANES[label]


def is_asked(header: str, given: str | None) -> bool:
    """Whether a header asks for what it names. Raises INVALID_REQUEST for what is neither 0 nor 1."""
    if given is None or given.strip() in ("0", "1"):
        return given is not None and given.strip() == "1"
    raise TandemError(ErrorKind.INVALID_REQUEST, f"{header} must be 0 or 1", param=header)


def timeout_of(given: str | None) -> float | None:
    """The seconds of a client's deadline, which HTTP itself has no word for. Raises INVALID_REQUEST for what is not a
    whole number of milliseconds in [1, MAX_TIMEOUT_MS]."""
    if given is None:
        return None
    text = given.strip()
    if not _MILLIS.fullmatch(text) or not 1 <= int(text) <= MAX_TIMEOUT_MS:
        message = f"{TIMEOUT_HEADER} must be a whole number of milliseconds from 1 to {MAX_TIMEOUT_MS}"
        raise TandemError(ErrorKind.INVALID_REQUEST, message, param=TIMEOUT_HEADER)
    return int(text) / 1000
