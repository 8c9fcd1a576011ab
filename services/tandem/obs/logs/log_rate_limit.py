"""Which log lines are left out because too many were alike, and the line that says how many; writes nothing.

Below ERROR lines are alike that come from one place: one logger, one message before its arguments are put in. Of an
ERROR nothing may be lost that no other line says: only those are alike that say the same of the same failure. Many
places log what they are told, as "%s", and there the words are all that tells two failures apart. That lets every
request fail with a line of its own, so all ERRORs of a logger together have a limit too, a wide one: a disk or a
terminal that is too slow for a flood of tracebacks would hold up those requests that do not fail.
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
"""Of a record, by `extra`: it was asked for, and is never left out."""
MAX_KINDS = 1000
LOOK_S = 1.0
"""How often it is said what was left out, at a record of any kind."""
_MAX_EXAMPLE = 500
"""Characters that tell lines apart, and that stand for those that were left out."""
_ADMITTED = "is_admitted"


class LogRate(NamedTuple):
    """So many lines at once, and then so many per second."""

    burst: float
    per_s: float


PER_MESSAGE = LogRate(20, 1)
ERRORS = LogRate(200, 20)


class _Bucket:
    """A bucket of lines of one kind."""

    __slots__ = ("_at", "_example", "_num_left", "_num_out", "_pace")

    def __init__(self, pace: LogRate, now: float) -> None:
        self._pace = pace
        self._num_left = pace.burst
        self._at = now
        self._num_out = 0
        self._example: logging.LogRecord | None = None

    def takes(self, record: logging.LogRecord, now: float) -> bool:
        self._num_left = min(self._pace.burst, self._num_left + max(0.0, now - self._at) * self._pace.per_s)
        self._at = now
        if self._num_left >= 1:
            self._num_left -= 1
            return True
        self._num_out += 1
        if self._example is None:  # not the record: it holds on to whatever a traceback does
            where = (record.name, record.levelno, record.pathname, record.lineno)
            self._example = logging.LogRecord(*where, message_of(record)[:_MAX_EXAMPLE], (), None)
        return False

    def summary(self) -> logging.LogRecord | None:
        """What to say of those that were left out since the last one; None: there were none."""
        said, self._example = self._example, None
        if said is not None:
            said.msg, said.args = "%d lines like this one were left out: %s", (self._num_out, said.msg)
            self._num_out = 0
        return said


class LogLimit(logging.Filter):
    """A filter of the `handlers` that it is added to, all of which write the same records. Any thread."""

    def __init__(self, clock: Clock, handlers: Sequence[logging.Handler]) -> None:
        super().__init__()
        self._clock = clock
        self._handlers = tuple(handlers)
        self._lock = threading.Lock()
        self._kinds: dict[Hashable, _Bucket] = {}
        self._next_look = 0.0
        self.num_dropped = 0

    def filter(self, record: logging.LogRecord) -> bool:
        """Once decided, for every handler."""
        decided: bool | None = record.__dict__.get(_ADMITTED)
        if decided is not None:
            return decided
        with self._lock:
            now = self._clock.now()
            is_admitted = UNLIMITED in record.__dict__ or self._admits(record, now)
            told = self._summaries(now)
        record.__dict__[_ADMITTED] = is_admitted
        self._say(told)
        return is_admitted

    def flush(self) -> None:
        """Tell of all that was left out."""
        with self._lock:
            told = self._summaries(math.inf)
        self._say(told)

    def _admits(self, record: logging.LogRecord, now: float) -> bool:
        is_admitted = all(self._kind(key, pace, now).takes(record, now) for key, pace in _kinds_of(record))
        self.num_dropped += not is_admitted
        return is_admitted

    def _kind(self, key: Hashable, pace: LogRate, now: float) -> _Bucket:
        """The kind that was needed longest ago makes place for a new one; with a full bucket it would be as new."""
        kind = self._kinds.pop(key, None) or _Bucket(pace, now)
        if len(self._kinds) >= MAX_KINDS:
            self._kinds.pop(next(iter(self._kinds)))
        self._kinds[key] = kind
        return kind

    def _summaries(self, now: float) -> list[logging.LogRecord]:
        """Those that are due."""
        if now < self._next_look:
            return []
        self._next_look = now + LOOK_S
        return [said for kind in self._kinds.values() if (said := kind.summary()) is not None]

    def _say(self, told: Sequence[logging.LogRecord]) -> None:
        for record in told:
            record.__dict__[_ADMITTED] = True
            for handler in self._handlers:
                handler.handle(record)


def _kinds_of(record: logging.LogRecord) -> Iterator[tuple[Hashable, LogRate]]:
    if record.levelno < logging.ERROR:
        yield (record.name, record.levelno, str(record.msg)[:_MAX_EXAMPLE]), PER_MESSAGE
        return
    raised = repr(record.exc_info[1])[:_MAX_EXAMPLE] if record.exc_info else ""
    yield (record.name, record.levelno, message_of(record)[:_MAX_EXAMPLE], raised), PER_MESSAGE
    yield (record.name, record.levelno), ERRORS
