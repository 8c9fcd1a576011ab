"""Which attempts at which choices are live, ended or forbidden here; never runs one."""

from __future__ import annotations

from collections.abc import Iterator

from tandem.core.errors import ErrorKind, TandemError
from tandem.core.ids import JobKey, RequestId
from tandem.core.request import Job
from tandem.kv.recent import Recent


class JobTable:
    """At most one live attempt per choice. Attempts that ended or were cancelled are remembered for `memory_s`."""

    def __init__(self, *, memory_s: float = 120.0) -> None:
        self._live: dict[tuple[RequestId, int], Job] = {}
        self._ended: Recent[JobKey, None] = Recent(memory_s)
        self._fences: Recent[tuple[RequestId, int], int] = Recent(memory_s)

    def find(self, key: JobKey) -> Job | None:
        job = self._live.get((key.request, key.choice))
        return job if job is not None and job.key == key else None

    def is_known(self, key: JobKey) -> bool:
        """Live, or ended not long ago: the same Submit again changes nothing."""
        return self.find(key) is not None or key in self._ended

    def fenced_by(self, key: JobKey) -> JobKey | None:
        """The older live attempt that `key` ends. Raises TandemError when `key` itself is fenced or was cancelled."""
        fence = self._fences.get((key.request, key.choice))
        if fence is not None and fence >= key.attempt:
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
        self._ended.put(key, None, now)
        self.forbid(key, now)

    def forbid(self, key: JobKey, now: float) -> None:
        """A cancel of a job that is not here: refuse it, and what it fenced, if it comes."""
        choice = (key.request, key.choice)
        fence = self._fences.get(choice)
        self._fences.put(choice, key.attempt if fence is None else max(fence, key.attempt), now)

    def forget(self, now: float) -> None:
        """Drop what ended too long ago."""
        self._ended.forget(now)
        self._fences.forget(now)

    def __iter__(self) -> Iterator[Job]:
        return iter(self._live.values())

    def __len__(self) -> int:
        return len(self._live)
