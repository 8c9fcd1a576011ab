"""Drop log lines when too many are alike, and log how many were dropped.

Below ERROR, lines are alike that come from one logger with one message before its arguments are inserted. ERROR lines
are alike only where the text and the exception are the same: many places log what they were given as "%s", where only
the text distinguishes two failures. Since every request might then fail with a line of its own, all ERROR lines of a
logger share a second, wide limit: a disk or terminal that is too slow for a flood of tracebacks would delay the
requests that do not fail.
"""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Hashable, Iterator, Sequence
from typing import NamedTuple

from tandem.core.clock import Clock
from tandem.obs.logs.log_formatters import message_of

UNLIMITED = "unlimited"
"""Key in the argument `extra` of a logging call that exempts its record from the limits."""
MAX_BUCKETS = 1000
SUMMARY_PERIOD_S = 1.0
"""Seconds between two summaries of dropped lines; they are written with the next record of any kind."""
_MAX_EXAMPLE = 500
"""Characters by which lines are told apart, and which a summary shows."""
_ADMITTED = "is_admitted"


class LogRate(NamedTuple):
    """Limit on the log lines of one kind: `burst` lines immediately, then `per_s` lines per second."""

    burst: float
    per_s: float


PER_MESSAGE = LogRate(20, 1)
ERRORS = LogRate(200, 20)


class _Bucket:
    """Token bucket of the lines of one kind."""

    __slots__ = ("_example", "_num_dropped", "_num_left", "_rate", "_refilled_at")

    def __init__(self, rate: LogRate, now: float) -> None:
        self._rate = rate
        self._num_left = rate.burst
        self._refilled_at = now
        self._num_dropped = 0
        self._example: logging.LogRecord | None = None

    def admits(self, record: logging.LogRecord, now: float) -> bool:
        self._num_left = min(self._rate.burst, self._num_left + max(0.0, now - self._refilled_at) * self._rate.per_s)
        self._refilled_at = now
        if self._num_left >= 1:
            self._num_left -= 1
            return True
        self._num_dropped += 1
        if self._example is None:  # not the record itself, whose traceback keeps objects alive
            where = (record.name, record.levelno, record.pathname, record.lineno)
            self._example = logging.LogRecord(*where, message_of(record)[:_MAX_EXAMPLE], (), None)
        return False

    def summary(self) -> logging.LogRecord | None:
        """Return a record on the lines dropped since the last summary; None where there were none."""
        summary, self._example = self._example, None
        if summary is not None:
            summary.msg, summary.args = "%d lines like this one were left out: %s", (self._num_dropped, summary.msg)
            self._num_dropped = 0
        return summary


class LogLimit(logging.Filter):
    """Drop log records when too many are alike, and write summaries of the dropped ones to `handlers`. Thread-safe.

    The filter must be added to each of `handlers`, all of which get the same records. `num_dropped`: records dropped
    since the start.
    """

    def __init__(self, clock: Clock, handlers: Sequence[logging.Handler]) -> None:
        super().__init__()
        self._clock = clock
        self._handlers = tuple(handlers)
        self._lock = threading.Lock()
        self._buckets: dict[Hashable, _Bucket] = {}
        self._next_summary = 0.0
        self.num_dropped = 0

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether to write a record; all handlers get the same decision. Also writes the summaries that are
        due."""
        decided: bool | None = record.__dict__.get(_ADMITTED)
        if decided is not None:
            return decided
        with self._lock:
            now = self._clock.now()
            is_admitted = UNLIMITED in record.__dict__ or self._admits(record, now)
            summaries = self._summaries(now)
        record.__dict__[_ADMITTED] = is_admitted
        self._write(summaries)
        return is_admitted

    def flush(self) -> None:
        """Write a summary for each kind of line of which records were dropped since its last summary."""
        with self._lock:
            summaries = self._summaries(math.inf)
        self._write(summaries)

    def _admits(self, record: logging.LogRecord, now: float) -> bool:
        is_admitted = all(self._bucket(key, rate, now).admits(record, now) for key, rate in _keys_of(record))
        self.num_dropped += not is_admitted
        return is_admitted

    def _bucket(self, key: Hashable, rate: LogRate, now: float) -> _Bucket:
        """Return the bucket of a kind. The least recently used one is dropped for a new one: refilled, it would be the
        same."""
        bucket = self._buckets.pop(key, None) or _Bucket(rate, now)
        if len(self._buckets) >= MAX_BUCKETS:
            self._buckets.pop(next(iter(self._buckets)))
        self._buckets[key] = bucket
        return bucket

    def _summaries(self, now: float) -> list[logging.LogRecord]:
        """Return the summaries that are due."""
        if now < self._next_summary:
            return []
        self._next_summary = now + SUMMARY_PERIOD_S
        return [summary for bucket in self._buckets.values() if (summary := bucket.summary()) is not None]

    def _write(self, summaries: Sequence[logging.LogRecord]) -> None:
        for record in summaries:
            record.__dict__[_ADMITTED] = True
            for handler in self._handlers:
                handler.handle(record)


def _keys_of(record: logging.LogRecord) -> Iterator[tuple[Hashable, LogRate]]:
    if record.levelno < logging.ERROR:
        yield (record.name, record.levelno, str(record.msg)[:_MAX_EXAMPLE]), PER_MESSAGE
        return
    raised = repr(record.exc_info[1])[:_MAX_EXAMPLE] if record.exc_info else ""
    yield (record.name, record.levelno, message_of(record)[:_MAX_EXAMPLE], raised), PER_MESSAGE
    yield (record.name, record.levelno), ERRORS
