"""Which attempts at which choices are live, ended or forbidden here; never runs one.

A job may cover several choices, each of which ends by itself; the job goes by the key of the first.
"""

from __future__ import annotations

from collections.abc import Iterator

from tandem.core.errors import ErrorKind, TandemError
from tandem.core.ids import JobKey, RequestId
from tandem.core.request import Job
from tandem.kv.expiring_dict import ExpiringDict


class JobTable:
    """At most one live attempt per choice. Attempts that ended or were cancelled are remembered for `memory_s`."""

    def __init__(self, *, memory_s: float = 120.0) -> None:
        self._live: dict[tuple[RequestId, int], Job] = {}
        self._jobs: dict[JobKey, Job] = {}
        self._ended: ExpiringDict[JobKey, None] = ExpiringDict(memory_s)
        self._fences: ExpiringDict[tuple[RequestId, int], int] = ExpiringDict(memory_s)

    def find(self, key: JobKey) -> Job | None:
        """The job that this choice is a live part of."""
        job = self._live.get((key.request, key.choice))
        return job if job is not None and job.attempt == key.attempt else None

    def named(self, key: JobKey) -> Job | None:
        """The job of this name, while any of its choices is live."""
        return self._jobs.get(key)

    def live_keys(self, name: JobKey) -> list[JobKey]:
        """The choices of the job of this name that have not ended."""
        job = self._jobs.get(name)
        return [] if job is None else [k for k in job.keys if self._live.get((k.request, k.choice)) is job]

    def is_known(self, key: JobKey) -> bool:
        """Live, or ended not long ago: the same Submit again changes nothing."""
        return self.find(key) is not None or key in self._ended

    def fenced_by(self, key: JobKey) -> JobKey | None:
        """The older live attempt that `key` ends. Raises TandemError when `key` itself is fenced or was cancelled."""
        fence = self._fences.get((key.request, key.choice))
        if fence is not None and fence >= key.attempt:
            raise TandemError(ErrorKind.CANCELLED, f"job {key} comes after attempt {fence} was cancelled or has ended")
        return self._older(key)

    def examine(self, job: Job) -> tuple[list[JobKey], list[JobKey]] | None:
        """What a job that comes meets: the older live attempts that it ends, and those of its choices that were
        cancelled before it came; None when it is known. Raises TandemError when it is to be refused."""
        if any(type(live) is not type(job) for live in map(self.find, job.keys) if live is not None):
            raise TandemError(ErrorKind.INVALID_REQUEST, f"job {job.key} is here already, as another kind of job")
        if any(map(self.is_known, job.keys)):
            return None
        forbidden = [key for key in job.keys if self._fences.get((key.request, key.choice)) == key.attempt]
        is_refused = len(forbidden) == job.num_choices
        found = [self.fenced_by(k) if is_refused or k not in forbidden else self._older(k) for k in job.keys]
        return [older for older in found if older is not None], forbidden

    def add(self, job: Job) -> None:
        self._jobs[job.key] = job
        for key in job.keys:
            self._live[key.request, key.choice] = job

    def end(self, key: JobKey, now: float) -> None:
        job = self._live.pop((key.request, key.choice))
        if not self.live_keys(job.key):
            del self._jobs[job.key]
        self._ended.put(key, None, now)
        self.tombstone(key, now)

    def tombstone(self, key: JobKey, now: float) -> None:
        """A cancel of a job that is not here: refuse it, and what it fenced, if it comes."""
        choice = (key.request, key.choice)
        fence = self._fences.get(choice)
        self._fences.put(choice, key.attempt if fence is None else max(fence, key.attempt), now)

    def forget(self, now: float) -> None:
        """Drop what ended too long ago."""
        self._ended.forget(now)
        self._fences.forget(now)

    def keys(self) -> list[JobKey]:
        """Of all choices that are live."""
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
