"""Write a structured log line for each request that has ended, without any text of its prompt or output."""

from __future__ import annotations

import logging
from typing import Any, Literal

from tandem.core.errors import ErrorKind
from tandem.core.request_stages import Stage
from tandem.gateway.telemetry.request_record import CANCELLED, FINISHED, RequestRecord
from tandem.obs.logs.log_formatters import fields
from tandem.obs.logs.log_rate_limit import UNLIMITED

LOGGER = "tandem.requests"
_FAULTS = frozenset(kind.value for kind in ErrorKind if kind.http >= 500 and kind is not ErrorKind.DRAINING)
"""Outcomes that are faults of the cluster. DRAINING is not among them: somebody stopped a program on purpose."""
_WELL = (FINISHED, CANCELLED)
_MAX_ERROR = 500
"""Largest number of characters of an error message in a line, because some messages quote the client's input."""
_log = logging.getLogger(LOGGER)


class RequestLog:
    """Write one log line for each ended request, as an observer of records.

    `mode`: "off" writes no lines, "failed" a line for each request that ended with an error, "all" a line for every
    request. A disconnect of the client is no error. The rate limit of log lines applies to "failed" but not to "all",
    so that no line is missing there."""

    def __init__(self, mode: Literal["off", "failed", "all"]) -> None:
        self._mode = mode

    def answered(self, record: RequestRecord) -> None:
        if self._mode == "all":
            _write(record, {UNLIMITED: True})
        elif self._mode == "failed" and record.outcome not in _WELL:
            _write(record, {})


def _write(record: RequestRecord, extra: dict[str, Any]) -> None:
    level = logging.WARNING if record.outcome in _FAULTS else logging.INFO
    if _log.isEnabledFor(level):
        _log.log(level, "request ended: %s", record.outcome, extra=fields(**_line(record)) | extra)


def _line(record: RequestRecord) -> dict[str, Any]:
    """Return the fields of a line; those that are None are left out. Seconds are rounded to microseconds."""
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
        "workers": record.workers,
        "attempts": record.num_attempts,
        "preemptions": record.pauses.num,
        "paused_s": round(record.pauses.seconds, 6),
        "yielded_sequences": sum(each.num_sequences for each in record.yields),
        "yielded_tokens": sum(each.num_tokens for each in record.yields),
        "yielded_blocks": sum(each.num_blocks for each in record.yields),
        "is_streamed": record.is_streamed,
        "prompt_tokens": usage.num_prompt,
        "output_tokens": usage.num_output,
        "total_s": round(record.total_s, 6),
        "longest_gap_s": round(record.longest_gap_s, 6),
        "stages": {stage.value: round(seconds, 6) for stage, seconds in zip(Stage, record.stages, strict=True)},
        "first_token_s": None if record.first_token_s is None else round(record.first_token_s, 6),
        "token_s": None if record.token_s is None else round(record.token_s, 6),
        "cached_tokens": usage.num_cached,
        "path": record.path or None,
        "reason": record.reason or None,
        "error": record.error[:_MAX_ERROR] or None,
    }
