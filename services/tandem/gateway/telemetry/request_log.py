"""Write a structured log line for each request that has ended, without any text of its prompt or output."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from itertools import groupby
from operator import attrgetter
from typing import Any, Literal

import msgspec

from tandem.core.errors import ERROR_TABLE, ErrorKind
from tandem.core.request_stages import Stage
from tandem.gateway.telemetry.request_record import CANCELLED, FINISHED, RequestRecord
from tandem.obs.logs.log_formatters import Fields, batch_record
from tandem.obs.logs.log_rate_limit import UNLIMITED

LOGGER = "tandem.requests"
_FAULTS = frozenset(
    kind.value for kind in ErrorKind if ERROR_TABLE[kind].http >= 500 and kind is not ErrorKind.DRAINING
)
"""Outcomes that are faults of the cluster. DRAINING is not among them: somebody stopped a program on purpose."""
_WELL = (FINISHED, CANCELLED)
_MAX_ERROR = 500
"""Largest number of characters of an error message in a line, because some messages quote the client's input."""
_log = logging.getLogger(LOGGER)


class RequestLog:
    """RequestObserver that logs no requests, failed ones, or all.

    A request whose client disconnected has not failed. With "all" the rate limit of log lines does not apply, so that
    no line is missing; with "failed" it does."""

    def __init__(self, mode: Literal["off", "failed", "all"]) -> None:
        self._mode = mode

    def answered(self, records: Sequence[RequestRecord]) -> None:
        if self._mode == "all":
            for outcome, alike in groupby(records, attrgetter("outcome")):
                _write(outcome, alike, {UNLIMITED: True})
        elif self._mode == "failed":
            for record in records:
                if record.outcome not in _WELL:
                    _write(record.outcome, [record], {})


_Stages = msgspec.defstruct("_Stages", [(stage.value, float) for stage in Stage], frozen=True)


class _Line(Fields, frozen=True):
    """Fields of one line; those that are None are left out. Seconds are rounded to microseconds."""

    request_id: str
    id: str
    endpoint: str
    model: str
    tenant: str
    lane: str
    outcome: str
    workers: tuple[str, ...]
    attempts: int
    is_streamed: bool
    prompt_tokens: int
    output_tokens: int
    total_s: float
    longest_gap_s: float
    stages: msgspec.Struct
    first_token_s: float | None = None
    token_s: float | None = None
    cached_tokens: int | None = None
    path: str | None = None
    reason: str | None = None
    error: str | None = None
    trace_id: str | None = None
    span_id: str | None = None


def _write(outcome: str, alike: Iterable[RequestRecord], extra: dict[str, Any]) -> None:
    level = logging.WARNING if outcome in _FAULTS else logging.INFO
    if _log.isEnabledFor(level):
        # As `_log.log` does, without finding the caller's file and line, which no formatter writes.
        arguments = (_log.name, level, __file__, 0, "request %s", (outcome,), None)
        _log.handle(_log.makeRecord(*arguments, extra=batch_record(map(_line, alike)) | extra))


def _line(record: RequestRecord) -> _Line:
    """Build the line of a record; by position, as keyword arguments take longer than everything else here."""
    usage, first_s, token_s = record.usage, record.first_token_s, record.token_s
    _, trace, span, *_ = record.traceparent.split("-") if record.traceparent else ("", None, None)
    # Rounded to microseconds by multiplication: `round(x, 6)` goes through decimal text and takes four times as long.
    total_s, longest_s, *stages = [round(1e6 * s) / 1e6 for s in (record.total_s, record.longest_gap_s, *record.stages)]
    return _Line(
        record.label,
        record.id,
        record.endpoint,
        record.model,
        record.tenant,
        record.lane,
        record.outcome,
        record.workers,
        record.num_attempts,
        record.is_streamed,
        usage.num_prompt,
        usage.num_output,
        total_s,
        longest_s,
        _Stages(*stages),
        None if first_s is None else round(1e6 * first_s) / 1e6,
        None if token_s is None else round(1e6 * token_s) / 1e6,
        usage.num_cached,
        record.path or None,
        record.reason or None,
        record.error[:_MAX_ERROR] or None,
        trace,
        span,
    )
