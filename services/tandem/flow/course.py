"""Who works on a request: its strands, their jobs and hand-offs; never hears an event and never tells the client.

Attempt numbers are drawn from one counter, so a job that is placed anew has one that no job before it had, and a
message counts when the worker's open job has that very attempt.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TypedDict

from tandem.core.errors import ErrorKind
from tandem.core.ids import HandoffId, HandoffKey, JobKey, WorkerRef
from tandem.core.request import Generate, Job, Prefill, RemotePrefix, Request, Resume
from tandem.flow.choice import Choice
from tandem.flow.commands import CancelJob, Command, Place, ReleaseLease, Seek, Submit
from tandem.flow.ledger import LedgerPhase
from tandem.flow.retry import FULL
from tandem.flow.strand import Phase, Source, Step, Strand, Work
from tandem.routing.placement import Placement


class Course:
    """`choices` are those that have not ended, in the hands of their owner. `num_moves`: how often at most one of them
    went on elsewhere."""

    def __init__(self, request: Request, handoff: HandoffId, choices: Mapping[int, Choice]) -> None:
        self.num_moves = 0
        whole = Strand(choices)
        self.strands = [whole]
        self._request = request
        self._handoff = handoff
        self._choices = choices
        self._strand_of = dict.fromkeys(choices, whole)
        self._attempt = 0

    @property
    def phase(self) -> Phase:
        """The earliest of its strands', of which there mostly is one."""
        if len(self.strands) == 1:
            return self.strands[0].phase
        return min((strand.phase for strand in self.strands), key=lambda phase: phase.value)

    @property
    def ledger_phase(self) -> LedgerPhase:
        """Where its time goes: the request decodes for as long as one of its choices does."""
        if len(self.strands) == 1:
            return self.strands[0].ledger_phase
        return max((strand.ledger_phase for strand in self.strands), default=LedgerPhase.DELIVER)

    @property
    def key(self) -> JobKey:
        """Of the first job that is open, for people."""
        works = [work for strand in self.strands for work in strand.works]
        return works[0].job.key if works else JobKey(self._request.id, self._attempt, min(self._choices, default=0))

    def workers(self) -> tuple[WorkerRef, ...]:
        return tuple(dict.fromkeys(work.worker for strand in self.strands for work in strand.works))

    def keys(self, worker: WorkerRef) -> list[JobKey]:
        """What is open at a worker."""
        return [key for strand in self.strands for work in strand.at(worker) for key in work.keys]

    def seeks(self) -> list[Seek]:
        return [_seek(strand) for strand in self.strands if strand.phase is Phase.SEEKING]

    def of(self, choice: int) -> Strand | None:
        """The strand of a choice that has not ended."""
        return self._strand_of.get(choice)

    def is_open(self, worker: WorkerRef, attempt: int) -> bool:
        """A job of this attempt is open at a worker, whatever choices of it have ended."""
        return any(strand.find(worker, attempt) is not None for strand in self.strands)

    def asking(self, worker: WorkerRef, key: JobKey) -> Strand | None:
        """The strand that waits for this worker's answer to this job."""
        for strand in self.strands:
            if strand.asked is not None and strand.asked.worker == worker and strand.asked.job.key == key:
                return strand
        return None

    # ---- to workers

    def begin(self, strand: Strand, placement: Placement) -> list[Command]:
        """From the tokens that the client has."""
        strand.move(Step.PLACED)
        strand.drawn = LedgerPhase.FIRST
        first = min(strand.choices)
        job = Generate(
            request=self._request,
            attempt=self._next_attempt(),
            choice=first,
            num_choices=max(strand.choices) + 1 - first,
            output_tokens=tuple(self._choices[first].tokens),
            prefix=self._prefix(placement, first),
        )
        # That a prompt was computed says nothing of whether its KV can be handed over.
        strand.progress_at = len(job.output_tokens) + placement.is_remote
        strand.prefix = job.prefix
        if placement.is_remote:
            # Strands may be at one worker, where a newer attempt at a hand-off ends the older ones.
            handoff = HandoffId(f"{self._handoff}/{first}")
            return self._submit(
                strand, placement.decode, Resume(**_facts(job), handoff=handoff, source=placement.prefill)
            )
        return self._submit(strand, placement.decode, job)

    def take_over(self, strand: Strand, source: Source, worker: WorkerRef) -> list[Command]:
        """A worker is to go on with what is offered: with what was prefilled just as that was asked for."""
        strand.move(Step.PLACED)
        first = min(strand.choices)
        known = Generate(
            request=self._request, attempt=1, choice=first, output_tokens=tuple(self._choices[first].tokens)
        )
        facts = _facts(known if source.prefill is None else source.prefill)
        facts["attempt"] = self._next_attempt()
        offer = source.offer
        job = Resume(**facts, handoff=offer.handoff, source=source.worker, offer_attempt=offer.attempt)
        return self._submit(strand, worker, job)

    def accepted(self, strand: Strand) -> list[Command]:
        """The job that was asked for was taken."""
        assert strand.asked is not None
        job, strand.asked = strand.asked.job, None
        if isinstance(job, Resume) and not job.offer_attempt:
            strand.move(Step.BOOKED)
            prefill = Prefill(**_facts(job), handoff=job.handoff, prefix=strand.prefix)
            strand.source = Source(job.source, prefill.offer, prefill)
            return self._submit(strand, job.source, prefill)
        strand.move(Step.STARTED)
        return []

    def done(self, strand: Strand, work: Work, choice: int) -> list[Command]:
        """A job has nothing more to say on a choice: the last that was asked for had been taken, whenever the answer to
        its Submit comes."""
        out = self.accepted(strand) if strand.asked is work and strand.phase is Phase.STARTING else []
        strand.leave(work, choice)
        return out

    def undo(self, strand: Strand) -> list[Command]:
        """End what is still open at workers; a lease outlives its prefill job, so it is released by name."""
        out: list[Command] = [CancelJob(work.worker, work.keys) for work in strand.works]
        if strand.source is not None:
            out.append(ReleaseLease(strand.source.worker, strand.source.offer))
        strand.clear()
        return out

    # ---- what becomes of strands

    def requeue(self, strand: Strand, place: Place) -> list[Command]:
        """Back to the line. Tokens that the client has stay its own: the next attempt draws those that follow."""
        out = self.undo(strand)
        strand.move(Step.NO_ROOM)
        self._replace(strand, strand.divide({index: choice.next_index for index, choice in self._choices.items()}))
        return [*out, place]

    def offered(self, strand: Strand, choice: int, work: Work, offer: HandoffKey) -> list[Command]:
        """A worker that drains draws on while one choice is sought another, by itself."""
        source = Source(work.worker, offer)
        if work.has_given or strand.source == source:
            return []
        if strand.asked is not None and (strand.asked is work or strand.phase is Phase.STARTING):
            # Who offers has begun: it has taken its job, and so has who computed for it, whatever they answer later.
            self.accepted(strand)
        if len(strand.choices) > 1:
            part = strand.split(choice)
            self._replace(strand, (strand, part))
            strand = part
        strand.source = source
        if strand.phase is Phase.RUNNING:
            strand.move(Step.OFFERED)
        return [_seek(strand)] if strand.phase is Phase.SEEKING else []

    def pulled(self, worker: WorkerRef, attempt: int) -> bool:
        """A worker has what it was to take. False: it has no such job."""
        has_pulled = False
        for strand in self.strands:
            work = strand.find(worker, attempt)
            if work is not None and isinstance(work.job, Resume):
                # The word of it may come before the answer that the job was taken.
                if strand.take(work.job.offer, work):
                    self.count_move(strand)
                has_pulled = True
        return has_pulled

    def seek_another(self, strand: Strand, worker: WorkerRef, why: ErrorKind) -> list[Command]:
        """Who was to take does not, and what is offered is there still. Only one that was full is asked again."""
        if why not in FULL or why is ErrorKind.WORKER_LOST:
            strand.unfit.add(worker)
        strand.asked = None
        strand.move(Step.OFFERED)
        return [_seek(strand, {worker})]

    def note_scores(self) -> None:
        """The client has scores of the prompt that it had not."""
        for strand in self.strands:
            strand.num_fruitless = 0

    def count_move(self, strand: Strand) -> None:
        strand.num_moves += 1
        self.num_moves = max(self.num_moves, strand.num_moves)

    def close(self, choice: int) -> list[Command]:
        """One choice has ended: nobody is to work on it."""
        strand = self._strand_of.pop(choice)
        strand.choices.discard(choice)
        if not strand.choices:
            out = self.undo(strand)
            self._replace(strand, ())
            return out
        works = [work for work in strand.works if choice in work.choices]
        for work in works:
            strand.leave(work, choice)
        return [CancelJob(work.worker, (work.key_of(choice),)) for work in works]

    def end(self) -> list[Command]:
        """All of it, for good."""
        out = [command for strand in self.strands for command in self.undo(strand)]
        for strand in self.strands:
            strand.move(Step.END)
        return out

    # ---- inside

    def _prefix(self, placement: Placement, first: int) -> RemotePrefix | None:
        """A loan has a name of its own: who computes offers the KV under another."""
        if placement.prefix is None:
            return None
        handoff = HandoffId(f"{self._handoff}/{first}/prefix")
        return RemotePrefix(handoff=handoff, source=placement.prefix.worker, num_blocks=placement.prefix.num_blocks)

    def _next_attempt(self) -> int:
        self._attempt += 1
        return self._attempt

    def _submit(self, strand: Strand, worker: WorkerRef, job: Job) -> list[Command]:
        """A job covers neighbours; those of them that have ended are cancelled, whichever of the two comes first."""
        strand.asked = Work(worker, job, set(strand.choices))
        strand.works.append(strand.asked)
        ended = tuple(key for key in job.keys if key.choice not in strand.choices)
        return [Submit(worker, job), *([CancelJob(worker, ended)] if ended else [])]

    def _replace(self, strand: Strand, parts: Iterable[Strand]) -> None:
        """A strand becomes several, which may be none."""
        parts = tuple(parts)
        where = self.strands.index(strand)
        self.strands[where : where + 1] = parts
        self._strand_of |= {index: part for part in parts for index in part.choices}


class _Facts(TypedDict):
    request: Request
    attempt: int
    choice: int
    num_choices: int
    output_tokens: tuple[int, ...]


def _facts(job: Job) -> _Facts:
    """What the jobs of one attempt have in common."""
    return _Facts(
        request=job.request,
        attempt=job.attempt,
        choice=job.choice,
        num_choices=job.num_choices,
        output_tokens=job.output_tokens,
    )


def _seek(strand: Strand, excluded: Iterable[WorkerRef] = ()) -> Seek:
    assert strand.source is not None
    return Seek(min(strand.choices), strand.source.worker, frozenset(excluded), frozenset(strand.unfit))
