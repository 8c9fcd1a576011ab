"""Choices of one request that go on together as one job, and who works on them; never says what a worker is told.

    QUEUED  --placed-->  BOOKING  --accepted-->  STARTING  --accepted-->  RUNNING  <---+
       ^                    |  (local: straight to RUNNING)  |                |  |     | accepted
       +----- no room ------+------------- no room ----------+---- failed ----+  |  BOOKING
       |                                                                offered  |     ^ placed
       +-------------------- failed, or no taker --------------------------- SEEKING --+

The decode worker books first: it alone knows whether it has room, and only then does a prefill worker begin. A strand
seeks while somebody offers its KV and nobody takes it yet: a prefill worker whose decode worker was lost, or a worker
that drains and decodes on until another has taken over.

A request begins as one strand. When its workers are lost, each choice that has tokens goes on as a strand of its own,
and those without stay together: a job of several choices has no tokens yet.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum, auto

from tandem.core.ids import HandoffKey, JobKey, WorkerRef
from tandem.core.request import Generate, Job, Prefill, RemotePrefix, Resume
from tandem.flow.ledger import LedgerPhase


class Phase(Enum):
    QUEUED = auto()
    SEEKING = auto()
    BOOKING = auto()
    STARTING = auto()
    RUNNING = auto()
    ENDED = auto()


class Step(Enum):
    """What moves a strand from phase to phase."""

    PLACED = auto()
    BOOKED = auto()
    STARTED = auto()
    OFFERED = auto()
    NO_ROOM = auto()
    END = auto()


PHASE_TABLE: dict[tuple[Phase, Step], Phase] = {
    (Phase.QUEUED, Step.PLACED): Phase.BOOKING,
    (Phase.QUEUED, Step.END): Phase.ENDED,
    (Phase.SEEKING, Step.PLACED): Phase.BOOKING,
    (Phase.SEEKING, Step.NO_ROOM): Phase.QUEUED,
    (Phase.SEEKING, Step.END): Phase.ENDED,
    (Phase.BOOKING, Step.BOOKED): Phase.STARTING,
    (Phase.BOOKING, Step.STARTED): Phase.RUNNING,
    (Phase.BOOKING, Step.OFFERED): Phase.SEEKING,
    (Phase.BOOKING, Step.NO_ROOM): Phase.QUEUED,
    (Phase.BOOKING, Step.END): Phase.ENDED,
    (Phase.STARTING, Step.STARTED): Phase.RUNNING,
    (Phase.STARTING, Step.NO_ROOM): Phase.QUEUED,
    (Phase.STARTING, Step.END): Phase.ENDED,
    (Phase.RUNNING, Step.OFFERED): Phase.SEEKING,
    (Phase.RUNNING, Step.NO_ROOM): Phase.QUEUED,
    (Phase.RUNNING, Step.END): Phase.ENDED,
}


@dataclass(eq=False, slots=True)
class Work:
    """A job at a worker. `choices` are those of which it may still have something to say. `has_given`: another worker
    has its KV, so it is not missed."""

    worker: WorkerRef
    job: Job
    choices: set[int]
    has_given: bool = False

    def key_of(self, choice: int) -> JobKey:
        return JobKey(self.job.request.id, self.job.attempt, choice)

    @property
    def keys(self) -> tuple[JobKey, ...]:
        """Of the choices that are open here."""
        return tuple(map(self.key_of, sorted(self.choices)))


@dataclass(frozen=True, slots=True)
class Source:
    """Who offers a strand's KV, which nobody has taken yet: the `prefill` that computes it, or, None, a worker that
    drains and goes on meanwhile."""

    worker: WorkerRef
    offer: HandoffKey
    prefill: Prefill | None = None


class Strand:
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
        self.phase = Phase.QUEUED
        self.works: list[Work] = []
        self.asked: Work | None = None
        self.source: Source | None = None
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
            case Phase.ENDED:
                return LedgerPhase.DELIVER
            case Phase.QUEUED:
                return LedgerPhase.QUEUE
            case Phase.BOOKING | Phase.STARTING if self.drawn is LedgerPhase.FIRST:
                return LedgerPhase.ROUTE
        return self.drawn

    def move(self, step: Step) -> None:
        """Raises RuntimeError for what the table does not list, and changes nothing."""
        if (self.phase, step) not in PHASE_TABLE:
            raise RuntimeError(f"{self!r} cannot take {step.name}")
        self.phase = PHASE_TABLE[self.phase, step]

    def find(self, worker: WorkerRef, attempt: int) -> Work | None:
        """Its open job of this very attempt at a worker."""
        for work in self.works:
            if work.job.attempt == attempt and work.worker == worker:
                return work
        return None

    def at(self, worker: WorkerRef) -> list[Work]:
        """What is open at a worker."""
        return [work for work in self.works if work.worker == worker]

    def leave(self, work: Work, choice: int) -> None:
        """A job has nothing more to say on a choice."""
        work.choices.discard(choice)
        if not work.choices:
            self.drop(work)

    def drop(self, work: Work) -> None:
        self.works.remove(work)
        if self.asked is work:
            self.asked = None

    def is_worked_on(self, choice: int) -> bool:
        """Somebody may still say something on a choice, or offers its KV."""
        offered = self.phase is Phase.SEEKING and self.source is not None and self.source.prefill is not None
        return offered or self.phase is Phase.QUEUED or any(choice in work.choices for work in self.works)

    def note_token(self, index: int) -> None:
        """The client has a token that it had not."""
        if index >= self.progress_at:
            self.num_fruitless = 0

    def streamed(self, work: Work, index: int) -> None:
        """Both `drew` and `note_token`, for what happens most."""
        if self.drawn is not LedgerPhase.DECODE:
            self.drew(work, index)
        if index >= self.progress_at:
            self.num_fruitless = 0

    def drew(self, work: Work, index: int) -> None:
        """A token came of a job. Who takes over repeats the one that was drawn elsewhere."""
        job = work.job
        if isinstance(job, Generate) or (isinstance(job, Resume) and index > len(job.output_tokens)):
            self.drawn = LedgerPhase.DECODE
        elif self.drawn is LedgerPhase.FIRST:
            self.drawn = LedgerPhase.HANDOVER

    @property
    def is_source_open(self) -> bool:
        """Somebody offers its KV who draws its tokens meanwhile."""
        return self.source is not None and self.source.prefill is None and bool(self.at(self.source.worker))

    def split(self, choice: int) -> Strand:
        """A choice goes its own way: another strand gets its part of every job."""
        part = Strand((choice,), self.num_fruitless, self.num_moves)
        part.phase, part.progress_at = self.phase, self.progress_at
        part.prefix, part.drawn = self.prefix, self.drawn
        self.choices.discard(choice)
        for work in [work for work in self.works if choice in work.choices]:
            part.works.append(Work(work.worker, work.job, {choice}, work.has_given))
            self.leave(work, choice)
        return part

    def divide(self, num_tokens: Mapping[int, int]) -> list[Strand]:
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
        return [Strand(group, self.num_fruitless, self.num_moves) for group in groups]

    def take(self, offer: HandoffKey, by: Work) -> bool:
        """A job has all that was offered: whoever else works on it is not missed. True: from one that drains. Nothing
        where something else is offered now."""
        if self.source is None or self.source.offer != offer:
            return False
        has_moved = self.source.prefill is None
        for other in self.works:
            other.has_given = other is not by
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
