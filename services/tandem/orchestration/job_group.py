"""Track the choices of one request that run together as one job, and the workers that run them.

    QUEUED  --placed-->  RESERVING  --accepted-->  STARTING  --accepted-->  RUNNING  <---+
       ^                    |  (local: straight to RUNNING)    |                |  |     | accepted
       +----- no room ------+------------- no room ------------+---- failed ----+  |  RESERVING
       |                                                       withdrawn ^ offered  |     ^ placed
       +-------------------- failed, or no consumer ------------------ FINDING_CONSUMER --+

The decode worker reserves first: it alone knows its free capacity, and only then does a prefill worker begin. A job
group is FINDING_CONSUMER while a worker offers its KV and no worker pulls it yet. The offering worker is either a
prefill worker whose decode worker was lost, or a decode worker that drains or from which the gateway moves the group.
Such a decode worker keeps decoding until another worker has taken over. A move whose target does not take over is
withdrawn, and the group is RUNNING again.

A request begins as one job group. When its workers are lost, each choice that has tokens continues as a job group of
its own, and those without tokens stay together, because a job of several choices has no tokens yet.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum, auto

from tandem.core.ids import HandoffKey, JobKey, WorkerRef
from tandem.core.request import GenerateJob, Job, PrefillJob, RemotePrefix, ResumeJob
from tandem.orchestration.phase_ledger import LedgerPhase


class JobGroupPhase(Enum):
    QUEUED = auto()
    FINDING_CONSUMER = auto()
    RESERVING = auto()
    STARTING = auto()
    RUNNING = auto()
    ENDED = auto()


_OPEN = set(JobGroupPhase) - {JobGroupPhase.ENDED}


class JobGroupStep(Enum):
    """Name the events that move a job group from one phase to another. The value of each is a pair: the phases in which
    it may happen, and the phase to which it leads."""

    PLACED = {JobGroupPhase.QUEUED, JobGroupPhase.FINDING_CONSUMER}, JobGroupPhase.RESERVING
    BOOKED = {JobGroupPhase.RESERVING}, JobGroupPhase.STARTING
    STARTED = {JobGroupPhase.RESERVING, JobGroupPhase.STARTING}, JobGroupPhase.RUNNING
    OFFERED = {JobGroupPhase.RESERVING, JobGroupPhase.RUNNING}, JobGroupPhase.FINDING_CONSUMER
    WITHDRAWN = {JobGroupPhase.FINDING_CONSUMER}, JobGroupPhase.RUNNING
    NO_ROOM = _OPEN - {JobGroupPhase.QUEUED}, JobGroupPhase.QUEUED
    END = _OPEN, JobGroupPhase.ENDED


@dataclass(eq=False, slots=True)
class WorkerJob:
    """A job that was submitted to a worker and has not ended.

    `choices`: the choices about which the worker may still send events. `is_handed_off`: another worker has read the
    job's KV, so the loss of this job has no effect.
    """

    worker: WorkerRef
    job: Job
    choices: set[int]
    is_handed_off: bool = False

    def key_of(self, choice: int) -> JobKey:
        return JobKey(self.job.request.id, self.job.attempt, choice)

    @property
    def keys(self) -> tuple[JobKey, ...]:
        """Return the job's keys for the choices about which the worker may still send events, by rising index of the
        choice."""
        return tuple(map(self.key_of, sorted(self.choices)))


@dataclass(frozen=True, slots=True)
class KVOffer:
    """An offer of a job group's KV that no worker has read yet. `worker` offers the KV under the key `offer`.

    `prefill`: the job that computes the KV; None if a decode worker offers it and keeps decoding.
    """

    worker: WorkerRef
    offer: HandoffKey
    prefill: PrefillJob | None = None


@dataclass(eq=False, slots=True)
class JobGroup:
    """Hold the choices that run as one job, and the open jobs of the workers that run them (`works`).

    - `unanswered`: the submitted job that its worker has neither accepted nor rejected; None without one.
    - `source`: the KV offer that no worker has read yet; None without one.
    - `num_fruitless`: number of attempts that have failed since the last progress. Progress is a token with the index
      `progress_at` or a later one.
    - `num_retries`: number of retries and migrations so far.
    - `prefix`: the remote prefix of the last placement; None without one.
    - `unfit`: workers that failed to take over the offered KV and are not tried again.
    - `target`: the worker to which the gateway has chosen to move the group. None without such a move, also while the
      group leaves a worker that drains.
    - `progress`: what has been sampled since the last placement. FIRST: no token. HANDOVER (the hand-off): only the
      first token, by the prefill worker. DECODE: at least one token by the worker that decodes.
    """

    choices: set[int]
    num_fruitless: int = 0
    num_retries: int = 0
    phase: JobGroupPhase = JobGroupPhase.QUEUED
    works: list[WorkerJob] = field(default_factory=list)
    unanswered: WorkerJob | None = None
    source: KVOffer | None = None
    prefix: RemotePrefix | None = None
    target: WorkerRef | None = None
    unfit: set[WorkerRef] = field(default_factory=set)
    progress_at: int = 0
    progress: LedgerPhase = LedgerPhase.FIRST

    @property
    def ledger_phase(self) -> LedgerPhase:
        """Return the phase of the request's `PhaseLedger` in which the group's time counts now.

        A group that has sampled tokens still counts as decoding while the gateway searches for a worker that takes it
        over, or waits for that worker's reservation.
        """
        match self.phase:
            case JobGroupPhase.ENDED:
                return LedgerPhase.DELIVER
            case JobGroupPhase.QUEUED:
                return LedgerPhase.QUEUE
            case JobGroupPhase.RESERVING | JobGroupPhase.STARTING if self.progress is LedgerPhase.FIRST:
                return LedgerPhase.ROUTE
        return self.progress

    def move(self, step: JobGroupStep) -> None:
        """Change `phase` by a step. Raises RuntimeError, and changes nothing, for a step that may not happen in this
        phase."""
        before, after = step.value
        if self.phase not in before:
            raise RuntimeError(f"{self!r} cannot take {step.name}")
        self.phase = after

    def find(self, worker: WorkerRef, attempt: int) -> WorkerJob | None:
        """Return the open job with the attempt number `attempt` at `worker`; None when there is none."""
        for work in self.works:
            if work.job.attempt == attempt and work.worker == worker:
                return work
        return None

    def at(self, worker: WorkerRef) -> list[WorkerJob]:
        """Return the open jobs of the group at a worker."""
        return [work for work in self.works if work.worker == worker]

    def leave(self, work: WorkerJob, choice: int) -> None:
        """Record that a job sends no more events about a choice, and remove the job after its last choice."""
        work.choices.discard(choice)
        if not work.choices:
            self.drop(work)

    def drop(self, work: WorkerJob) -> None:
        self.works.remove(work)
        if self.unanswered is work:
            self.unanswered = None

    def is_worked_on(self, choice: int) -> bool:
        """Return whether a choice may still progress: the group is queued, a worker may send events about the choice,
        or a prefill worker offers its KV."""
        offered = (
            self.phase is JobGroupPhase.FINDING_CONSUMER and self.source is not None and self.source.prefill is not None
        )
        return offered or self.phase is JobGroupPhase.QUEUED or any(choice in work.choices for work in self.works)

    def note_token(self, index: int) -> None:
        """Record that the client has the output token at position `index` of a choice. Resets `num_fruitless`, the
        count of failed attempts, if `index` is at least `progress_at`."""
        if index >= self.progress_at:
            self.num_fruitless = 0

    def streamed(self, work: WorkerJob, index: int) -> None:
        """Record that the job `work` sampled the output token at position `index` of a choice and that the client has
        it. Does the work of `drew` and `note_token` in one call, for speed."""
        if self.progress is not LedgerPhase.DECODE:
            self.drew(work, index)
        if index >= self.progress_at:
            self.num_fruitless = 0

    def drew(self, work: WorkerJob, index: int) -> None:
        """Update `progress` after the job `work` has reported the output token at position `index` of a choice.

        It becomes DECODE by a token of a `GenerateJob`, or by a token of a `ResumeJob` after its first one. Any other
        token changes it only from FIRST to HANDOVER: a `PrefillJob` samples just one token of each choice, and the
        first token that a `ResumeJob` reports may have been sampled by the worker whose KV it reads.
        """
        job = work.job
        if isinstance(job, GenerateJob) or (isinstance(job, ResumeJob) and index > len(job.output_tokens)):
            self.progress = LedgerPhase.DECODE
        elif self.progress is LedgerPhase.FIRST:
            self.progress = LedgerPhase.HANDOVER

    @property
    def is_source_open(self) -> bool:
        """Return whether a decode worker offers the group's KV and still samples its tokens."""
        return self.source is not None and self.source.prefill is None and bool(self.at(self.source.worker))

    def is_offered_besides(self, worker: WorkerRef) -> bool:
        """Return whether the group's KV can be taken over from another worker than `worker`: from a prefill worker, or
        from a decode worker whose job is still open. A decode worker whose job has ended has already handed over its
        KV."""
        if self.source is None or self.source.worker == worker:
            return False
        return self.source.prefill is not None or self.is_source_open

    def split(self, choice: int) -> JobGroup:
        """Move a choice to a new job group in the same phase, and return that group.

        Each job with this choice is divided between the two groups.
        """
        part = JobGroup({choice}, self.num_fruitless, self.num_retries, self.phase, prefix=self.prefix)
        part.progress_at, part.progress = self.progress_at, self.progress
        self.choices.discard(choice)
        for work in [work for work in self.works if choice in work.choices]:
            part.works.append(WorkerJob(work.worker, work.job, {choice}, work.is_handed_off))
            self.leave(work, choice)
        return part

    def divide(self, num_tokens: Mapping[int, int]) -> list[JobGroup]:
        """Return the job groups in which the choices of this group continue with other workers: only this group, or
        new queued groups that replace it.

        Each choice that has tokens continues in a group of its own. Choices without tokens continue together if they
        follow one another by index, because one job covers consecutive choices. Choices between them that have ended
        do not matter, but a choice between them that has tokens or is in another group separates them. `num_tokens`:
        for each choice of the request that has not ended, by index, the number of tokens that the client has.
        """
        groups: list[set[int]] = []
        previous: int | None = None
        for index in sorted(num_tokens):
            is_free = index in self.choices and not num_tokens[index]
            if index in self.choices:
                if is_free and previous is not None:
                    groups[-1].add(index)
                else:
                    groups.append({index})
            previous = index if is_free else None
        if len(groups) == 1:
            return [self]
        return [JobGroup(group, self.num_fruitless, self.num_retries) for group in groups]

    def take(self, offer: HandoffKey, consumer: WorkerJob) -> bool:
        """Record that the job `consumer` has read all KV of `offer`, and mark the group's other jobs as handed off.

        Returns True if a decode worker offered the KV, so that this was a migration, and False if a prefill worker did.
        Returns False and does nothing where `offer` is not the group's current offer.
        """
        if self.source is None or self.source.offer != offer:
            return False
        has_moved = self.source.prefill is None
        for other in self.works:
            other.is_handed_off = other is not consumer
        self.source = self.target = None
        self.unfit.clear()
        return has_moved

    def clear(self) -> None:
        """Remove all jobs, the KV offer and the record of workers that failed to take it over."""
        self.works.clear()
        self.unanswered = self.source = self.target = None
        self.unfit.clear()

    def __repr__(self) -> str:
        works = [f"{type(work.job).__name__}#{work.job.attempt} at {work.worker.id}" for work in self.works]
        return f"<choices {sorted(self.choices)} {self.phase.name}, {works}>"
