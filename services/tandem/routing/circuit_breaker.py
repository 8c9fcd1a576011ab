"""Which workers get no new work because what they take keeps failing; never asks a worker and never reads a clock.

A circuit breaker per worker (Nygard, Release It!): after `NUM_FAILURES` in a row it is left out for a back-off; then
one request is its trial, which closes the breaker or opens it for twice as long. Where nobody else is left, trials go
on all the while, one each `FIRST_BACKOFF_S`: an ill worker is worth a try where the alternative is none.
"""

from __future__ import annotations

from collections.abc import Iterable, Set
from dataclasses import dataclass
from enum import Enum

from tandem.core.ids import WorkerId, WorkerRef

NUM_FAILURES = 3
BURST_S = 0.5
"""Failures within so long of the last that counted have one cause: a partner's death fails all that it works on."""
FIRST_BACKOFF_S = 1.0
LONGEST_BACKOFF_S = 60.0


class BreakerState(Enum):
    """The values are those of the metric."""

    CLOSED = 0
    TRIAL = 1
    OPEN = 2


@dataclass(slots=True)
class _Record:
    """`until`: it is left out before, `rests_until`: even where nobody else is left; `backoff_s`: 0 while it has never
    been; `is_on_trial`: for the last time it was tried nobody knows yet."""

    num_failures: int
    failed_at: float
    backoff_s: float = 0.0
    until: float = 0.0
    rests_until: float = 0.0
    is_on_trial: bool = False


class CircuitBreakers:
    """Of all workers that one gateway knows; those that never failed cost nothing."""

    def __init__(self) -> None:
        self._records: dict[WorkerRef, _Record] = {}

    def failed(self, workers: Iterable[WorkerRef], now: float) -> None:
        """A job of these came to nothing, perhaps for a reason of theirs."""
        for worker in workers:
            record = self._records.get(worker)
            if record is None:
                self._records[worker] = _Record(1, now)
            elif record.is_on_trial or (now >= record.until and now - record.failed_at >= BURST_S):
                _count(record, now)

    def on_success(self, worker: WorkerRef) -> None:
        """A job of it ended well."""
        self._records.pop(worker, None)

    def on_attempt(self, workers: Iterable[WorkerRef], now: float) -> None:
        """A request goes there: the trial of one whose back-off is over, or that is tried anyway. No other follows for
        as long again."""
        for worker in workers:
            record = self._records.get(worker)
            if record is not None and record.backoff_s and now >= record.rests_until:
                if now >= record.until:
                    record.until = now + record.backoff_s
                record.rests_until = now + FIRST_BACKOFF_S
                record.is_on_trial = True

    def forget(self, worker: WorkerRef) -> None:
        """It is gone."""
        self._records.pop(worker, None)

    def excluded(self, now: float) -> Set[WorkerRef]:
        """Those that get no new work now."""
        if not self._records:
            return frozenset()
        return {worker for worker, record in self._records.items() if record.until > now}

    def resting(self, now: float) -> Set[WorkerRef]:
        """Those that get none even where nobody else is left."""
        return {worker for worker, record in self._records.items() if record.rests_until > now}

    def states(self, now: float) -> dict[WorkerId, BreakerState]:
        """Of the workers that have failed since they last did well."""
        return {worker.id: _state(record, now) for worker, record in self._records.copy().items()}

    def why(self, now: float) -> str:
        """Who is left out and for how long, for people; empty when nobody is."""
        out = [(worker.id, record.until - now) for worker, record in self._records.items() if record.until > now]
        return ", ".join(f"{name} left out for {left_s:.1f} s after failures" for name, left_s in sorted(out))


def _count(record: _Record, now: float) -> None:
    record.num_failures += 1
    record.failed_at = now
    record.is_on_trial = False
    if record.num_failures >= NUM_FAILURES:
        record.backoff_s = min(max(FIRST_BACKOFF_S, 2 * record.backoff_s), LONGEST_BACKOFF_S)
        record.until = now + record.backoff_s
        record.rests_until = now + FIRST_BACKOFF_S


def _state(record: _Record, now: float) -> BreakerState:
    if record.until > now and not record.is_on_trial:
        return BreakerState.OPEN
    return BreakerState.TRIAL if record.backoff_s else BreakerState.CLOSED
