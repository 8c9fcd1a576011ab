"""One request's life from its admission to its one end; never does I/O and never reads a clock.

Its choices go as one job or as several, each with its own phase (`flow.strand`). Every choice has its own tokens and
its own end, and the client may have enough of one before the others; the request ends with the last. What its workers
lose goes on elsewhere from the tokens that the client has, for as long as something comes of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypedDict

from tandem.core.errors import ErrorKind, TandemError
from tandem.core.events import Cancelled, Failed, Finished, JobEvent, Moving, PromptScored, Pulled, Token
from tandem.core.ids import HandoffId, JobKey, WorkerRef
from tandem.core.request import Generate, Job, Prefill, Request, Resume
from tandem.flow.choice import Choice
from tandem.flow.commands import (
    Blame,
    CancelJob,
    Command,
    Deliver,
    End,
    EndChoice,
    Place,
    ReleaseLease,
    Score,
    Seek,
    Submit,
)
from tandem.flow.receipt import Receipt
from tandem.flow.retry import BLAMED, ELSEWHERE, FULL, given_up
from tandem.flow.strand import Phase, Source, Step, Strand, Work
from tandem.routing.placement import Placement


class RequestLife:
    """All that decides one request. Every method returns what is to be done, in order; after the end, nothing.

    `max_retries` attempts may fail one after the other without a new token or score for the client.
    """

    def __init__(self, request: Request, handoff: HandoffId, max_retries: int = 4) -> None:
        self.request = request
        self.placement: Placement | None = None
        self.pulled: Pulled | None = None
        self.num_moves = 0
        self._handoff = handoff
        self._max_retries = max_retries
        self._attempt = 0
        self._has_ended = False
        self._receipt = Receipt(request)
        whole = Strand(self._choices)
        self._strands = [whole]
        self._strand_of = dict.fromkeys(self._choices, whole)

    @property
    def phase(self) -> Phase:
        """The earliest of its strands."""
        if self._has_ended:
            return Phase.ENDED
        return min((strand.phase for strand in self._strands), key=lambda phase: phase.value)

    @property
    def key(self) -> JobKey:
        """Of the first job that is open, for logs and tests."""
        works = [work for strand in self._strands for work in strand.works]
        return works[0].job.key if works else JobKey(self.request.id, self._attempt, min(self._choices, default=0))

    @property
    def path(self) -> str:
        """How it went, as the client is told; `moves`: how often it went on elsewhere."""
        path = "" if self.placement is None else self.placement.path
        return f"{path};moves={self.num_moves}" if self.num_moves else path

    @property
    def num_delivered(self) -> int:
        """Tokens the client has, of all choices."""
        return self._receipt.num_tokens

    @property
    def num_cached(self) -> int | None:
        """As `Receipt.num_cached`."""
        return self._receipt.num_cached

    def positions(self, worker: WorkerRef) -> list[tuple[JobKey, int]]:
        """The choices that a worker is to report on, and the index of each one's next token."""
        keys = [key for strand in self._strands for work in strand.at(worker) for key in work.keys]
        return [(key, self._choices[key.choice].next_index) for key in keys]

    def workers(self) -> tuple[WorkerRef, ...]:
        """Who works on it."""
        return tuple(dict.fromkeys(work.worker for strand in self._strands for work in strand.works))

    def seeks(self) -> list[Seek]:
        """What waits for a worker that takes over."""
        return [_seek(strand) for strand in self._strands if strand.phase is Phase.SEEKING]

    # ---- placing

    def placed(self, placement: Placement) -> list[Command]:
        """Its turn in the line has come: all that waits goes to the same workers."""
        queued = [strand for strand in self._strands if strand.phase is Phase.QUEUED]
        if not queued:
            raise RuntimeError(f"{self!r} cannot take PLACED")
        self.placement = placement
        return [command for strand in queued for command in self._begin(strand, placement)]

    def sought(self, choice: int, worker: WorkerRef | None) -> list[Command]:
        """The answer to a Seek; None: nobody can take over now. What drains goes on meanwhile, and is sought for
        again; what was only prefilled is computed anew."""
        strand = self._strand_of.get(choice)
        if strand is None or strand.phase is not Phase.SEEKING or strand.source is None:
            return []
        if worker is None:
            return self._requeue(strand, frozenset()) if strand.source.prefill is not None else []
        strand.move(Step.PLACED)
        prefill, offer = strand.source.prefill, strand.source.offer
        first = choice if prefill is None else prefill.choice
        job = Resume(
            request=self.request,
            attempt=self._next_attempt(),
            choice=first,
            num_choices=1 if prefill is None else prefill.num_choices,
            output_tokens=tuple(self._choices[first].tokens) if prefill is None else prefill.output_tokens,
            handoff=offer.handoff,
            source=strand.source.worker,
            offer_attempt=offer.attempt,
        )
        return self._submit(strand, worker, job)

    def accepted(self, worker: WorkerRef, key: JobKey) -> list[Command]:
        """A worker took the job that `key` names."""
        strand = self._asking(worker, key)
        if strand is None or strand.asked is None:
            return []
        job, strand.asked = strand.asked.job, None
        if isinstance(job, Resume) and not job.offer_attempt:
            strand.move(Step.BOOKED)
            return self._start(strand, job)
        if isinstance(job, Resume) and strand.is_source_open:
            self._count_move(strand)
        strand.move(Step.STARTED)
        return []

    def refused(self, worker: WorkerRef, key: JobKey, error: TandemError) -> list[Command]:
        """A worker did not take it, or cannot be reached: back to the queue. What waiting does not cure ends the
        request, but one that drains only asks another."""
        strand = self._asking(worker, key)
        if strand is None or strand.asked is None:
            return []
        work, undo = strand.asked, list[Command]()
        # Who could not be reached may have the job all the same: it is cancelled there with the rest.
        if error.kind is ErrorKind.WORKER_LOST:
            undo.append(Blame(frozenset({worker})))
        else:
            strand.drop(work)
            strand.source = None if isinstance(work.job, Prefill) else strand.source
        if strand.source is not None and strand.source.worker != worker and strand.phase is Phase.BOOKING:
            if work in strand.works:
                strand.drop(work)
                undo.append(CancelJob(worker, work.keys))
            return [*undo, *self._seek_another(strand, worker, error)]
        return [*undo, *self._go_on(strand, worker, error, is_attempt=error.kind not in FULL)]

    # ---- what workers report

    def reported(self, worker: WorkerRef, event: JobEvent) -> list[Command]:
        """A worker's word on a choice of this request. One that has no open job of it here has nothing to say; the
        prompt, and its KV, is that of the other choices too."""
        if isinstance(event, PromptScored):
            is_open = any(strand.find(worker, event.key.attempt) for strand in self._strands)
            return self._take_scores(event) if is_open else []
        if isinstance(event, Pulled):
            return self._take_pull(worker, event)
        strand = self._strand_of.get(event.key.choice)
        work = None if strand is None else strand.find(worker, event.key.attempt)
        if strand is None or work is None or event.key.choice not in work.choices:
            return []
        match event:
            case Token():
                self._choices[event.key.choice].take(event)
                return self._deliver(event.key.choice)
            case Moving():
                return self._take_offer(strand, work, event)
            case Finished():
                return self._take_finish(strand, work, event)
            case Failed():
                return self._take_failure(strand, work, event)
            case Cancelled():
                return self._take_cancel(strand, work, event.key.choice)

    def streamed(self, worker: WorkerRef, key: JobKey, first_index: int, ids: Sequence[int]) -> bool:
        """Tokens with neighbouring indices, as `reported` takes one. True: the client gets them all at once, as it
        nearly always does. Otherwise nothing has changed, and they are to be reported one by one."""
        strand = self._strand_of.get(key.choice)
        work = None if strand is None or not self._receipt.is_scored else strand.find(worker, key.attempt)
        if strand is None or work is None or key.choice not in work.choices:
            return False
        if not self._choices[key.choice].skip(first_index, ids):
            return False
        strand.num_fruitless = 0
        return True

    def worker_lost(self, worker: WorkerRef, reason: str) -> list[Command]:
        """A worker is gone. One that has handed everything over is not missed; before all workers have taken their
        jobs, nothing is lost but the place."""
        error = TandemError(ErrorKind.WORKER_LOST, f"worker {worker.id} was lost: {reason}")
        return [command for strand in list(self._strands) for command in self._lose(strand, worker, error)]

    def stalled(self, reason: str) -> list[Command]:
        """Its workers live and nothing comes of it: whoever works on it is taken for lost."""
        error = TandemError(ErrorKind.DEADLINE, reason)
        out: list[Command] = []
        for strand in [strand for strand in self._strands if strand.phase is not Phase.QUEUED]:
            workers = frozenset(work.worker for work in strand.works)
            if not self._has_ended:
                out += [Blame(workers), *self._fail(strand, workers, error)]
        return out

    # ---- what ends it from this side

    def cancelled(self) -> list[Command]:
        """The client is gone or has enough."""
        return self._end(TandemError(ErrorKind.CANCELLED, "cancelled by the client"))

    def finished(self, index: int) -> list[Command]:
        """The client has enough of one choice; nothing if that has ended."""
        if index not in self._choices:
            return []
        return self._close(index) if len(self._choices) > 1 else self.cancelled()

    def failed(self, error: TandemError) -> list[Command]:
        """A deadline, or an end of this side's own making."""
        return self._end(error)

    def __repr__(self) -> str:
        return f"<life {self.key} {self.phase.name} {self.num_delivered} tokens, {self._strands}>"

    # ---- inside: to workers

    @property
    def _choices(self) -> dict[int, Choice]:
        return self._receipt.choices

    def _next_attempt(self) -> int:
        self._attempt += 1
        return self._attempt

    def _asking(self, worker: WorkerRef, key: JobKey) -> Strand | None:
        """The strand that waits for this worker's answer to this job."""
        for strand in self._strands:
            if strand.asked is not None and strand.asked.worker == worker and strand.asked.job.key == key:
                return strand
        return None

    def _begin(self, strand: Strand, placement: Placement) -> list[Command]:
        strand.move(Step.PLACED)
        first = min(strand.choices)
        job: Job = Generate(
            request=self.request,
            attempt=self._next_attempt(),
            choice=first,
            num_choices=max(strand.choices) + 1 - first,
            output_tokens=tuple(self._choices[first].tokens),
        )
        if placement.is_remote:
            # Strands may be at one worker, where a newer attempt at a hand-off ends the older ones.
            handoff = HandoffId(f"{self._handoff}/{first}")
            job = Resume(**_facts(job), handoff=handoff, source=placement.prefill)
        return self._submit(strand, placement.decode, job)

    def _start(self, strand: Strand, booked: Resume) -> list[Command]:
        prefill = Prefill(**_facts(booked), handoff=booked.handoff)
        strand.source = Source(booked.source, prefill.offer, prefill)
        return self._submit(strand, booked.source, prefill)

    def _submit(self, strand: Strand, worker: WorkerRef, job: Job) -> list[Command]:
        """A job covers neighbours; those of them that have ended are cancelled, whichever of the two comes first."""
        strand.asked = Work(worker, job, set(strand.choices))
        strand.works.append(strand.asked)
        ended = tuple(key for key in job.keys if key.choice not in strand.choices)
        return [Submit(worker, job), *([CancelJob(worker, ended)] if ended else [])]

    def _undo(self, strand: Strand) -> list[Command]:
        """End what is still open at workers; a lease outlives its prefill job, so it is released by name."""
        out: list[Command] = [CancelJob(work.worker, work.keys) for work in strand.works]
        if strand.source is not None:
            out.append(ReleaseLease(strand.source.worker, strand.source.offer))
        strand.clear()
        return out

    # ---- inside: from workers

    def _take_scores(self, event: PromptScored) -> list[Command]:
        try:
            scores = self._receipt.take_scores(event)
        except TandemError as error:
            return self._end(error)
        if scores is None:
            return []
        for strand in self._strands:
            strand.num_fruitless = 0
        return [Score(scores), *(command for index in list(self._choices) for command in self._deliver(index))]

    def _take_pull(self, worker: WorkerRef, event: Pulled) -> list[Command]:
        for strand in self._strands:
            work = strand.find(worker, event.key.attempt)
            if work is not None and isinstance(work.job, Resume):
                self.pulled = event
                strand.take(work.job.offer, work)
        return []

    def _take_offer(self, strand: Strand, work: Work, event: Moving) -> list[Command]:
        """One choice moves by itself, while its worker draws on."""
        source = Source(work.worker, event.offer)
        if strand.asked is work and isinstance(work.job, Generate):
            self.accepted(work.worker, work.job.key)
        if work.has_given or strand.source == source or strand.phase is Phase.STARTING:
            return []
        if len(strand.choices) > 1:
            part = strand.split(event.key.choice)
            self._replace(strand, (strand, part))
            strand = part
        strand.source = source
        if strand.phase is Phase.RUNNING:
            strand.move(Step.OFFERED)
        return [_seek(strand)] if strand.phase is Phase.SEEKING else []

    def _take_finish(self, strand: Strand, work: Work, event: Finished) -> list[Command]:
        index = event.key.choice
        strand.leave(work, index)
        if event.reason is None:
            return self._if_forgotten(strand, index)
        self._choices[index].finish(event)
        return [*self._deliver(index), *self._if_forgotten(strand, index)]

    def _take_failure(self, strand: Strand, work: Work, event: Failed) -> list[Command]:
        strand.leave(work, event.key.choice)
        if work.has_given and self._receipt.is_scored:
            return []
        out: list[Command] = []
        error = TandemError(event.kind, event.message)
        if event.kind in BLAMED:
            giver = {strand.source.worker} if event.kind is ErrorKind.KV_LOST and strand.source is not None else set()
            out.append(Blame(frozenset({work.worker, *giver})))
        if strand.is_source_open:
            return [*out, *self._seek_another(strand, work.worker, error)]
        return [*out, *self._go_on(strand, work.worker, error)]

    def _take_cancel(self, strand: Strand, work: Work, index: int) -> list[Command]:
        """Nobody on this side asked for it. Who gives may have been released by who takes, whose word is to come."""
        strand.leave(work, index)
        if work.has_given and self._receipt.is_scored:
            return []
        if strand.source is not None and strand.source.worker == work.worker:
            return self._if_forgotten(strand, index)
        error = TandemError(ErrorKind.WORKER_LOST, f"worker {work.worker.id} gave the job up")
        if strand.is_source_open:
            return self._seek_another(strand, work.worker, error)
        return self._go_on(strand, work.worker, error)

    def _if_forgotten(self, strand: Strand, index: int) -> list[Command]:
        """Whoever worked on a choice has done its part, and the choice has no end."""
        if self._has_ended or index not in self._choices or strand.is_worked_on(index):
            return []
        lost = TandemError(ErrorKind.KV_LOST, f"all workers of choice {index} are done and it has no end")
        return self._fail(strand, frozenset(), lost)

    def _deliver(self, index: int) -> list[Command]:
        due, end = self._receipt.due(index)
        if due:
            self._strand_of[index].num_fruitless = 0
        out: list[Command] = [Deliver(token) for token in due]
        if end is None:
            return out
        if len(self._choices) == 1:
            return [*out, *self._end(end)]
        return [*out, *self._close(index), EndChoice(end)]

    # ---- inside: what goes on elsewhere

    def _lose(self, strand: Strand, worker: WorkerRef, error: TandemError) -> list[Command]:
        works = strand.at(worker)
        is_source = strand.source is not None and strand.source.worker == worker
        if self._has_ended or not (works or (is_source and strand.phase is Phase.SEEKING)):
            return []
        for work in works:
            strand.drop(work)
        if works and all(work.has_given for work in works) and self._receipt.is_scored:
            return []
        if not is_source and strand.source is not None and strand.phase in (Phase.RUNNING, Phase.BOOKING):
            is_move = strand.source.prefill is None
            end = [] if is_move else self._count_failure(strand, error)
            return end or self._seek_another(strand, worker, error)
        if strand.phase in (Phase.BOOKING, Phase.STARTING):
            return self._requeue(strand, frozenset({worker}))
        return self._fail(strand, frozenset({worker}), error)

    def _seek_another(self, strand: Strand, worker: WorkerRef, error: TandemError) -> list[Command]:
        """Who was to take does not, and what is offered is there still."""
        if error.kind is ErrorKind.WORKER_LOST or error.kind not in FULL:
            strand.unfit.add(worker)
        strand.asked = None
        strand.move(Step.OFFERED)
        return [_seek(strand, {worker})]

    def _go_on(
        self, strand: Strand, worker: WorkerRef, error: TandemError, *, is_attempt: bool = True
    ) -> list[Command]:
        if error.kind not in ELSEWHERE:
            return self._end(error)
        if is_attempt:
            return self._fail(strand, frozenset({worker}), error)
        return self._requeue(strand, frozenset({worker}))

    def _fail(self, strand: Strand, workers: frozenset[WorkerRef], error: TandemError) -> list[Command]:
        """An attempt of which something may have come."""
        return self._count_failure(strand, error) or self._requeue(strand, workers, has_failed=True)

    def _count_failure(self, strand: Strand, error: TandemError) -> list[Command]:
        """Empty unless it was the last that a request has."""
        strand.num_fruitless += 1
        if strand.num_fruitless > self._max_retries:
            return self._end(given_up(error, strand.num_fruitless))
        self._count_move(strand)
        return []

    def _requeue(self, strand: Strand, without: frozenset[WorkerRef], *, has_failed: bool = False) -> list[Command]:
        """Back to the line. Tokens that the client has stay its own: the next attempt draws those that follow."""
        out = self._undo(strand)
        strand.move(Step.NO_ROOM)
        for index in sorted(strand.choices):
            choice = self._choices[index]
            choice.restart()
            reason = choice.last_word(self.request.sampling)
            if reason is not None:
                key = JobKey(self.request.id, self._attempt, index)
                choice.finish(Finished(key, reason, choice.next_index, self.num_cached or 0))
                out += self._deliver(index)
        if self._has_ended or not strand.choices:
            return out
        tokens = {index: choice.next_index for index, choice in self._choices.items()}
        self._replace(strand, strand.divide(tokens))
        return [*out, Place(without, has_failed)]

    def _replace(self, strand: Strand, parts: Sequence[Strand]) -> None:
        """A strand becomes several, which may be none."""
        where = self._strands.index(strand)
        self._strands[where : where + 1] = parts
        self._strand_of |= {index: part for part in parts for index in part.choices}

    def _count_move(self, strand: Strand) -> None:
        strand.num_moves += 1
        self.num_moves = max(self.num_moves, strand.num_moves)

    # ---- inside: ends

    def _close(self, index: int) -> list[Command]:
        """End one choice, wherever it is open, while others go on."""
        self._receipt.close(index)
        strand = self._strand_of.pop(index)
        strand.choices.discard(index)
        if not strand.choices:
            out = self._undo(strand)
            self._replace(strand, ())
            return out
        works = [work for work in strand.works if index in work.choices]
        for work in works:
            strand.leave(work, index)
        return [CancelJob(work.worker, (work.key_of(index),)) for work in works]

    def _end(self, outcome: Finished | TandemError) -> list[Command]:
        if self._has_ended:
            return []
        undo = [command for strand in self._strands for command in self._undo(strand)]
        for strand in self._strands:
            strand.move(Step.END)
        self._has_ended = True
        return [*undo, End(outcome)]


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
