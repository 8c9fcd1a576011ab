"""Writes a log line for each answer that has ended, where lines are wanted; never any text of a prompt or answer."""

from __future__ import annotations

import logging
from typing import Literal

from tandem.core.errors import ERROR_TABLE, ErrorKind
from tandem.core.stages import Stage
from tandem.gateway.record import CANCELLED, FINISHED, AnswerRecord
from tandem.obs.log_format import Fields
from tandem.obs.log_limit import UNLIMITED

LOGGER = "tandem.requests"
_FAULTS = frozenset(
    kind.value for kind in ErrorKind if ERROR_TABLE[kind].http >= 500 and kind is not ErrorKind.DRAINING
)
"""Of the cluster. That a program was told to stop is none."""
_WELL = (FINISHED, CANCELLED)
_STAGES = tuple(stage.value for stage in Stage)
_MAX_ERROR = 500
"""Characters: some errors quote what they were given."""
_log = logging.getLogger(LOGGER)


class RequestLog:
    """An `AnswerObserver`. Of "failed" ones those whose client hung up are none. Where lines of all were asked for none
    is left out; a flood of failures is as limited as any other."""

    def __init__(self, wanted: Literal["off", "failed", "all"]) -> None:
        self._wanted = wanted

    def answered(self, record: AnswerRecord) -> None:
        if self._wanted == "off" or (self._wanted == "failed" and record.outcome in _WELL):
            return
        level = logging.WARNING if record.outcome in _FAULTS else logging.INFO
        if not _log.isEnabledFor(level):
            return
        extra = _told(record).extra()
        if self._wanted == "all":
            extra[UNLIMITED] = True
        # As `_log.log` does, but for the question where it was called, which no line tells.
        told = (_log.name, level, __file__, 0, "request %s", (record.outcome,), None)
        _log.handle(_log.makeRecord(*told, extra=extra))


class _Line(Fields, kw_only=True, frozen=True):
    """What is None is left out. Seconds are rounded to microseconds."""

    request_id: str
    trace_id: str | None = None
    span_id: str | None = None
    id: str
    endpoint: str
    model: str
    tenant: str
    lane: str
    outcome: str
    error: str | None = None
    reason: str | None = None
    path: str | None = None
    workers: tuple[str, ...]
    attempts: int
    is_streamed: bool
    prompt_tokens: int
    output_tokens: int
    cached_tokens: int | None = None
    total_s: float
    first_token_s: float | None = None
    token_s: float | None = None
    longest_gap_s: float
    stages: dict[str, float]


def _told(record: AnswerRecord) -> _Line:
    usage = record.usage
    _, trace, span, *_ = record.traceparent.split("-") if record.traceparent else ("", None, None)
    return _Line(
        request_id=record.label,
        trace_id=trace,
        span_id=span,
        id=record.id,
        endpoint=record.endpoint,
        model=record.model,
        tenant=record.tenant,
        lane=record.lane,
        outcome=record.outcome,
        error=record.error[:_MAX_ERROR] or None,
        reason=record.reason or None,
        path=record.path or None,
        workers=record.workers,
        attempts=record.num_attempts,
        is_streamed=record.is_streamed,
        prompt_tokens=usage.num_prompt,
        output_tokens=usage.num_output,
        cached_tokens=usage.num_cached,
        total_s=round(record.total_s, 6),
        first_token_s=_rounded(record.first_token_s),
        token_s=_rounded(record.token_s),
        longest_gap_s=round(record.longest_gap_s, 6),
        stages={name: round(seconds, 6) for name, seconds in zip(_STAGES, record.stages, strict=True)},
    )


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 6)
