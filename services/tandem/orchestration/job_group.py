"""Choices of one request that go on together as one job, and who works on them; never says what a worker is told.

    QUEUED  --placed-->  BOOKING  --accepted-->  STARTING  --accepted-->  RUNNING  <---+
       ^                    |  (local: straight to RUNNING)  |                |  |     | accepted
       +----- no room ------+------------- no room ----------+---- failed ----+  |  BOOKING
       |                                                                offered  |     ^ placed
       +-------------------- failed, or no consumer --------------------------- SEEKING --+

The decode worker books first: it alone knows whether it has room, and only then does a prefill worker begin. A job
group seeks while somebody offers its KV and nobody takes it yet: a prefill worker whose decode worker was lost, or a
worker that drains and decodes on until another has taken over.

A request begins as one job group. When its workers are lost, each choice that has tokens goes on as a job group of its
own, and those without stay together: a job of several choices has no tokens yet.
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
    """What moves a job group from phase to phase."""

    PLACED = auto()
    BOOKED = auto()
    STARTED = auto()
    OFFERED = auto()
    NO_ROOM = auto()
    END = auto()


PHASE_TABLE: dict[tuple[JobGroupPhase, JobGroupStep], JobGroupPhase] = {
    (JobGroupPhase.QUEUED, JobGroupStep.PLACED): JobGroupPhase.RESERVING,
    (JobGroupPhase.QUEUED, JobGroupStep.END): JobGroupPhase.ENDED,
    (JobGroupPhase.FINDING_CONSUMER, JobGroupStep.PLACED): JobGroupPhase.RESERVING,
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
    """A job at a worker. `choices` are those of which it may still have something to say. `is_handed_off`: another
    worker has its KV, so it is not missed."""

    worker: WorkerRef
    job: Job
    choices: set[int]
    is_handed_off: bool = False

    def key_of(self, choice: int) -> JobKey:
        return JobKey(self.job.request.id, self.job.attempt, choice)

    @property
    def keys(self) -> tuple[JobKey, ...]:
        """Of the choices that are open here."""
        return tuple(map(self.key_of, sorted(self.choices)))


@dataclass(frozen=True, slots=True)
class KVOffer:
    """Who offers a job group's KV, which nobody has taken yet: the `prefill` that computes it, or, None, a worker that
    drains and goes on meanwhile."""

    worker: WorkerRef
    offer: HandoffKey
    prefill: PrefillJob | None = None


class JobGroup:
    """`asked` is the job of which it is not known whether its worker takes it. `num_fruitless`: attempts that failed
    since the last progress, which is a token with the index `progress_at` or a later one; `num_moves`: times that it
    went on elsewhere. `prefix`: what who computes its prompt is to read, as it was placed last. `unfit` workers have
    failed to take over. `drawn`: what came of its last placement: FIRST before any token, HANDOVER while only who
    computes its prompt for another has drawn one, DECODE from then on."""

    __slots__ = (
        "asked", "choices", "drawn", "num_fruitless", "num_moves", "phase", "prefix", "progress_at", "source", "unfit",
        "works",
    )  # fmt: skip

    def __init__(self, choices: Iterable[int], num_fruitless: int = 0, num_moves: int = 0) -> None:
        self.choices = set(choices)
        self.phase = JobGroupPhase.QUEUED
        self.works: list[WorkerJob] = []
        self.asked: WorkerJob | None = None
        self.source: KVOffer | None = None
        self.prefix: RemotePrefix | None = None
        self.unfit: set[WorkerRef] = set()
        self.num_fruitless = num_fruitless
        self.num_moves = num_moves
        self.progress_at = 0
        self.drawn = LedgerPhase.FIRST

    @property
    def ledger_phase(self) -> LedgerPhase:
        """Where its time goes. One that has drawn does so while others are asked to take over."""
        match self.phase:
            case JobGroupPhase.ENDED:
                return LedgerPhase.DELIVER
            case JobGroupPhase.QUEUED:
                return LedgerPhase.QUEUE
            case JobGroupPhase.RESERVING | JobGroupPhase.STARTING if self.drawn is LedgerPhase.FIRST:
                return LedgerPhase.ROUTE
        return self.drawn

    def move(self, step: JobGroupStep) -> None:
        """Raises RuntimeError for what the table does not list, and changes nothing."""
        if (self.phase, step) not in PHASE_TABLE:
            raise RuntimeError(f"{self!r} cannot take {step.name}")
        self.phase = PHASE_TABLE[self.phase, step]

    def find(self, worker: WorkerRef, attempt: int) -> WorkerJob | None:
        """Its open job of this very attempt at a worker."""
        for work in self.works:
            if work.job.attempt == attempt and work.worker == worker:
                return work
        return None

    def at(self, worker: WorkerRef) -> list[WorkerJob]:
        """What is open at a worker."""
        return [work for work in self.works if work.worker == worker]

    def leave(self, work: WorkerJob, choice: int) -> None:
        """A job has nothing more to say on a choice."""
        work.choices.discard(choice)
        if not work.choices:
            self.drop(work)

    def drop(self, work: WorkerJob) -> None:
        self.works.remove(work)
        if self.asked is work:
            self.asked = None

    def is_worked_on(self, choice: int) -> bool:
        """Somebody may still say something on a choice, or offers its KV."""
        offered = (
            self.phase is JobGroupPhase.FINDING_CONSUMER and self.source is not None and self.source.prefill is not None
        )
        return offered or self.phase is JobGroupPhase.QUEUED or any(choice in work.choices for work in self.works)

    def note_token(self, index: int) -> None:
        """The client has a token that it had not."""
        if index >= self.progress_at:
            self.num_fruitless = 0

    def streamed(self, work: WorkerJob, index: int) -> None:
        """Both `drew` and `note_token`, for what happens most."""
        if self.drawn is not LedgerPhase.DECODE:
            self.drew(work, index)
        if index >= self.progress_at:
            self.num_fruitless = 0

    def drew(self, work: WorkerJob, index: int) -> None:
        """A token came of a job. Who takes over repeats the one that was drawn elsewhere."""
        job = work.job
        if isinstance(job, GenerateJob) or (isinstance(job, ResumeJob) and index > len(job.output_tokens)):
            self.drawn = LedgerPhase.DECODE
        elif self.drawn is LedgerPhase.FIRST:
            self.drawn = LedgerPhase.HANDOVER

    @property
    def is_source_open(self) -> bool:
        """Somebody offers its KV who draws its tokens meanwhile."""
        return self.source is not None and self.source.prefill is None and bool(self.at(self.source.worker))

    def split(self, choice: int) -> JobGroup:
        """A choice goes its own way: another job group gets its part of every job."""
        part = JobGroup((choice,), self.num_fruitless, self.num_moves)
        part.phase, part.progress_at = self.phase, self.progress_at
        part.prefix, part.drawn = self.prefix, self.drawn
        self.choices.discard(choice)
        for work in [work for work in self.works if choice in work.choices]:
            part.works.append(WorkerJob(work.worker, work.job, {choice}, work.is_handed_off))
            self.leave(work, choice)
        return part

    def divide(self, num_tokens: Mapping[int, int]) -> list[JobGroup]:
        """What it goes on as, with nobody at work: each choice that has tokens alone, and the others together as far as
        no choice lies between them that goes otherwise, because a job covers neighbours. `num_tokens`: of each choice
        of the request that has not ended."""
        groups: list[list[int]] = []
        before: int | None = None
        for index in sorted(num_tokens):
            is_free = index in self.choices and not num_tokens[index]
            if index in self.choices:
                if is_free and before is not None:
                    groups[-1].append(index)
                else:
                    groups.append([index])
            before = index if is_free else None
        if len(groups) == 1:
            return [self]
        return [JobGroup(group, self.num_fruitless, self.num_moves) for group in groups]

    def take(self, offer: HandoffKey, by: WorkerJob) -> bool:
        """A job has all that was offered: whoever else works on it is not missed. True: from one that drains. Nothing
        where something else is offered now."""
        if self.source is None or self.source.offer != offer:
            return False
        has_moved = self.source.prefill is None
        for other in self.works:
            other.is_handed_off = other is not by
        self.source = None
        self.unfit.clear()
        return has_moved

    def clear(self) -> None:
        """Nobody works on it."""
        self.works.clear()
        self.asked = self.source = None
        self.unfit.clear()

    def __repr__(self) -> str:
        works = [f"{type(work.job).__name__}#{work.job.attempt} at {work.worker.id}" for work in self.works]
        return f"<choices {sorted(self.choices)} {self.phase.name}, {works}>"
