"""Build request records for tests that need no real request."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tandem.core.events import NO_PAUSES
from tandem.gateway.telemetry.request_record import RequestRecord
from tandem.gateway.telemetry.usage import Usage
from tandem.orchestration.phase_ledger import StageSeconds

_RECORD = RequestRecord(
    id="chatcmpl-1",
    label="mine",
    trace="",
    traceparent="",
    endpoint="chat",
    model="tiny",
    tenant="acme",
    lane="interactive",
    outcome="finished",
    error="",
    path="remote",
    reason="",
    num_attempts=1,
    num_retries=0,
    pauses=NO_PAUSES,
    yields=(),
    workers=("p", "d"),
    is_streamed=True,
    usage=Usage(10, 4, 2),
    received_at=1_800_000_000.0,
    total_s=0.5,
    first_token_s=0.1,
    token_s=0.1,
    longest_gap_s=0.2,
    num_gaps=3,
    num_late_gaps=0,
    stages=StageSeconds(receive=0.1, decode=0.4),
)


def record(**changes: Any) -> RequestRecord:
    return replace(_RECORD, **changes)
