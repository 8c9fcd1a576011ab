"""Record when each live job did what, and return the record once, with the job's last choice.

Times come from the caller. Decoded tokens are not recorded, only jobs that start and end, prompt chunks and first
tokens, so a decode step costs nothing here.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from tandem.core.errors import ErrorKind
from tandem.core.ids import JobKey
from tandem.core.request import Job, PrefillJob, ResumeJob
from tandem.core.request_stages import JobStages
from tandem.engine.job_timings import MAX_CHUNKS, JobTimes, Outcome, PrefillChunk, PullTimes, stages_of
from tandem.sched.state.schedule_result import ScheduleResult, SequenceUpdate


class EndedChoice(NamedTuple):
    """How a choice ended, and its number of output tokens."""

    outcome: Outcome
    num_output: int = 0
    error_kind: ErrorKind | None = None
    error: str = ""


_OUTCOMES: dict[ErrorKind, Outcome] = {ErrorKind.CANCELLED: "cancelled", ErrorKind.DRAINING: "given_back"}


def ended_choice(part: SequenceUpdate) -> EndedChoice:
    """Return how a choice ended that the scheduler has ended."""
    if part.error is not None:
        return EndedChoice("failed", part.num_output, part.error_kind, part.error)
    if not part.handed_over:
        return EndedChoice("finished", part.num_output)
    return EndedChoice("handed_over" if isinstance(part.job, PrefillJob) else "moved", part.num_output)


def dropped_choice(num_output: int, kind: ErrorKind, reason: str, outcome: Outcome | None = None) -> EndedChoice:
    """Return how a running choice ends. `outcome`: overrides the outcome that follows from `kind`."""
    outcome = outcome or _OUTCOMES.get(kind, "failed")
    return EndedChoice(outcome, num_output, kind, reason) if outcome == "failed" else EndedChoice(outcome, num_output)


@dataclass(slots=True, eq=False)
class _JobTimer:
    """Times of one job whose `live` choices have not ended. `firsts`: output index of the first token sampled here, by
    choice."""

    job: Job
    accepted_at: float
    live: list[JobKey]
    started_at: float | None = None
    first_token_at: float | None = None
    num_cached: int = 0
    num_output: int = 0
    firsts: dict[JobKey, int] = field(default_factory=dict)
    chunks: list[PrefillChunk] = field(default_factory=list)
    pull: PullTimes | None = None
    end: EndedChoice | None = None

    def computed(self, chunk: PrefillChunk) -> None:
        if len(self.chunks) < MAX_CHUNKS:
            self.chunks.append(chunk)
        else:
            last = self.chunks[-1]
            self.chunks[-1] = PrefillChunk(last.planned_at, chunk.ended_at, last.num_tokens + chunk.num_tokens)

    def close(self, now: float) -> JobTimes:
        assert self.end is not None, f"{self.job.key} has not ended"
        return JobTimes(
            job=self.job,
            outcome=self.end.outcome,
            accepted_at=self.accepted_at,
            ended_at=now,
            started_at=self.started_at,
            first_token_at=self.first_token_at,
            num_cached=self.num_cached,
            num_output=self.num_output,
            chunks=tuple(self.chunks),
            pull=self.pull,
            error_kind=self.end.error_kind,
            error=self.end.error,
        )


class _Plan(NamedTuple):
    """An open plan: when it began, and the prompt chunks that it computes, as (timer, number of tokens)."""

    begun_at: float
    chunks: tuple[tuple[_JobTimer, int], ...]


class JobTimeline:
    """Own the timers of all live jobs. `awaiting_first_token`: timers of the choices that are being computed, or are
    ready to be, and have sampled no token here yet."""

    def __init__(self) -> None:
        self.awaiting_first_token: dict[JobKey, _JobTimer] = {}
        self._timers: dict[JobKey, _JobTimer] = {}
        self._open: deque[_Plan] = deque()
        self._plan = _Plan(0.0, ())

    def accepted(self, job: Job, now: float) -> None:
        timer = _JobTimer(job, now, list(job.keys))
        for key in job.keys:
            self._timers[key] = timer

    def planned(self, planned: ScheduleResult, now: float) -> None:
        """Record the starts and chunks of the step that was planned, if there is one."""
        if planned.step is None:
            return
        for start in planned.starts:
            timer = self._timers[start.key]
            if timer.started_at is None:
                timer.started_at = now
                if not isinstance(timer.job, ResumeJob):
                    timer.num_cached = start.num_cached
                    self._await_first_tokens(timer)
        chunks = tuple((self._timers[key], size) for key, size in planned.chunks) if planned.chunks else ()
        self._open.append(_Plan(now, chunks))

    def finished(self, now: float) -> None:
        """Record the end of the oldest open plan; `first_tokens_sampled` follows for the first tokens in its result."""
        self._plan = plan = self._open.popleft()
        for timer, num_tokens in plan.chunks:
            timer.computed(PrefillChunk(plan.begun_at, now, num_tokens))

    def first_tokens_sampled(self, part: SequenceUpdate, now: float) -> JobStages:
        """Record the first tokens of a choice, sampled by the plan that has ended; return where the time to them
        went."""
        timer = self.awaiting_first_token.pop(part.key)
        plan, job = self._plan, timer.job
        if timer.started_at is None:
            timer.started_at = plan.begun_at
        if timer.first_token_at is None:
            timer.first_token_at = now
            # A plan lists no chunk for a prompt's last token when that token is computed alone.
            if not isinstance(job, ResumeJob) and all(timer is not chunked for chunked, _ in plan.chunks):
                timer.computed(PrefillChunk(plan.begun_at, now, 1))
        timer.firsts[part.key] = part.first_index
        return stages_of(job, (timer.accepted_at, timer.started_at, now), timer.pull)

    def pulled(self, job_key: JobKey, pull: PullTimes) -> None:
        """Record the end of a job's pull."""
        timer = self._timers[job_key]
        timer.pull = pull
        if isinstance(timer.job, ResumeJob):
            timer.num_cached = pull.num_cached_tokens
            if pull.outcome == "done":
                self._await_first_tokens(timer)

    def choice_ended(self, key: JobKey, end: EndedChoice, now: float) -> JobTimes | None:
        """Record the end of a choice; return the times of its job if that was the last one. A job with a failed choice
        has failed, any other job ends as its last choice did."""
        timer = self._timers[key]
        self.awaiting_first_token.pop(key, None)
        first = timer.firsts.pop(key, None)
        timer.num_output += 0 if first is None else end.num_output - first
        timer.live.remove(key)
        if timer.end is None or timer.end.error_kind is None:
            timer.end = end
        if timer.live:
            return None
        for choice in timer.job.keys:
            del self._timers[choice]
        return timer.close(now)

    def check(self, job_keys: Iterable[JobKey]) -> None:
        """Raise AssertionError naming the first difference from `job_keys`, the keys of all live jobs."""
        assert {timer.job.key for timer in self._timers.values()} == set(job_keys), "timers and live jobs differ"
        assert self.awaiting_first_token.keys() <= self._timers.keys(), "an ended choice awaits its first token"

    def __repr__(self) -> str:
        num_waiting = len(self.awaiting_first_token)
        return f"<times of {len(self._timers)} choices, {num_waiting} without a token, {len(self._open)} plans open>"

    def _await_first_tokens(self, timer: _JobTimer) -> None:
        """Expect the first tokens of all choices of a job that have not ended."""
        for key in timer.live:
            self.awaiting_first_token[key] = timer
