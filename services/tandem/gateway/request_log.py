"""Writes a log line for each answer that has ended, where lines are wanted; never any text of a prompt or answer."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from itertools import groupby
from operator import attrgetter
from typing import Any, Literal

from tandem.core.errors import ERROR_TABLE, ErrorKind
from tandem.core.stages import Stage
from tandem.gateway.record import CANCELLED, FINISHED, AnswerRecord
from tandem.obs.log_format import Fields, several
from tandem.obs.log_limit import UNLIMITED

LOGGER = "tandem.requests"
TOGETHER = 4
"""Lines in one write. A pipe that several programs write to takes 4,096 bytes without anything in between (PIPE_BUF),
and a line has some 700."""
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

    def answered(self, records: Sequence[AnswerRecord]) -> None:
        if self._wanted == "all":
            for outcome, alike in groupby(records, attrgetter("outcome")):
                every = list(alike)
                for first in range(0, len(every), TOGETHER):
                    _write(outcome, every[first : first + TOGETHER], {UNLIMITED: True})
        elif self._wanted == "failed":
            for record in records:
                if record.outcome not in _WELL:
                    _write(record.outcome, [record], {})


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


def _write(outcome: str, alike: Sequence[AnswerRecord], extra: dict[str, Any]) -> None:
    level = logging.WARNING if outcome in _FAULTS else logging.INFO
    if _log.isEnabledFor(level):
        # As `_log.log` does, but for the question where it was called, which no line tells.
        told = (_log.name, level, __file__, 0, "request %s", (outcome,), None)
        _log.handle(_log.makeRecord(*told, extra=several(map(_told, alike)) | extra))


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
        total_s=_rounded(record.total_s),
        first_token_s=None if record.first_token_s is None else _rounded(record.first_token_s),
        token_s=None if record.token_s is None else _rounded(record.token_s),
        longest_gap_s=_rounded(record.longest_gap_s),
        stages=dict(zip(_STAGES, map(_rounded, record.stages), strict=True)),
    )


def _rounded(seconds: float) -> float:
    """To microseconds; `round` to digits goes by the decimal text, and takes four times as long."""
    return round(1e6 * seconds) / 1e6
