"""Who asks, and under which terms, as both fronts tell it; never checks a key."""

from __future__ import annotations

from dataclasses import dataclass

from tandem.admission.tenant import OPEN, Tenant
from tandem.core.lane import Lane


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    """`request_id` is a label that clients choose and repeat. `lane`: None where the client asked for none.
    `timeout_s`: what the client's own deadline leaves; None where it has none."""

    request_id: str
    tenant: Tenant = OPEN
    lane: Lane | None = None
    timeout_s: float | None = None
