"""One request's life from its admission to its one end; never does I/O and never reads a clock.

Its choices go as one job or as several, each with its own phase (`flow.strand`). Every choice has its own tokens and
its own end, and the client may have enough of one before the others; the request ends with the last. What its workers
lose goes on elsewhere from the tokens that the client has, for as long as something comes of it.
"""

from __future__ import annotations

from collections.abc import Sequence

from tandem.core.errors import ErrorKind, TandemError
from tandem.core.events import Cancelled, Failed, Finished, JobEvent, Moving, PromptScored, Pulled, Token
from tandem.core.ids import HandoffId, JobKey, WorkerRef
from tandem.core.request import Prefill, Request
from tandem.flow.commands import Blame, CancelJob, Command, Deliver, End, EndChoice, Place, Score, Seek
from tandem.flow.course import Course
from tandem.flow.receipt import Receipt
from tandem.flow.retry import BLAMED, ELSEWHERE, FULL, given_up
from tandem.flow.strand import Phase, Strand, Work
from tandem.routing.placement import Placement


class RequestLife:
    """Every method returns what is to be done, in order; after the end, nothing. As many attempts as `max_retries` may
    fail in a row without a new token or score for the client; of one that is split, more than its prefill's token.
    `course`, who works on it, is to be read only."""

    def __init__(self, request: Request, handoff: HandoffId, max_retries: int = 4) -> None:
        self.request = request
        self.placement: Placement | None = None
        self.pulled: Pulled | None = None
        self._max_retries = max_retries
        self._has_ended = False
        self._receipt = Receipt(request)
        self._choices = self._receipt.choices
        self.course = Course(request, handoff, self._choices)

    @property
    def phase(self) -> Phase:
        """The earliest of its strands'."""
        return Phase.ENDED if self._has_ended else self.course.phase

    @property
    def key(self) -> JobKey:
        """Of the first job that is open, for people."""
        return self.course.key

    @property
    def num_moves(self) -> int:
        """How often it went on elsewhere."""
        return self.course.num_moves

    @property
    def path(self) -> str:
        """How it went, as the client is told."""
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
        return [(key, self._choices[key.choice].next_index) for key in self.course.keys(worker)]

    def workers(self) -> tuple[WorkerRef, ...]:
        """Who works on it."""
        return self.course.workers()

    def seeks(self) -> list[Seek]:
        """What waits for a worker that takes over."""
        return self.course.seeks()

    # ---- placing

    def placed(self, placement: Placement) -> list[Command]:
        """Its turn in the line has come: all that waits goes to the same workers."""
        queued = [strand for strand in self.course.strands if strand.phase is Phase.QUEUED]
        if not queued:
            raise RuntimeError(f"{self!r} cannot take PLACED")
        self.placement = placement
        return [command for strand in queued for command in self.course.begin(strand, placement)]

    def sought(self, choice: int, worker: WorkerRef | None) -> list[Command]:
        """The answer to a Seek; None: nobody can take over now. What drains goes on meanwhile, and is sought for
        again; what was only prefilled is computed anew."""
        strand = self.course.of(choice)
        if strand is None or strand.phase is not Phase.SEEKING or strand.source is None:
            return []
        if worker is not None:
            return self.course.take_over(strand, strand.source, worker)
        return [] if strand.source.prefill is None else self._requeue(strand, Place(frozenset()))

    def accepted(self, worker: WorkerRef, key: JobKey) -> list[Command]:
        """A worker took the job that `key` names."""
        return self.course.accepted(strand) if (strand := self.course.asking(worker, key)) is not None else []

    def refused(self, worker: WorkerRef, key: JobKey, error: TandemError) -> list[Command]:
        """A worker did not take it, or cannot be reached: back to the queue. What waiting does not cure ends the
        request, but one that drains only asks another."""
        strand = self.course.asking(worker, key)
        if strand is None or strand.asked is None:
            return []
        work, out = strand.asked, list[Command]()
        # Who could not be reached may have the job all the same: it is cancelled there.
        if error.kind is ErrorKind.WORKER_LOST:
            out.append(Blame(frozenset({worker})))
        else:
            strand.drop(work)
            strand.source = None if isinstance(work.job, Prefill) else strand.source
        if strand.source is not None and strand.source.worker != worker and strand.phase is Phase.BOOKING:
            if strand.asked is work:
                strand.drop(work)
                out.append(CancelJob(worker, work.keys))
            return [*out, *self.course.seek_another(strand, worker, error.kind)]
        return [*out, *self._go_on(strand, worker, error, is_attempt=error.kind not in FULL)]

    # ---- what workers report

    def reported(self, worker: WorkerRef, event: JobEvent) -> list[Command]:
        """A worker's word on a choice of this request. One that has no open job of it here has nothing to say; the
        prompt, and its KV, is that of the other choices too."""
        if isinstance(event, PromptScored):
            return self._take_scores(event) if self.course.is_open(worker, event.key.attempt) else []
        if isinstance(event, Pulled):
            self.pulled = event if self.course.pulled(worker, event.key.attempt) else self.pulled
            return []
        choice = event.key.choice
        strand = self.course.of(choice)
        work = None if strand is None else strand.find(worker, event.key.attempt)
        if strand is None or work is None or choice not in work.choices:
            return []
        match event:
            case Token():
                strand.drew(work, event.index)
                self._choices[choice].take(event)
                return self._deliver(choice)
            case Moving():
                return self.course.offered(strand, choice, work, event.offer)
            case Finished():
                return self._take_finish(strand, work, event)
            case Failed():
                return self._take_failure(strand, work, event)
            case Cancelled():
                return self._take_cancel(strand, work, choice)

    def streamed(self, worker: WorkerRef, key: JobKey, first_index: int, ids: Sequence[int]) -> bool:
        """Tokens with neighbouring indices, as `reported` takes one. True: the client gets them all at once, as it
        nearly always does. Otherwise nothing has changed, and they are to be reported one by one."""
        strand = self.course.of(key.choice)
        work = None if strand is None or not self._receipt.is_scored else strand.find(worker, key.attempt)
        if strand is None or work is None or key.choice not in work.choices:
            return False
        if has_them := self._choices[key.choice].skip(first_index, ids):
            strand.streamed(work, first_index + len(ids) - 1)
        return has_them

    def worker_lost(self, worker: WorkerRef, reason: str) -> list[Command]:
        """A worker is gone. One that has handed everything over is not missed; before all workers have taken their
        jobs, nothing is lost but the place."""
        error = TandemError(ErrorKind.WORKER_LOST, f"worker {worker.id} was lost: {reason}")
        return [command for strand in list(self.course.strands) for command in self._lose(strand, worker, error)]

    def stalled(self, reason: str) -> list[Command]:
        """Its workers live and nothing comes of it: whoever works on it is taken for lost."""
        out: list[Command] = []
        for strand in list(self.course.strands):
            workers = frozenset(work.worker for work in strand.works)
            if workers and not self._has_ended:
                out += [Blame(workers), *self._fail(strand, workers, TandemError(ErrorKind.DEADLINE, reason))]
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
        return f"<life {self.key} {self.phase.name} {self.num_delivered} tokens, {self.course.strands}>"

    # ---- inside: what workers say

    def _take_scores(self, event: PromptScored) -> list[Command]:
        try:
            scores = self._receipt.take_scores(event)
        except TandemError as error:
            return self._end(error)
        if scores is None:
            return []
        self.course.note_scores()
        return [Score(scores), *(command for index in list(self._choices) for command in self._deliver(index))]

    def _take_finish(self, strand: Strand, work: Work, event: Finished) -> list[Command]:
        index = event.key.choice
        out = self.course.done(strand, work, index)
        if event.reason is None:
            return [*out, *self._if_forgotten(strand, index)]
        self._choices[index].finish(event)
        return [*out, *self._deliver(index), *self._if_forgotten(strand, index)]

    def _take_failure(self, strand: Strand, work: Work, event: Failed) -> list[Command]:
        strand.leave(work, event.key.choice)
        if not self._is_missed(work):
            return []
        giver = {strand.source.worker} if event.kind is ErrorKind.KV_LOST and strand.source is not None else set()
        blame = [Blame(frozenset({work.worker, *giver}))] if event.kind in BLAMED else []
        return [*blame, *self._replace_taker(strand, work.worker, TandemError(event.kind, event.message))]

    def _take_cancel(self, strand: Strand, work: Work, index: int) -> list[Command]:
        """Nobody on this side asked for it. Who gives may have been released by who takes, whose word is to come."""
        out = self.course.done(strand, work, index)
        if not self._is_missed(work):
            return out
        if strand.source is not None and strand.source.worker == work.worker:
            return [*out, *self._if_forgotten(strand, index)]
        error = TandemError(ErrorKind.WORKER_LOST, f"worker {work.worker.id} gave the job up")
        return [*out, *self._replace_taker(strand, work.worker, error)]

    def _if_forgotten(self, strand: Strand, index: int) -> list[Command]:
        """Whoever worked on a choice has done its part, and the choice has no end."""
        if self._has_ended or index not in self._choices or strand.is_worked_on(index):
            return []
        lost = TandemError(ErrorKind.KV_LOST, f"all workers of choice {index} are done and it has no end")
        return self._fail(strand, frozenset(), lost)

    def _is_missed(self, work: Work) -> bool:
        return not work.has_given or not self._receipt.is_scored

    # ---- inside: what goes on elsewhere

    def _lose(self, strand: Strand, worker: WorkerRef, error: TandemError) -> list[Command]:
        works = strand.at(worker)
        is_source = strand.source is not None and strand.source.worker == worker
        if self._has_ended or not (works or (is_source and strand.phase is Phase.SEEKING)):
            return []
        for work in works:
            strand.drop(work)
        if works and not any(map(self._is_missed, works)):
            return []
        if not is_source and strand.source is not None and strand.phase in (Phase.RUNNING, Phase.BOOKING):
            # Of a move the source goes on, so it has cost nothing yet.
            end = [] if strand.source.prefill is None else self._count_failure(strand, error)
            return end or self.course.seek_another(strand, worker, error.kind)
        if strand.phase in (Phase.BOOKING, Phase.STARTING):
            return self._requeue(strand, Place(frozenset({worker})))
        return self._fail(strand, frozenset({worker}), error)

    def _replace_taker(self, strand: Strand, worker: WorkerRef, error: TandemError) -> list[Command]:
        """A worker gave up: of a move only the taker, if its source draws on. One that drains has not failed."""
        if strand.is_source_open:
            return self.course.seek_another(strand, worker, error.kind)
        return self._go_on(strand, worker, error, is_attempt=error.kind is not ErrorKind.DRAINING)

    def _go_on(self, strand: Strand, worker: WorkerRef, error: TandemError, *, is_attempt: bool) -> list[Command]:
        if error.kind not in ELSEWHERE:
            return self._end(error)
        without = frozenset({worker})
        return self._fail(strand, without, error) if is_attempt else self._requeue(strand, Place(without))

    def _fail(self, strand: Strand, workers: frozenset[WorkerRef], error: TandemError) -> list[Command]:
        """An attempt of which something may have come. Where KV is lost twice in a row, nobody hands it over again."""
        end, is_lost = self._count_failure(strand, error), error.kind is ErrorKind.KV_LOST
        return end or self._requeue(strand, Place(workers, True, is_undivided=is_lost and strand.num_fruitless > 1))

    def _count_failure(self, strand: Strand, error: TandemError) -> list[Command]:
        """Empty unless it was the last that a request has."""
        strand.num_fruitless += 1
        if strand.num_fruitless > self._max_retries:
            return self._end(given_up(error, strand.num_fruitless))
        self.course.count_move(strand)
        return []

    def _requeue(self, strand: Strand, place: Place) -> list[Command]:
        """A choice that has all its tokens ends here: nobody may draw one more."""
        ended = self._receipt.restart(strand.choices, self.key.attempt)
        out = [command for index in ended for command in self._deliver(index)]
        if self._has_ended or not strand.choices:
            return out
        return [*out, *self.course.requeue(strand, place)]

    # ---- inside: to the client

    def _deliver(self, index: int) -> list[Command]:
        due, end = self._receipt.due(index)
        if due and (strand := self.course.of(index)) is not None:
            strand.note_token(due[-1].index)
        out: list[Command] = [Deliver(token) for token in due]
        if end is None:
            return out
        if len(self._choices) == 1:
            return [*out, *self._end(end)]
        return [*out, *self._close(index), EndChoice(end)]

    def _close(self, index: int) -> list[Command]:
        """End one choice, wherever it is open, while others go on."""
        self._receipt.close(index)
        return self.course.close(index)

    def _end(self, outcome: Finished | TandemError) -> list[Command]:
        if self._has_ended:
            return []
        self._has_ended = True
        return [*self.course.end(), End(outcome)]
