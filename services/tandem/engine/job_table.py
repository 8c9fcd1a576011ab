"""Which attempts at which choices are live, ended or forbidden here; never runs one."""

from __future__ import annotations

from collections.abc import Iterator

from tandem.core.errors import ErrorKind, TandemError
from tandem.core.ids import JobKey, RequestId
from tandem.core.request import Job


class JobTable:
    """At most one live attempt per choice. Attempts that ended or were cancelled are remembered for `memory_s`."""

    def __init__(self, *, memory_s: float = 120.0) -> None:
        self._memory_s = memory_s
        self._live: dict[tuple[RequestId, int], Job] = {}
        self._ended: dict[JobKey, float] = {}
        self._fences: dict[tuple[RequestId, int], tuple[int, float]] = {}

    def find(self, key: JobKey) -> Job | None:
        job = self._live.get((key.request, key.choice))
        return job if job is not None and job.key == key else None

    def is_known(self, key: JobKey) -> bool:
        """Live, or ended not long ago: the same Submit again changes nothing."""
        return self.find(key) is not None or key in self._ended

    def fenced_by(self, key: JobKey) -> JobKey | None:
        """The older live attempt that `key` ends. Raises TandemError when `key` itself is fenced or was cancelled."""
        fence, _ = self._fences.get((key.request, key.choice), (-1, 0.0))
        if fence >= key.attempt:
            raise TandemError(ErrorKind.CANCELLED, f"job {key} comes after attempt {fence} was cancelled or has ended")
        other = self._live.get((key.request, key.choice))
        if other is None:
            return None
        if other.attempt > key.attempt:
            raise TandemError(ErrorKind.CANCELLED, f"job {key} is fenced by {other.key}")
        return other.key

    def add(self, job: Job) -> None:
        self._live[job.request.id, job.choice] = job

    def end(self, key: JobKey, now: float) -> None:
        del self._live[key.request, key.choice]
        self._ended[key] = now + self._memory_s
        self.forbid(key, now)

    def forbid(self, key: JobKey, now: float) -> None:
        """A cancel of a job that is not here: refuse it, and what it fenced, if it comes."""
        fence, _ = self._fences.get((key.request, key.choice), (key.attempt, 0.0))
        self._fences[key.request, key.choice] = (max(fence, key.attempt), now + self._memory_s)

    def forget(self, now: float) -> None:
        self._ended = {key: until for key, until in self._ended.items() if until > now}
        self._fences = {choice: fence for choice, fence in self._fences.items() if fence[1] > now}

    def __iter__(self) -> Iterator[Job]:
        return iter(self._live.values())

    def __len__(self) -> int:
        return len(self._live)
