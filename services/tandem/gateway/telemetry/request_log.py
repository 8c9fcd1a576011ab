"""Writes a log line for each answer that has ended, where lines are wanted; never any text of a prompt or answer."""

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
"""Of the cluster. That a program was told to stop is none."""
_WELL = (FINISHED, CANCELLED)
_MAX_ERROR = 500
"""Characters: some errors quote what they were given."""
_log = logging.getLogger(LOGGER)


class RequestLog:
    """A `RequestObserver`. Of "failed" ones those whose client hung up are none. Where lines of all were asked for none
    is left out; a flood of failures is as limited as any other."""

    def __init__(self, wanted: Literal["off", "failed", "all"]) -> None:
        self._wanted = wanted

    def answered(self, records: Sequence[RequestRecord]) -> None:
        if self._wanted == "all":
            for outcome, alike in groupby(records, attrgetter("outcome")):
                _write(outcome, alike, {UNLIMITED: True})
        elif self._wanted == "failed":
            for record in records:
                if record.outcome not in _WELL:
                    _write(record.outcome, [record], {})


_Stages = msgspec.defstruct("_Stages", [(stage.value, float) for stage in Stage], frozen=True)


class _Line(Fields, frozen=True):
    """What is None is left out. Seconds are rounded to microseconds."""

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
        # As `_log.log` does, but for the question where it was called, which no line tells.
        told = (_log.name, level, __file__, 0, "request %s", (outcome,), None)
        _log.handle(_log.makeRecord(*told, extra=batch_record(map(_told, alike)) | extra))


def _told(record: RequestRecord) -> _Line:
    """By place: by name takes longer than all the rest of it."""
    usage, first_s, token_s = record.usage, record.first_token_s, record.token_s
    _, trace, span, *_ = record.traceparent.split("-") if record.traceparent else ("", None, None)
    # To microseconds; `round` to digits goes by the decimal text, and takes four times as long.
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
