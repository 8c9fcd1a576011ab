"""The one way out of an engine for every choice of a job; never decides that one ends."""

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
    """What ends is gone from job table, scheduler, offers and `times`; whoever was taking it over is told."""

    def __init__(
        self, scheduler: Scheduler, jobs: JobTable, drain_migration: DrainMigration, times: JobTimeline
    ) -> None:
        self.times = times
        self._scheduler = scheduler
        self._jobs = jobs
        self._drain_migration = drain_migration

    def settle(self, progress: SequenceUpdate, now: float) -> list[Effect]:
        """Take out what the scheduler has ended, and tell its gateway."""
        effects: list[Effect] = []
        for part in (part for part in progress.parts if part.has_ended):
            kind = ErrorKind.CANCELLED if part.error is None else part.error_kind
            effects += self._forget(part.key, now, kind, part.error or "nothing is left to hand over")
            effects.append(SendEvent(ending(part)))
            effects += self._leave(part.key, _leaving(part), now)
        return effects

    def drop(
        self, keys: Iterable[JobKey], now: float, kind: ErrorKind, reason: str, outcome: Outcome | None = None
    ) -> list[Effect]:
        """End choices that were going on, without a word to their gateway. `outcome`: where `kind` does not say it."""
        effects: list[Effect] = []
        for key in keys:
            leaving = _dropped(outcome, self._scheduler.num_output(key), kind, reason)
            effects += self._forget(key, now, kind, reason)
            self._scheduler.cancel(key)
            effects += self._leave(key, leaving, now)
        return effects

    def abandon(self, keys: Iterable[JobKey], now: float, kind: ErrorKind, reason: str) -> list[Effect]:
        """Fail choices because nothing is computed any more; no books are kept from then on."""
        effects: list[Effect] = []
        for key in keys:
            effects.append(SendEvent(Failed(key, kind, reason)))
            effects += self._leave(key, _dropped("failed", self._scheduler.num_output(key), kind, reason), now)
        return effects

    def _forget(self, key: JobKey, now: float, kind: ErrorKind, reason: str) -> list[Effect]:
        self._jobs.end(key, now)
        return self._drain_migration.ended(key, kind, reason, now)

    def _leave(self, key: JobKey, leaving: EndedChoice, now: float) -> list[Effect]:
        times = self.times.left(key, leaving, now)
        return [] if times is None else [JobEnded(times)]


def _leaving(part: SequenceUpdate) -> EndedChoice:
    if part.error is not None:
        return EndedChoice("failed", part.num_output, part.error_kind, part.error)
    if not part.handed_over:
        return EndedChoice("finished", part.num_output)
    return EndedChoice("handed_over" if isinstance(part.job, PrefillJob) else "moved", part.num_output)


def _dropped(outcome: Outcome | None, num_output: int, kind: ErrorKind, reason: str) -> EndedChoice:
    outcome = outcome or _OUTCOMES.get(kind, "failed")
    return EndedChoice(outcome, num_output, kind, reason) if outcome == "failed" else EndedChoice(outcome, num_output)
