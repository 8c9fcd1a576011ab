"""Count jobs that have ended and what they read from other workers."""

from __future__ import annotations

from tandem.core.request import ResumeJob
from tandem.engine.job_timeline import JobTimes, PullTimes
from tandem.obs.metrics import instruments as on
from tandem.obs.metrics.metrics import Metrics


class JobMetrics:
    """Count ended jobs, their time in the queue, cached tokens and transfers.

    Must be called by one thread only. `transport`: kind of transport by which this worker reads KV, as label value.
    """

    def __init__(self, metrics: Metrics, transport: str) -> None:
        self._transport = transport
        self._jobs = metrics.counter(on.JOBS)
        self._queue = metrics.histogram(on.JOB_QUEUE_DURATION)
        self._num_queried = metrics.counter(on.PREFIX_QUERIED_TOKENS).of()
        self._num_hits = metrics.counter(on.PREFIX_HIT_TOKENS).of()
        self._transfers = metrics.counter(on.TRANSFERS)
        self._bytes = metrics.counter(on.TRANSFER_BYTES)
        self._exposed_bytes = metrics.counter(on.TRANSFER_EXPOSED_BYTES)
        self._busy = metrics.counter(on.TRANSFER_BUSY)
        self._durations = metrics.histogram(on.TRANSFER_DURATION)
        self._exposed_durations = metrics.histogram(on.TRANSFER_EXPOSED_DURATION)

    def count(self, times: JobTimes) -> None:
        self._jobs.add(1, times.kind, times.outcome)
        if times.started_at is not None and times.ready_at is not None:
            self._queue.of(times.kind).record(times.started_at - times.ready_at)
            if not isinstance(times.job, ResumeJob):
                self._num_queried.value += times.job.num_known_tokens
                self._num_hits.value += times.num_cached
        if times.pull is not None:
            self._count_pull(times.pull)

    def _count_pull(self, pull: PullTimes) -> None:
        kind, transport = pull.kind, self._transport
        self._transfers.add(1, kind, pull.outcome)
        if not pull.num_blocks:
            return
        self._bytes.add(pull.num_bytes, kind, transport)
        self._exposed_bytes.add(pull.num_exposed_bytes, kind, transport)
        self._busy.add(pull.busy_s, kind, transport)
        if pull.outcome == "done":
            self._durations.of(kind).record(pull.ready_at - pull.first_announced_at)
            self._exposed_durations.of(kind).record(pull.exposed_s)
