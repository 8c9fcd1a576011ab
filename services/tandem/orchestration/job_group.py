"""Track the choices of one request that run together as one job, and the workers that run them.

    QUEUED  --placed-->  RESERVING  --accepted-->  STARTING  --accepted-->  RUNNING  <---+
       ^                    |  (local: straight to RUNNING)    |                |  |     | accepted
       +----- no room ------+------------- no room ------------+---- failed ----+  |  RESERVING
       |                                                       withdrawn ^ offered  |     ^ placed
       +-------------------- failed, or no consumer ------------------ FINDING_CONSUMER --+

The decode worker reserves first: it alone knows its free capacity, and only then does a prefill worker begin. A job
group is FINDING_CONSUMER while a worker offers its KV and no worker pulls it yet: a prefill worker whose decode worker
was lost, or a decode worker that drains or is to move it, and keeps decoding until another has taken over. A move whose
target does not take over is withdrawn, and the group is RUNNING again.

A request begins as one job group. When its workers are lost, each choice that has tokens continues as a job group of
its own, and those without tokens stay together, because a job of several choices has no tokens yet.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
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


class JobGroupStep(Enum):
    """Events that move a job group from phase to phase."""

    PLACED = auto()
    BOOKED = auto()
    STARTED = auto()
    OFFERED = auto()
    WITHDRAWN = auto()
    NO_ROOM = auto()
    END = auto()


PHASE_TABLE: dict[tuple[JobGroupPhase, JobGroupStep], JobGroupPhase] = {
    (JobGroupPhase.QUEUED, JobGroupStep.PLACED): JobGroupPhase.RESERVING,
    (JobGroupPhase.QUEUED, JobGroupStep.END): JobGroupPhase.ENDED,
    (JobGroupPhase.FINDING_CONSUMER, JobGroupStep.PLACED): JobGroupPhase.RESERVING,
    (JobGroupPhase.FINDING_CONSUMER, JobGroupStep.WITHDRAWN): JobGroupPhase.RUNNING,
    (JobGroupPhase.FINDING_CONSUMER, JobGroupStep.NO_ROOM): JobGroupPhase.QUEUED,
    (JobGroupPhase.FINDING_CONSUMER, JobGroupStep.END): JobGroupPhase.ENDED,
    (JobGroupPhase.RESERVING, JobGroupStep.BOOKED): JobGroupPhase.STARTING,
    (JobGroupPhase.RESERVING, JobGroupStep.STARTED): JobGroupPhase.RUNNING,
    (JobGroupPhase.RESERVING, JobGroupStep.OFFERED): JobGroupPhase.FINDING_CONSUMER,
    (JobGroupPhase.RESERVING, JobGroupStep.NO_ROOM): JobGroupPhase.QUEUED,
    (JobGroupPhase.RESERVING, JobGroupStep.END): JobGroupPhase.ENDED,
    (JobGroupPhase.STARTING, JobGroupStep.STARTED): JobGroupPhase.RUNNING,
    (JobGroupPhase.STARTING, JobGroupStep.NO_ROOM): JobGroupPhase.QUEUED,
    (JobGroupPhase.STARTING, JobGroupStep.END): JobGroupPhase.ENDED,
    (JobGroupPhase.RUNNING, JobGroupStep.OFFERED): JobGroupPhase.FINDING_CONSUMER,
    (JobGroupPhase.RUNNING, JobGroupStep.NO_ROOM): JobGroupPhase.QUEUED,
    (JobGroupPhase.RUNNING, JobGroupStep.END): JobGroupPhase.ENDED,
}


@dataclass(eq=False, slots=True)
class WorkerJob:
    """A job that was submitted to a worker and has not ended.

    `choices`: those about which the job may still send events. `is_handed_off`: another worker has read its KV, so the
    loss of this job has no effect.
    """

    worker: WorkerRef
    job: Job
    choices: set[int]
    is_handed_off: bool = False

    def key_of(self, choice: int) -> JobKey:
        return JobKey(self.job.request.id, self.job.attempt, choice)

    @property
    def keys(self) -> tuple[JobKey, ...]:
        """Return the keys of the choices about which the job may still send events, in order."""
        return tuple(map(self.key_of, sorted(self.choices)))


@dataclass(frozen=True, slots=True)
class KVOffer:
    """An offer of a job group's KV that no worker has read yet.

    `prefill`: the job that computes the KV; None if a decode worker offers it and keeps decoding.
    """

    worker: WorkerRef
    offer: HandoffKey
    prefill: PrefillJob | None = None


class JobGroup:
    """Hold the choices that run as one job, and the open jobs of the workers that run them (`works`).

    - `unanswered`: the submitted job that its worker has neither accepted nor rejected; None without one.
    - `source`: the KV offer that no worker has read yet; None without one.
    - `num_fruitless`: attempts that failed since the last progress, which is a token with the index `progress_at` or a
      later one.
    - `num_retries`: retries and migrations so far.
    - `prefix`: the remote prefix of the last placement.
    - `unfit`: workers that failed to take over the offered KV and are not tried again.
    - `target`: the worker to which the gateway moves the group; None when it stays, and while its worker drains.
    - `progress`: progress of the last placement: FIRST before any token, HANDOVER while only the prefill worker has
      sampled a token for another worker, DECODE from then on.
    """

    __slots__ = (
        "choices",
        "num_fruitless",
        "num_retries",
        "phase",
        "prefix",
        "progress",
        "progress_at",
        "source",
        "target",
        "unanswered",
        "unfit",
        "works",
    )  # fmt: skip

    def __init__(self, choices: Iterable[int], num_fruitless: int = 0, num_retries: int = 0) -> None:
        self.choices = set(choices)
        self.phase = JobGroupPhase.QUEUED
        self.works: list[WorkerJob] = []
        self.unanswered: WorkerJob | None = None
        self.source: KVOffer | None = None
        self.prefix: RemotePrefix | None = None
        self.target: WorkerRef | None = None
        self.unfit: set[WorkerRef] = set()
        self.num_fruitless = num_fruitless
        self.num_retries = num_retries
        self.progress_at = 0
        self.progress = LedgerPhase.FIRST

    @property
    def ledger_phase(self) -> LedgerPhase:
        """Return the phase to which the group's time counts in the request's `PhaseLedger`.

        A group that has sampled tokens still counts as decoding while the gateway searches or reserves a worker that
        takes over.
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
        """Change `phase` by a step, as PHASE_TABLE defines.

        Raises RuntimeError, and changes nothing, for a step that the table does not list.
        """
        if (self.phase, step) not in PHASE_TABLE:
            raise RuntimeError(f"{self!r} cannot take {step.name}")
        self.phase = PHASE_TABLE[self.phase, step]

    def find(self, worker: WorkerRef, attempt: int) -> WorkerJob | None:
        """Return the open job of this attempt at a worker; None when there is none."""
        for work in self.works:
            if work.job.attempt == attempt and work.worker == worker:
                return work
        return None

    def at(self, worker: WorkerRef) -> list[WorkerJob]:
        """Return the open jobs at a worker."""
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
        """Return whether a choice may still progress: a worker may send events about it or offers its KV, or the group
        is queued."""
        offered = (
            self.phase is JobGroupPhase.FINDING_CONSUMER and self.source is not None and self.source.prefill is not None
        )
        return offered or self.phase is JobGroupPhase.QUEUED or any(choice in work.choices for work in self.works)

    def note_token(self, index: int) -> None:
        """Record that the client has the token `index`; resets `num_fruitless` if it is at `progress_at` or later."""
        if index >= self.progress_at:
            self.num_fruitless = 0

    def streamed(self, work: WorkerJob, index: int) -> None:
        """Record a token that a job sampled and that the client has: `drew` and `note_token` in one call, for speed."""
        if self.progress is not LedgerPhase.DECODE:
            self.drew(work, index)
        if index >= self.progress_at:
            self.num_fruitless = 0

    def drew(self, work: WorkerJob, index: int) -> None:
        """Record that a job sampled the token `index`, and update `progress`.

        The first token of a job that takes over repeats the last one sampled elsewhere, so it does not show that the
        worker decodes.
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

    @property
    def is_kv_offered(self) -> bool:
        """Return whether a worker may take over the group's KV: a prefill worker offers it, or a decode worker that
        still samples. A decode worker that has ended has handed its KV over."""
        return self.source is not None and (self.source.prefill is not None or self.is_source_open)

    def split(self, choice: int) -> JobGroup:
        """Move a choice to a new job group in the same phase, and return that group.

        Each job with this choice is divided between the two groups.
        """
        part = JobGroup((choice,), self.num_fruitless, self.num_retries)
        part.phase, part.progress_at = self.phase, self.progress_at
        part.prefix, part.progress = self.prefix, self.progress
        self.choices.discard(choice)
        for work in [work for work in self.works if choice in work.choices]:
            part.works.append(WorkerJob(work.worker, work.job, {choice}, work.is_handed_off))
            self.leave(work, choice)
        return part

    def divide(self, num_tokens: Mapping[int, int]) -> list[JobGroup]:
        """Return the job groups in which the choices continue after their workers are gone.

        Each choice that has tokens continues alone. The others stay together as far as no other choice lies between
        them, because a job covers consecutive choices. `num_tokens`: tokens of each choice of the request that has not
        ended.
        """
        groups: list[list[int]] = []
        previous: int | None = None
        for index in sorted(num_tokens):
            is_free = index in self.choices and not num_tokens[index]
            if index in self.choices:
                if is_free and previous is not None:
                    groups[-1].append(index)
                else:
                    groups.append([index])
            previous = index if is_free else None
        if len(groups) == 1:
            return [self]
        return [JobGroup(group, self.num_fruitless, self.num_retries) for group in groups]

    def take(self, offer: HandoffKey, consumer: WorkerJob) -> bool:
        """Record that `consumer` has read all KV of `offer`, and mark the group's other jobs as handed off.

        Returns whether this was a migration, because the KV came from a decode worker. Does nothing where `offer` is
        not the group's current offer.
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
