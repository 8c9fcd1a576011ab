"""Exclude workers whose jobs keep failing from new requests, with one circuit breaker per worker (Nygard, Release It!).

After `NUM_FAILURES` failures in a row the worker is excluded for a back-off time. Then it gets one request as a trial:
success closes the breaker, and failure excludes the worker for twice as long. Where no other worker is left, trials go
on during the back-off, at most one every `FIRST_BACKOFF_S` seconds, because an unhealthy worker is better than none.
Links over which prefix fetches keep failing are excluded in the same way, but without trials. Callers pass the time.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Set
from dataclasses import dataclass
from enum import Enum
from typing import Generic, TypeVar

from tandem.core.ids import WorkerId, WorkerRef

NUM_FAILURES = 3
BURST_S = 0.5
"""Seconds after a counted failure within which further failures have the same cause: a partner's death fails all jobs
that it shares."""
FIRST_BACKOFF_S = 1.0
LONGEST_BACKOFF_S = 60.0

KeyT = TypeVar("KeyT")


class BreakerState(Enum):
    """State of one worker's breaker. CLOSED lets all requests through, OPEN none while other workers are left, and
    TRIAL a single request whose outcome closes or opens the breaker."""

    CLOSED = 0
    TRIAL = 1
    OPEN = 2


@dataclass(slots=True)
class _Record:
    """Failures of one worker or link, which is excluded until the time `until`. Where no other worker is left, a worker
    is excluded only until `rests_until`.

    `num_failures`: number of counted failures since the last success; `failed_at`: time of the last one. `backoff_s`:
    length of the last exclusion, 0 before the first. `is_on_trial`: the outcome of the last trial is not known yet.
    """

    num_failures: int = 0
    failed_at: float = -math.inf
    backoff_s: float = 0.0
    until: float = -math.inf
    rests_until: float = -math.inf
    is_on_trial: bool = False


class FailureBackoff(Generic[KeyT]):
    """Exclude what keeps failing, for longer and longer, until it succeeds.

    From the `num_failures`-th failure in a row on, each counted failure excludes its key, a worker or a link, for a
    longer time. A failure within `burst_s` of a counted one or while its key is excluded is not counted. Keys without a
    failure since their last success use no memory. `now` is in seconds of the caller's clock.
    """

    def __init__(self, num_failures: int, burst_s: float = 0.0) -> None:
        self._num_failures = num_failures
        self._burst_s = burst_s
        self._records: dict[KeyT, _Record] = {}

    def failed(self, keys: Iterable[KeyT], now: float) -> None:
        """Count a failure against each of `keys`, any of which may be the cause. A failure of a key on trial counts
        always."""
        for key in keys:
            record = self._records.setdefault(key, _Record())
            if record.is_on_trial or (now >= record.until and now - record.failed_at >= self._burst_s):
                record.num_failures += 1
                record.failed_at = now
                record.is_on_trial = False
                if record.num_failures >= self._num_failures:
                    record.backoff_s = min(max(FIRST_BACKOFF_S, 2 * record.backoff_s), LONGEST_BACKOFF_S)
                    record.until = now + record.backoff_s
                    record.rests_until = now + FIRST_BACKOFF_S

    def failing(self) -> Set[KeyT]:
        """Return the keys that have failed since their last success, whether they are excluded or not."""
        return self._records.keys()

    def clear(self, *keys: KeyT) -> None:
        """Forget the failures of `keys`, which have succeeded or no longer exist, so that they are no longer
        excluded."""
        for key in keys:
            self._records.pop(key, None)

    def excluded(self, now: float) -> Set[KeyT]:
        """Return the keys that are excluded at the time `now`."""
        if not self._records:
            return frozenset()
        return {key for key, record in self._records.items() if record.until > now}


class CircuitBreakers(FailureBackoff[WorkerRef]):
    """Decide which workers get no new requests because their jobs keep failing, with a breaker for each worker.

    The caller reports attempts, failures and successes, and sends nothing to the workers of `excluded`, unless no other
    worker is left: then it sends nothing to those of `resting`.
    """

    def __init__(self) -> None:
        super().__init__(NUM_FAILURES, BURST_S)

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


def _state(record: _Record, now: float) -> BreakerState:
    if record.until > now and not record.is_on_trial:
        return BreakerState.OPEN
    return BreakerState.TRIAL if record.backoff_s else BreakerState.CLOSED
