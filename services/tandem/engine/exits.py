"""The one way out of an engine for every choice of a job; never decides that one ends."""

from __future__ import annotations

from collections.abc import Iterable

from tandem.core.errors import ErrorKind
from tandem.core.ids import JobKey
from tandem.engine.effects import Effect, Emit
from tandem.engine.evacuation import Evacuation
from tandem.engine.job_table import JobTable
from tandem.engine.reports import ending
from tandem.sched.outcome import Progress
from tandem.sched.scheduler import Scheduler


class Exits:
    """What ends is gone from the job table, the scheduler and the offers; whoever was taking it over is told."""

    def __init__(self, scheduler: Scheduler, jobs: JobTable, evacuation: Evacuation) -> None:
        self._scheduler = scheduler
        self._jobs = jobs
        self._evacuation = evacuation

    def settle(self, progress: Progress, now: float) -> list[Effect]:
        """Take out what the scheduler has ended, and tell its gateway."""
        effects: list[Effect] = []
        for part in (part for part in progress.parts if part.has_ended):
            kind = ErrorKind.CANCELLED if part.error is None else part.error_kind
            effects += self._forget(part.key, now, kind, part.error or "nothing is left to hand over")
            effects.append(Emit(ending(part)))
        return effects

    def drop(self, keys: Iterable[JobKey], now: float, kind: ErrorKind, reason: str) -> list[Effect]:
        """End choices that were going on, without a word to their gateway."""
        effects: list[Effect] = []
        for key in keys:
            self._scheduler.cancel(key)
            effects += self._forget(key, now, kind, reason)
        return effects

    def _forget(self, key: JobKey, now: float, kind: ErrorKind, reason: str) -> list[Effect]:
        self._jobs.end(key, now)
        return self._evacuation.ended(key, kind, reason, now)
