"""Writes a log line for each answer that has ended, where lines are wanted; never any text of a prompt or answer."""

from __future__ import annotations

import logging
from typing import Literal

from tandem.core.errors import ERROR_TABLE, ErrorKind
from tandem.gateway.record import CANCELLED, FINISHED, AnswerRecord
from tandem.obs.log_format import fields
from tandem.obs.log_limit import UNLIMITED

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
        extra = fields(**_told(record))
        if self._wanted == "all":
            extra[UNLIMITED] = True
        # As `_log.log` does, but for the question where it was called, which no line tells.
        told = (_log.name, level, __file__, 0, "request %s", (record.outcome,), None)
        _log.handle(_log.makeRecord(*told, extra=extra))


def _told(record: AnswerRecord) -> dict[str, object]:
    """Seconds are rounded to microseconds."""
    usage = record.usage
    _, trace, span, *_ = record.traceparent.split("-") if record.traceparent else ("", None, None)
    return {
        "request_id": record.label,
        "trace_id": trace,
        "span_id": span,
        "id": record.id,
        "endpoint": record.endpoint,
        "model": record.model,
        "tenant": record.tenant,
        "lane": record.lane,
        "outcome": record.outcome,
        "error": record.error[:_MAX_ERROR] or None,
        "reason": record.reason or None,
        "path": record.path or None,
        "workers": list(record.workers),
        "attempts": record.num_attempts,
        "is_streamed": record.is_streamed,
        "prompt_tokens": usage.num_prompt,
        "output_tokens": usage.num_output,
        "cached_tokens": usage.num_cached,
        "total_s": round(record.total_s, 6),
        "first_token_s": _rounded(record.first_token_s),
        "token_s": _rounded(record.token_s),
        "longest_gap_s": _rounded(record.longest_gap_s),
        "stages": {name: round(seconds, 6) for name, seconds in record.stages._asdict().items()},
    }


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 6)
