"""Exclude workers whose jobs keep failing from new requests, with one circuit breaker per worker (Nygard, Release It!).

After `NUM_FAILURES` failures in a row the worker is excluded for a back-off time. Then it gets one request as a trial:
success closes the breaker, and failure excludes the worker for twice as long. Where no other worker is left, trials go
on during the back-off, at most one every `FIRST_BACKOFF_S` seconds, because an unhealthy worker is better than none.
Callers pass the time.
"""

from __future__ import annotations

from collections.abc import Iterable, Set
from dataclasses import dataclass
from enum import Enum

from tandem.core.ids import WorkerId, WorkerRef

NUM_FAILURES = 3
BURST_S = 0.5
"""Seconds after a counted failure within which further failures have the same cause: a partner's death fails all jobs
that it shares."""
FIRST_BACKOFF_S = 1.0
LONGEST_BACKOFF_S = 60.0


class BreakerState(Enum):
    """State of one worker's breaker. CLOSED lets all requests through, OPEN none while other workers are left, and
    TRIAL a single request whose outcome closes or opens the breaker."""

    CLOSED = 0
    TRIAL = 1
    OPEN = 2


@dataclass(slots=True)
class _Record:
    """Failures of one worker, which is excluded until the time `until`. Where no other worker is left, it is excluded
    only until `rests_until`.

    `num_failures`: number of counted failures since the last success; `failed_at`: time of the last one. `backoff_s`:
    length of the last exclusion, 0 before the first. `is_on_trial`: the outcome of the last trial is not known yet.
    """

    num_failures: int
    failed_at: float
    backoff_s: float = 0.0
    until: float = 0.0
    rests_until: float = 0.0
    is_on_trial: bool = False


class CircuitBreakers:
    """Decide which workers get no new requests because their jobs keep failing, with a breaker for each worker.

    The caller reports attempts, failures and successes, and sends nothing to the workers of `excluded`. Workers without
    a failure since their last success use no memory. `now` is in seconds of the caller's clock.
    """

    def __init__(self) -> None:
        self._records: dict[WorkerRef, _Record] = {}

    def failed(self, workers: Iterable[WorkerRef], now: float) -> None:
        """Count a failed job against each of its `workers`, any of which may be the cause.

        A failure within `BURST_S` of a counted one or while the worker is excluded is not counted, unless the worker is
        on trial. From the `NUM_FAILURES`-th on, each counted failure excludes the worker for a longer time.
        """
        for worker in workers:
            record = self._records.get(worker)
            if record is None:
                self._records[worker] = _Record(1, now)
            elif record.is_on_trial or (now >= record.until and now - record.failed_at >= BURST_S):
                _count(record, now)

    def on_success(self, worker: WorkerRef) -> None:
        """Close the breaker of a worker whose job succeeded: its failures are forgotten and it is no longer
        excluded."""
        self._records.pop(worker, None)

    def on_attempt(self, workers: Iterable[WorkerRef], now: float) -> None:
        """Record that a request is sent to `workers` at the time `now`. For each of them that was excluded and may be
        tried again, the request is the trial.

        After a trial begins, the worker gets no other request for its back-off time, or for `FIRST_BACKOFF_S` where no
        other worker is left. Nothing is recorded for a worker that was not excluded since its last success.
        """
        for worker in workers:
            record = self._records.get(worker)
            if record is not None and record.backoff_s and now >= record.rests_until:
                if now >= record.until:
                    record.until = now + record.backoff_s
                record.rests_until = now + FIRST_BACKOFF_S
                record.is_on_trial = True

    def forget(self, worker: WorkerRef) -> None:
        """Drop the failures of a worker that no longer exists; does nothing when it has none."""
        self._records.pop(worker, None)

    def excluded(self, now: float) -> Set[WorkerRef]:
        """Return the workers that get no new request at the time `now`, unless no other worker is left (see
        `resting`)."""
        if not self._records:
            return frozenset()
        return {worker for worker, record in self._records.items() if record.until > now}

    def resting(self, now: float) -> Set[WorkerRef]:
        """Return the workers that get no new request at the time `now`, not even when no other worker is left.

        Their last trial began, or their last failure that excluded them was counted, less than `FIRST_BACKOFF_S` ago.
        """
        return {worker for worker, record in self._records.items() if record.rests_until > now}

    def states(self, now: float) -> dict[WorkerId, BreakerState]:
        """Return the state at the time `now` of each worker that has failed since its last success; all other workers
        are CLOSED."""
        return {worker.id: _state(record, now) for worker, record in self._records.copy().items()}

    def why(self, now: float) -> str:
        """Return a text for people that names the workers excluded at the time `now`, each with the seconds for which
        it stays excluded; empty when none is excluded."""
        out = [(worker.id, record.until - now) for worker, record in self._records.items() if record.until > now]
        return ", ".join(f"{name} excluded for {left_s:.1f} s after failures" for name, left_s in sorted(out))


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
