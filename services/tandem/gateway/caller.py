"""Who asks, and under which terms, as both fronts tell it; never checks a key."""

from __future__ import annotations

import re
from dataclasses import dataclass
from uuid import uuid4

from tandem.admission.tenant import OPEN, Tenant
from tandem.core.errors import ErrorKind, TandemError
from tandem.core.lane import Lane

LANE_HEADER = "x-tandem-lane"
_LANES = {lane.label: lane for lane in Lane}

_SANE_ID = re.compile(rb"[\x21-\x7e]{1,128}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    """`request_id` is a label that clients choose and repeat. `lane`: None where the client asked for none.
    `timeout_s`: what the client's own deadline leaves; None where it has none."""

    request_id: str
    tenant: Tenant = OPEN
    lane: Lane | None = None
    timeout_s: float | None = None


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
