"""Remove ended choices of jobs from all parts of an engine and report them."""

from __future__ import annotations

from collections.abc import Iterable

from tandem.core.errors import ErrorKind
from tandem.core.events import Failed
from tandem.core.ids import JobKey
from tandem.core.request import PrefillJob
from tandem.engine.effects import Effect, JobEnded, SendEvent
from tandem.engine.job_events import ending
from tandem.engine.job_table import JobTable
from tandem.engine.job_timeline import EndedChoice, JobTimeline
from tandem.engine.job_timings import Outcome
from tandem.engine.migration import DrainMigration
from tandem.sched.scheduler import Scheduler
from tandem.sched.state.schedule_result import SequenceUpdate

_OUTCOMES: dict[ErrorKind, Outcome] = {ErrorKind.CANCELLED: "cancelled", ErrorKind.DRAINING: "given_back"}


class JobCompletion:
    """Remove ended choices from job table, scheduler, migration offers and `times`; notify consumers of migrating
    choices."""

    def __init__(
        self, scheduler: Scheduler, jobs: JobTable, drain_migration: DrainMigration, times: JobTimeline
    ) -> None:
        self.times = times
        self._scheduler = scheduler
        self._jobs = jobs
        self._drain_migration = drain_migration

    def settle(self, progress: SequenceUpdate, now: float) -> list[Effect]:
        """Remove the choices that the scheduler has ended, and return the events for their gateway."""
        effects: list[Effect] = []
        for part in (part for part in progress.parts if part.has_ended):
            kind = ErrorKind.CANCELLED if part.error is None else part.error_kind
            effects += self._forget(part.key, now, kind, part.error or "nothing is left to hand over")
            effects.append(SendEvent(ending(part)))
            effects += self._record_end(part.key, _ended_choice(part), now)
        return effects

    def drop(
        self, keys: Iterable[JobKey], now: float, kind: ErrorKind, reason: str, outcome: Outcome | None = None
    ) -> list[Effect]:
        """End running choices without an event to their gateway. `outcome`: overrides the outcome that follows from
        `kind`."""
        effects: list[Effect] = []
        for key in keys:
            ended = _dropped(outcome, self._scheduler.num_output(key), kind, reason)
            effects += self._forget(key, now, kind, reason)
            self._scheduler.cancel(key)
            effects += self._record_end(key, ended, now)
        return effects

    def abandon(self, keys: Iterable[JobKey], now: float, kind: ErrorKind, reason: str) -> list[Effect]:
        """Fail choices because nothing can be computed any more; scheduler and job table are not updated."""
        effects: list[Effect] = []
        for key in keys:
            effects.append(SendEvent(Failed(key, kind, reason)))
            effects += self._record_end(key, _dropped("failed", self._scheduler.num_output(key), kind, reason), now)
        return effects

    def _forget(self, key: JobKey, now: float, kind: ErrorKind, reason: str) -> list[Effect]:
        self._jobs.end(key, now)
        return self._drain_migration.ended(key, kind, reason, now)

    def _record_end(self, key: JobKey, ended: EndedChoice, now: float) -> list[Effect]:
        times = self.times.choice_ended(key, ended, now)
        return [] if times is None else [JobEnded(times)]


def _ended_choice(part: SequenceUpdate) -> EndedChoice:
    if part.error is not None:
        return EndedChoice("failed", part.num_output, part.error_kind, part.error)
    if not part.handed_over:
        return EndedChoice("finished", part.num_output)
    return EndedChoice("handed_over" if isinstance(part.job, PrefillJob) else "moved", part.num_output)


def _dropped(outcome: Outcome | None, num_output: int, kind: ErrorKind, reason: str) -> EndedChoice:
    outcome = outcome or _OUTCOMES.get(kind, "failed")
    return EndedChoice(outcome, num_output, kind, reason) if outcome == "failed" else EndedChoice(outcome, num_output)
