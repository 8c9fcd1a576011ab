"""Track which attempts at which choices are live, have ended, or were cancelled before they arrived (tombstones).

A job may cover several choices, each of which ends by itself. The job key is the key of its first choice.
"""

from __future__ import annotations

from collections.abc import Iterator

from tandem.core.errors import ErrorKind, TandemError
from tandem.core.ids import JobKey, RequestId
from tandem.core.request import Job
from tandem.kv.expiring_dict import ExpiringDict


class JobTable:
    """Find jobs by choice, and decide whether an attempt at a choice is new, known or fenced.

    At most one attempt per choice is live. The table remembers for `memory_s` seconds which choices have ended, and the
    fence of each choice: the greatest attempt that has ended or was cancelled. Attempts up to the fence are rejected.
    """

    def __init__(self, *, memory_s: float = 120.0) -> None:
        self._live: dict[tuple[RequestId, int], Job] = {}
        self._jobs: dict[JobKey, Job] = {}
        self._ended: ExpiringDict[JobKey, None] = ExpiringDict(memory_s)
        self._fences: ExpiringDict[tuple[RequestId, int], int] = ExpiringDict(memory_s)

    def find(self, key: JobKey) -> Job | None:
        """Return the job of a live choice; None if the choice, or this attempt at it, is not live."""
        job = self._live.get((key.request, key.choice))
        return job if job is not None and job.attempt == key.attempt else None

    def find_job(self, key: JobKey) -> Job | None:
        """Return the job with this job key, the key of its first choice; None unless a choice of the job is live."""
        return self._jobs.get(key)

    def live_keys(self, job_key: JobKey) -> list[JobKey]:
        """Return the keys of a job's choices that have not ended; empty for an unknown job."""
        job = self._jobs.get(job_key)
        return [] if job is None else [k for k in job.keys if self._live.get((k.request, k.choice)) is job]

    def is_known(self, key: JobKey) -> bool:
        """Return whether this attempt at the choice is live or has ended within `memory_s` seconds."""
        return self.find(key) is not None or key in self._ended

    def fenced_by(self, key: JobKey) -> JobKey | None:
        """Return the older live attempt at the same choice that `key` would end; None if there is none.

        Raises TandemError (CANCELLED) when a newer attempt is live, or when this attempt or a newer one has ended or
        was cancelled.
        """
        fence = self._fences.get((key.request, key.choice))
        if fence is not None and fence >= key.attempt:
            raise TandemError(
                ErrorKind.CANCELLED, f"job {key} arrives after attempt {fence} was cancelled or has ended"
            )
        return self._older(key)

    def examine(self, job: Job) -> tuple[list[JobKey], list[JobKey]] | None:
        """Check whether a new job may be added, and return the choices that it would end, as two lists of keys; change
        nothing.

        The first list has the older live attempts at the job's choices, the second those choices of the job itself that
        were cancelled before it arrived. Returns None if the job is known already. Raises TandemError if the job is
        fenced, if all its choices were cancelled, or if it is live as another kind of job.
        """
        if any(type(live) is not type(job) for live in map(self.find, job.keys) if live is not None):
            raise TandemError(ErrorKind.INVALID_REQUEST, f"job {job.key} is here already, as another kind of job")
        if any(map(self.is_known, job.keys)):
            return None
        tombstoned = [key for key in job.keys if self._fences.get((key.request, key.choice)) == key.attempt]
        is_refused = len(tombstoned) == job.num_choices
        found = [self.fenced_by(k) if is_refused or k not in tombstoned else self._older(k) for k in job.keys]
        return [older for older in found if older is not None], tombstoned

    def add(self, job: Job) -> None:
        """Make all choices of a job live; call `examine` before."""
        self._jobs[job.key] = job
        for key in job.keys:
            self._live[key.request, key.choice] = job

    def end(self, key: JobKey, now: float) -> None:
        """Remove a live choice, and with its last choice the job; attempts up to this one are rejected from now on.

        Raises KeyError if the choice is not live.
        """
        job = self._live.pop((key.request, key.choice))
        if not self.live_keys(job.key):
            del self._jobs[job.key]
        self._ended.put(key, None, now)
        self.tombstone(key, now)

    def tombstone(self, key: JobKey, now: float) -> None:
        """Reject the attempt `key` at a choice, and all older attempts, for `memory_s` seconds from `now`, because it
        has ended or was cancelled before it arrived."""
        choice = (key.request, key.choice)
        fence = self._fences.get(choice)
        self._fences.put(choice, key.attempt if fence is None else max(fence, key.attempt), now)

    def forget(self, now: float) -> None:
        """Drop ended choices and fences that were recorded more than `memory_s` seconds before `now`."""
        self._ended.forget(now)
        self._fences.forget(now)

    def keys(self) -> list[JobKey]:
        """Return the keys of all live choices."""
        return [JobKey(request, job.attempt, choice) for (request, choice), job in self._live.items()]

    def _older(self, key: JobKey) -> JobKey | None:
        other = self._live.get((key.request, key.choice))
        if other is not None and other.attempt > key.attempt:
            raise TandemError(ErrorKind.CANCELLED, f"job {key} is fenced by {other.key}")
        return None if other is None else JobKey(key.request, other.attempt, key.choice)

    def __iter__(self) -> Iterator[Job]:
        return iter(self._jobs.values())

    def __len__(self) -> int:
        return len(self._live)
