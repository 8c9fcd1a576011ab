"""Record the times of each live job: acceptance, prompt chunks, KV transfer, first tokens and end.

The record is returned once, when the last choice of the job ends. Times come from the caller. Decoded tokens are not
recorded, so a decode step costs nothing here.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from tandem.core.errors import ErrorKind
from tandem.core.ids import JobKey, WorkerRef
from tandem.core.request import GenerateJob, Job, PrefillJob, ResumeJob
from tandem.core.request_stages import JobStages, Stage, Wait, merged_waits
from tandem.sched.state.schedule_result import ScheduleResult, SequenceUpdate, WaitSpan

MAX_CHUNKS = 256

Outcome = Literal["finished", "handed_over", "moved", "given_back", "cancelled", "failed"]
"""Final state of a job. "handed_over": a `PrefillJob` sampled its first token and offers the KV. "moved": the sequence
migrated to another worker. "given_back": a draining worker failed it as DRAINING, and its gateway places it again."""
Reading = Literal["handoff", "prefix"]
"""What a pull reads: the KV of a `ResumeJob`, or a cached prefix of another worker."""

PullOutcome = Literal["done", "cancelled", "failed"]


class PrefillChunk(NamedTuple):
    """Hold how many known tokens (prompt, or output of an earlier attempt) one step computed for a job, and the times
    of the step.

    `planned_at`: when the step was planned, and `ended_at`: when it ended, in seconds of the engine's clock. With two
    plans open, a step is planned while the step before it runs, so the times overlap.
    """

    planned_at: float
    ended_at: float
    num_tokens: int


_KINDS = {GenerateJob: "generate", PrefillJob: "prefill", ResumeJob: "resume"}


@dataclass(frozen=True, slots=True, kw_only=True)
class PullTimes:
    """Hold sizes and times of what a job read from the worker `source`; times are in seconds of the engine's clock.

    - `kind`: what was read; `outcome`: how the pull ended.
    - `num_blocks`, `num_bytes`: what was read; `num_exposed_bytes`: how many of the bytes had not been read when the
      last announcement arrived.
    - `num_cached_tokens`: tokens that needed no reading, because they were in this worker's prefix cache.
    - `first_announced_at`, `last_announced_at`: arrival of the source's first and last announcement; if there was none,
      the time at which the pull was opened.
    - `ready_at`: when the last block was checked, or the pull was given up.
    - `busy_s`: seconds with at least one read in flight.
    """

    kind: Reading
    outcome: PullOutcome
    source: WorkerRef
    num_blocks: int
    num_bytes: int
    num_exposed_bytes: int
    num_cached_tokens: int = 0
    first_announced_at: float
    last_announced_at: float
    ready_at: float
    busy_s: float

    @property
    def exposed_s(self) -> float:
        """Return the seconds from the source's last announcement to the end of reading; 0 if no block was read.

        Reading before the last announcement does not delay the job, because the source was still computing.
        """
        return self.ready_at - self.last_announced_at if self.num_blocks else 0.0


@dataclass(slots=True, kw_only=True)
class JobTimes:
    """Times and results of one job; complete once all choices of the job have ended, and not changed after that.

    Times are the engine's `now`, in seconds.

    - `accepted_at`, `ended_at`: when the job was accepted, and when its last choice ended.
    - `started_at`: when its first step was planned; for a `ResumeJob` set only once that step has ended. None if it had
      no step.
    - `first_token_at`: end of the first step that sampled one of its tokens here; None if none was sampled here.
    - `num_cached`: known tokens whose KV was on this worker before the job started.
    - `num_output`: tokens that the job sampled here, over all choices.
    - `chunks`: the steps that computed known tokens, at most MAX_CHUNKS; the last entry includes all later steps.
    - `pull`: the read of KV from another worker, if there was one.
    - `waits`: what it waited for before it started, as far as the scheduler knows.
    - `error_kind`, `error`: why the job failed; None and empty if it did not.
    - `live`, `firsts`: only for a live job: the choices that have not ended, and for each choice with a token the
      output index of the first token that it sampled here.
    """

    job: Job
    accepted_at: float
    outcome: Outcome = "finished"
    ended_at: float = 0.0
    started_at: float | None = None
    first_token_at: float | None = None
    num_cached: int = 0
    num_output: int = 0
    chunks: list[PrefillChunk] = field(default_factory=list)
    pull: PullTimes | None = None
    waits: tuple[WaitSpan, ...] = ()
    error_kind: ErrorKind | None = None
    error: str = ""
    live: list[JobKey] = field(default_factory=list, repr=False, compare=False)
    firsts: dict[JobKey, int] = field(default_factory=dict, repr=False, compare=False)

    def computed(self, chunk: PrefillChunk) -> None:
        """Record a step that computed known tokens of the job (prompt, or output of an earlier attempt)."""
        if len(self.chunks) < MAX_CHUNKS:
            self.chunks.append(chunk)
        else:
            last = self.chunks[-1]
            self.chunks[-1] = PrefillChunk(last.planned_at, chunk.ended_at, last.num_tokens + chunk.num_tokens)

    @property
    def kind(self) -> str:
        """Return the kind of the job: "generate", "prefill" or "resume"."""
        return _KINDS[type(self.job)]

    @property
    def ready_at(self) -> float | None:
        """Return the time from which the job waited only for steps of this worker; None for a `ResumeJob` whose KV did
        not arrive.

        This is when the job was accepted, or for a `ResumeJob` when its KV was complete.
        """
        if not isinstance(self.job, ResumeJob):
            return self.accepted_at
        return self.pull.ready_at if self.pull is not None and self.pull.outcome == "done" else None

    @property
    def stages(self) -> JobStages | None:
        """Return how the time from acceptance to the first token sampled here divides into stages; None if none was
        sampled."""
        if self.first_token_at is None or self.started_at is None:
            return None
        times = self.accepted_at, self.started_at, self.first_token_at
        return stages_of(self.job, times, self.pull, self.waits)


def stages_of(
    job: Job, times: tuple[float, float, float], pull: PullTimes | None, spans: tuple[WaitSpan, ...] = ()
) -> JobStages:
    """Divide the time from a job's acceptance to its first token here into stages.

    `times`: when the job was accepted, when its first step was planned, and when its first token was sampled. `pull`:
    its read of KV, required for a `ResumeJob` (AssertionError otherwise). `spans`: what it waited for before it
    started. Waits of a `ResumeJob` while its source still computed did not delay the job and are left out.
    """
    accepted_at, started_at, sampled_at = times
    if not isinstance(job, ResumeJob):
        waits = _waits(Stage.PREFILL_QUEUE, spans, accepted_at)
        return JobStages(prefill_queue_s=started_at - accepted_at, prefill_s=sampled_at - started_at, waits=waits)
    assert pull is not None, f"{job.key} samples without KV"
    waits = _waits(Stage.TRANSFER, spans, pull.last_announced_at)
    transfer_s = max(pull.exposed_s, sum(wait.seconds for wait in waits))
    decode_queue_s, decode_s = started_at - pull.ready_at, sampled_at - started_at
    return JobStages(transfer_s=transfer_s, decode_queue_s=decode_queue_s, decode_s=decode_s, waits=waits)


def _waits(stage: Stage, spans: Iterable[WaitSpan], since: float) -> tuple[Wait, ...]:
    """Return the waits of one stage by cause, of the time from `since` on."""
    clipped = (span._replace(since=max(since, span.since)) for span in spans)
    waits = (Wait(stage, x.cause, x.until - x.since, x.num_tokens_ahead) for x in clipped if x.until > x.since)
    return merged_waits(waits)


class EndedChoice(NamedTuple):
    """Hold how a choice ended.

    `outcome`: its final state. `num_output`: its output tokens, including those of earlier attempts. `error_kind`,
    `error`: why it failed; None and empty if it did not.
    """

    outcome: Outcome
    num_output: int = 0
    error_kind: ErrorKind | None = None
    error: str = ""


_OUTCOMES: dict[ErrorKind, Outcome] = {ErrorKind.CANCELLED: "cancelled", ErrorKind.DRAINING: "given_back"}


def ended_choice(part: SequenceUpdate) -> EndedChoice:
    """Return the final state of a choice that the scheduler has ended: failed, finished, handed over or moved. `part`:
    the last update of the choice."""
    if part.error is not None:
        return EndedChoice("failed", part.num_output, part.error_kind, part.error)
    if not part.handed_over:
        return EndedChoice("finished", part.num_output)
    return EndedChoice("handed_over" if isinstance(part.job, PrefillJob) else "moved", part.num_output)


def dropped_choice(num_output: int, kind: ErrorKind, reason: str, outcome: Outcome | None = None) -> EndedChoice:
    """Return the final state of a choice that the engine stops before the scheduler has ended it.

    `num_output`: output tokens of the choice. `kind`, `reason`: why it is stopped. `outcome`: its outcome; with None
    the outcome follows from `kind`: cancelled, given back (DRAINING) or failed.
    """
    outcome = outcome or _OUTCOMES.get(kind, "failed")
    return EndedChoice(outcome, num_output, kind, reason) if outcome == "failed" else EndedChoice(outcome, num_output)


class _Plan(NamedTuple):
    """An open plan: when it began, and the prompt chunks that it computes, as (timer, number of tokens)."""

    begun_at: float
    chunks: tuple[tuple[JobTimes, int], ...]


class JobTimeline:
    """Record the times of all live jobs, and return each job's record when its last choice ends (`choice_ended`).

    `awaiting_first_token`: the choices that have sampled no token here yet, of jobs whose computation has begun or
    whose KV has arrived; each with the record of its job.
    """

    def __init__(self) -> None:
        self.awaiting_first_token: dict[JobKey, JobTimes] = {}
        self._timers: dict[JobKey, JobTimes] = {}
        self._open: deque[_Plan] = deque()
        self._plan = _Plan(0.0, ())

    def accepted(self, job: Job, now: float) -> None:
        """Begin the record of an accepted job."""
        timer = JobTimes(job=job, accepted_at=now, live=list(job.keys))
        for key in job.keys:
            self._timers[key] = timer

    def planned(self, planned: ScheduleResult, now: float) -> None:
        """Record what a new plan does at the time `now`: which jobs it starts, which known tokens it computes, and
        which pulls got blocks."""
        for pull in planned.pulls:
            self._timers[pull.key].waits = pull.waits
        if planned.step is None:
            return
        for start in planned.starts:
            timer = self._timers[start.key]
            if timer.started_at is None:
                timer.started_at = now
                timer.waits = timer.waits or start.waits
                if not isinstance(timer.job, ResumeJob):
                    timer.num_cached = start.num_cached
                    self._await_first_tokens(timer)
        chunks = tuple((self._timers[key], size) for key, size in planned.chunks) if planned.chunks else ()
        self._open.append(_Plan(now, chunks))

    def finished(self, now: float) -> None:
        """Record the end of the oldest open plan; call it before `first_tokens_sampled` for that plan's result."""
        self._plan = plan = self._open.popleft()
        for timer, num_tokens in plan.chunks:
            if not timer.live:
                continue
            if timer.started_at is None:
                timer.started_at = plan.begun_at
            timer.computed(PrefillChunk(plan.begun_at, now, num_tokens))

    def first_tokens_sampled(self, part: SequenceUpdate, now: float) -> JobStages:
        """Record the first tokens of a choice, sampled by the plan that has just finished.

        Returns how the time from the job's acceptance to these tokens divides into stages. The choice must be in
        `awaiting_first_token` (KeyError otherwise).
        """
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
        return stages_of(job, (timer.accepted_at, timer.started_at, now), timer.pull, timer.waits)

    def pulled(self, job_key: JobKey, pull: PullTimes) -> None:
        """Record the end of a job's pull, successful or not."""
        timer = self._timers[job_key]
        timer.pull = pull
        if isinstance(timer.job, ResumeJob):
            timer.num_cached = pull.num_cached_tokens
            if pull.outcome == "done":
                self._await_first_tokens(timer)

    def choice_ended(self, key: JobKey, end: EndedChoice, now: float) -> JobTimes | None:
        """Record the end of a choice; return the record of its job if this was the last choice, else None.

        A job with a failed choice has failed; the outcome of any other job is that of its last choice.
        """
        timer = self._timers[key]
        self.awaiting_first_token.pop(key, None)
        first = timer.firsts.pop(key, None)
        timer.num_output += 0 if first is None else end.num_output - first
        timer.live.remove(key)
        if timer.error_kind is None:
            timer.outcome, _, timer.error_kind, timer.error = end
        if timer.live:
            return None
        for choice in timer.job.keys:
            del self._timers[choice]
        timer.ended_at = now
        return timer

    def check(self, job_keys: Iterable[JobKey]) -> None:
        """Raise AssertionError unless the jobs that have a record are exactly the jobs `job_keys`, the keys of all live
        jobs."""
        assert {timer.job.key for timer in self._timers.values()} == set(job_keys), "timers and live jobs differ"
        assert self.awaiting_first_token.keys() <= self._timers.keys(), "an ended choice awaits its first token"

    def __repr__(self) -> str:
        num_waiting = len(self.awaiting_first_token)
        return f"<times of {len(self._timers)} choices, {num_waiting} without a token, {len(self._open)} plans open>"

    def _await_first_tokens(self, timer: JobTimes) -> None:
        """Expect the first tokens of all choices of a job that have not ended."""
        for key in timer.live:
            self.awaiting_first_token[key] = timer
