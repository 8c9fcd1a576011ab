"""Record when each live job did what, and return the record once, with the job's last choice.

Times come from the caller. Decoded tokens are not recorded, only jobs that start and end, prompt chunks and first
tokens, so a decode step costs nothing here.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from tandem.core.errors import ErrorKind
from tandem.core.ids import JobKey, WorkerRef
from tandem.core.request import GenerateJob, Job, PrefillJob, ResumeJob
from tandem.core.request_stages import JobStages
from tandem.sched.state.schedule_result import ScheduleResult, SequenceUpdate

MAX_CHUNKS = 256

Outcome = Literal["finished", "handed_over", "moved", "given_back", "cancelled", "failed"]
"""Final state of a job. "handed_over": a Prefill sampled its first token and offers the KV. "moved": the sequence
migrated to another worker. "given_back": a draining worker failed it as DRAINING, and its gateway places it again."""
Reading = Literal["handoff", "prefix"]
"""What a pull reads: the KV of a Resume, or a cached prefix of another worker."""

PullOutcome = Literal["done", "cancelled", "failed"]


class PrefillChunk(NamedTuple):
    """Known tokens that one step computed. With two plans open the step was planned while the step before it ran."""

    planned_at: float
    ended_at: float
    num_tokens: int


_KINDS = {GenerateJob: "generate", PrefillJob: "prefill", ResumeJob: "resume"}


@dataclass(frozen=True, slots=True, kw_only=True)
class PullTimes:
    """What a job read from another worker, and when.

    `num_exposed_bytes` of the `num_bytes` had not been read when the last announcement arrived. `num_cached_tokens`
    needed no reading, because they were in this worker's prefix cache. `ready_at`: when the
    last block was checked, or the pull was given up. Without announcements both announcement times are when the pull
    was opened.
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
        """Return the seconds that reading went on after the source's last announcement; 0 where nothing was read."""
        return self.ready_at - self.last_announced_at if self.num_blocks else 0.0


@dataclass(slots=True, kw_only=True)
class JobTimes:
    """A job, and what is known of it until it has ended with all its choices; not changed any more after that. Times
    are the engine's `now`, in seconds.

    `started_at`: its first step was planned; for a Resume, set once that step has ended. `first_token_at`: end of the
    first step that sampled one of its tokens here. `num_cached`: known tokens whose KV was here before. `num_output`:
    tokens sampled here. `chunks`: the steps that computed known tokens, at most MAX_CHUNKS; the last one includes all
    later steps. `error_kind` and `error` are set for a failed job. While the job is live, `live` are its choices that
    have not ended, and `firsts` the output indices of the first tokens that they sampled here.
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
    error_kind: ErrorKind | None = None
    error: str = ""
    live: list[JobKey] = field(default_factory=list, repr=False, compare=False)
    firsts: dict[JobKey, int] = field(default_factory=dict, repr=False, compare=False)

    def computed(self, chunk: PrefillChunk) -> None:
        """Record a step that computed known tokens."""
        if len(self.chunks) < MAX_CHUNKS:
            self.chunks.append(chunk)
        else:
            last = self.chunks[-1]
            self.chunks[-1] = PrefillChunk(last.planned_at, chunk.ended_at, last.num_tokens + chunk.num_tokens)

    @property
    def kind(self) -> str:
        """Return "generate", "prefill" or "resume"."""
        return _KINDS[type(self.job)]

    @property
    def ready_at(self) -> float | None:
        """Return when the job waited only for this worker's own steps; None if it ended before."""
        if not isinstance(self.job, ResumeJob):
            return self.accepted_at
        return self.pull.ready_at if self.pull is not None and self.pull.outcome == "done" else None

    @property
    def stages(self) -> JobStages | None:
        """Return where the time to its first token sampled here went; None if it sampled none."""
        if self.first_token_at is None or self.started_at is None:
            return None
        return stages_of(self.job, (self.accepted_at, self.started_at, self.first_token_at), self.pull)


def stages_of(job: Job, times: tuple[float, float, float], pull: PullTimes | None) -> JobStages:
    """Split the time to a job's first token. `times`: when it was accepted, was started, and sampled its first
    token."""
    accepted_at, started_at, sampled_at = times
    if not isinstance(job, ResumeJob):
        return JobStages(prefill_queue_s=started_at - accepted_at, prefill_s=sampled_at - started_at)
    assert pull is not None, f"{job.key} samples without KV"
    decode_queue_s, decode_s = started_at - pull.ready_at, sampled_at - started_at
    return JobStages(transfer_s=pull.exposed_s, decode_queue_s=decode_queue_s, decode_s=decode_s)


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


class _Plan(NamedTuple):
    """An open plan: when it began, and the prompt chunks that it computes, as (timer, number of tokens)."""

    begun_at: float
    chunks: tuple[tuple[JobTimes, int], ...]


class JobTimeline:
    """Own the timers of all live jobs. `awaiting_first_token`: timers of the choices that are being computed, or are
    ready to be, and have sampled no token here yet."""

    def __init__(self) -> None:
        self.awaiting_first_token: dict[JobKey, JobTimes] = {}
        self._timers: dict[JobKey, JobTimes] = {}
        self._open: deque[_Plan] = deque()
        self._plan = _Plan(0.0, ())

    def accepted(self, job: Job, now: float) -> None:
        timer = JobTimes(job=job, accepted_at=now, live=list(job.keys))
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
        if timer.error_kind is None:
            timer.outcome, _, timer.error_kind, timer.error = end
        if timer.live:
            return None
        for choice in timer.job.keys:
            del self._timers[choice]
        timer.ended_at = now
        return timer

    def check(self, job_keys: Iterable[JobKey]) -> None:
        """Raise AssertionError naming the first difference from `job_keys`, the keys of all live jobs."""
        assert {timer.job.key for timer in self._timers.values()} == set(job_keys), "timers and live jobs differ"
        assert self.awaiting_first_token.keys() <= self._timers.keys(), "an ended choice awaits its first token"

    def __repr__(self) -> str:
        num_waiting = len(self.awaiting_first_token)
        return f"<times of {len(self._timers)} choices, {num_waiting} without a token, {len(self._open)} plans open>"

    def _await_first_tokens(self, timer: JobTimes) -> None:
        """Expect the first tokens of all choices of a job that have not ended."""
        for key in timer.live:
            self.awaiting_first_token[key] = timer
