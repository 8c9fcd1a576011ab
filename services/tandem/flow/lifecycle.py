"""One request's life from its admission to its one end, as a table; never does I/O and never reads a clock.

    QUEUED  --placed-->  BOOKING  --accepted-->  STARTING  --accepted-->  RUNNING
       ^                    |  (local: straight to RUNNING)  |                |
       +----- no room ------+------------- no room ----------+--- no room ----+--> ENDED (from everywhere)

The decode worker books first: it alone knows whether it has room, and only then does a prefill worker begin.
"""

from __future__ import annotations

from enum import Enum, auto

from tandem.core.errors import ErrorKind, TandemError
from tandem.core.events import Cancelled, Failed, Finished, JobEvent, PromptScored, Pulled, Token, Tokens
from tandem.core.ids import HandoffId, JobKey, WorkerRef
from tandem.core.request import Generate, Job, Prefill, Request, Resume
from tandem.flow.commands import CancelJob, Command, Deliver, End, Place, ReleaseLease, Score, Submit
from tandem.kv.handoff import HandoffKey
from tandem.routing.placement import Placement

ELSEWHERE = frozenset({ErrorKind.OVERLOADED, ErrorKind.DRAINING, ErrorKind.WORKER_LOST})
"""Refusals that another worker, or the same one later, may not repeat."""


class Phase(Enum):
    QUEUED = auto()
    BOOKING = auto()
    STARTING = auto()
    RUNNING = auto()
    ENDED = auto()


class Step(Enum):
    """What moves a life from phase to phase."""

    PLACED = auto()
    BOOKED = auto()
    STARTED = auto()
    NO_ROOM = auto()
    END = auto()


PHASE_TABLE: dict[tuple[Phase, Step], Phase] = {
    (Phase.QUEUED, Step.PLACED): Phase.BOOKING,
    (Phase.QUEUED, Step.END): Phase.ENDED,
    (Phase.BOOKING, Step.BOOKED): Phase.STARTING,
    (Phase.BOOKING, Step.STARTED): Phase.RUNNING,
    (Phase.BOOKING, Step.NO_ROOM): Phase.QUEUED,
    (Phase.BOOKING, Step.END): Phase.ENDED,
    (Phase.STARTING, Step.STARTED): Phase.RUNNING,
    (Phase.STARTING, Step.NO_ROOM): Phase.QUEUED,
    (Phase.STARTING, Step.END): Phase.ENDED,
    (Phase.RUNNING, Step.NO_ROOM): Phase.QUEUED,
    (Phase.RUNNING, Step.END): Phase.ENDED,
}


class RequestLife:
    """All that decides one request. Every method returns what is to be done, in order; after the end, nothing."""

    def __init__(self, request: Request, handoff: HandoffId) -> None:
        self.request = request
        self.phase = Phase.QUEUED
        self.placement: Placement | None = None
        self.pulled: Pulled | None = None
        self._handoff = handoff
        self._attempt = 0
        self._open: dict[WorkerRef, Job] = {}
        self._giver: WorkerRef | None = None
        self._next_index = 0
        # Prompt tokens from the second on whose scores the client has.
        self._num_scored = 0
        self._early: dict[int, Token] = {}
        self._finished: Finished | None = None
        self._num_cached = 0

    @property
    def key(self) -> JobKey:
        """Of the current attempt; what arrives under another one is void."""
        return JobKey(self.request.id, self._attempt)

    @property
    def num_delivered(self) -> int:
        """Tokens the client has; the index of the next one."""
        return self._next_index

    def workers(self) -> tuple[WorkerRef, ...]:
        """Who works on the current attempt."""
        return tuple(self._open)

    # ---- placing

    def placed(self, placement: Placement) -> list[Command]:
        self._move(Step.PLACED)
        self.placement = placement
        self._attempt += 1
        if placement.is_remote:
            job: Job = Resume(
                request=self.request, attempt=self._attempt, handoff=self._handoff, source=placement.prefill
            )
        else:
            job = Generate(request=self.request, attempt=self._attempt)
        return [self._submit(placement.decode, job)]

    def accepted(self, worker: WorkerRef, key: JobKey) -> list[Command]:
        """A worker took the job that `key` names."""
        if key != self.key or self.phase not in (Phase.BOOKING, Phase.STARTING):
            return []
        assert self.placement is not None
        if self.phase is Phase.STARTING or not self.placement.is_remote:
            self._move(Step.STARTED)
            return []
        self._move(Step.BOOKED)
        job = Prefill(request=self.request, attempt=self._attempt, handoff=self._handoff)
        return [self._submit(self.placement.prefill, job)]

    def refused(self, worker: WorkerRef, key: JobKey, error: TandemError) -> list[Command]:
        """A worker did not take it, or cannot be reached: back to the queue. Anything else ends the request."""
        if key != self.key or self.phase not in (Phase.BOOKING, Phase.STARTING):
            return []
        # Who could not be reached may have the job all the same: it is cancelled there with the rest.
        if error.kind is not ErrorKind.WORKER_LOST and isinstance(self._open.pop(worker, None), Prefill):
            self._giver = None
        if error.kind not in ELSEWHERE:
            return self._end(error)
        return self._place_again(worker)

    # ---- what workers report

    def reported(self, worker: WorkerRef, event: JobEvent) -> list[Command]:
        """A worker's word on a job of this request. One that has no open job here has nothing to say."""
        if event.key != self.key or worker not in self._open:
            return []
        match event:
            case Token():
                return self._take_token(event)
            case PromptScored():
                return self._take_scores(event)
            case Pulled():
                self.pulled = event
                return []
            case Finished():
                return self._take_finish(worker, event)
            case Failed(kind=ErrorKind.OVERLOADED):
                # The decode worker promised room and got none in time; another one, or this one later, may have it.
                self._open.pop(worker, None)
                return self._place_again(worker)
            case Failed():
                self._open.pop(worker, None)
                return self._end(TandemError(event.kind, event.message))
            case Cancelled():
                return self._take_cancel(worker)

    def streamed(self, worker: WorkerRef, tokens: Tokens) -> bool:
        """Tokens of steps that have ended, as `reported` takes one. True: the client gets them all at once. Otherwise
        nothing has changed, and they are to be reported one by one."""
        if tokens.key != self.key or worker not in self._open or self._early or self._finished is not None:
            return False
        if tokens.first_index != self._next_index or not self._is_scored:
            return False
        self._next_index += len(tokens.ids)
        return True

    def worker_lost(self, worker: WorkerRef, reason: str) -> list[Command]:
        """A worker is gone. A prefill worker that has handed everything over is not missed; before all workers have
        taken their jobs, nothing is lost but the place."""
        job = self._open.pop(worker, None)
        if job is None or self._has_done_its_part(job):
            return []
        if self.phase in (Phase.BOOKING, Phase.STARTING):
            return self._place_again(worker)
        return self._end(TandemError(ErrorKind.WORKER_LOST, f"worker {worker.id} was lost: {reason}"))

    # ---- what ends it from this side

    def cancelled(self) -> list[Command]:
        """The client is gone or has enough."""
        return self._end(TandemError(ErrorKind.CANCELLED, "cancelled by the client"))

    def failed(self, error: TandemError) -> list[Command]:
        """A deadline, or an end of this side's own making."""
        return self._end(error)

    def __repr__(self) -> str:
        return f"<life {self.key} {self.phase.name} {self._next_index} tokens, open at {[w.id for w in self._open]}>"

    # ---- inside

    def _take_token(self, token: Token) -> list[Command]:
        """Both sides report the first token; it counts once."""
        if token.index >= self._next_index:
            self._early[token.index] = token
        return self._deliver()

    def _take_scores(self, event: PromptScored) -> list[Command]:
        """They come in order; what comes again is not told again."""
        num_known = self._num_scored + 1 - event.first_index
        if num_known < 0:
            return self._end(TandemError(ErrorKind.INTERNAL, f"{-num_known} scores of the prompt are missing"))
        fresh = event.tokens[num_known:]
        if not fresh:
            return []
        scores = PromptScored(event.key, self._num_scored + 1, fresh)
        self._num_scored += len(fresh)
        return [Score(scores), *self._deliver()]

    def _deliver(self) -> list[Command]:
        """In order of index, and none before the prompt's scores, which may come later where another worker has them
        than the one that decodes."""
        out: list[Command] = []
        while self._is_scored and self._next_index in self._early:
            out.append(Deliver(self._early.pop(self._next_index)))
            self._next_index += 1
        return out + self._finish_when_complete()

    @property
    def _is_scored(self) -> bool:
        """All scores of the prompt that are wanted are here."""
        return self.request.prompt_logprobs is None or self._num_scored >= len(self.request.prompt_tokens) - 1

    def _has_done_its_part(self, job: Job) -> bool:
        return isinstance(job, Prefill) and self.pulled is not None and self._is_scored

    def _take_finish(self, worker: WorkerRef, event: Finished) -> list[Command]:
        job = self._open.pop(worker, None)
        self._num_cached = max(self._num_cached, 0 if isinstance(job, Resume) else event.num_cached_tokens)
        if event.reason is None:
            return []
        self._finished = event
        return self._finish_when_complete()

    def _take_cancel(self, worker: WorkerRef) -> list[Command]:
        """Nobody on this side asked for it. A prefill whose lease was released early has done its part."""
        job = self._open.pop(worker, None)
        if job is None or self._has_done_its_part(job):
            return []
        return self._end(TandemError(ErrorKind.WORKER_LOST, f"worker {worker.id} gave the job up"))

    def _finish_when_complete(self) -> list[Command]:
        finished = self._finished
        if finished is None or self._next_index < finished.num_output_tokens:
            return []
        return self._end(Finished(finished.key, finished.reason, finished.num_output_tokens, self._num_cached))

    def _place_again(self, without: WorkerRef) -> list[Command]:
        """Back to the queue. Tokens that the client has stay its own: the next attempt draws the same ones."""
        undo = self._cancel_open()
        self.pulled = self._finished = None
        self._early.clear()
        self._move(Step.NO_ROOM)
        return [*undo, Place(frozenset({without}))]

    def _end(self, outcome: Finished | TandemError) -> list[Command]:
        if self.phase is Phase.ENDED:
            return []
        undo = self._cancel_open()
        self._move(Step.END)
        return [*undo, End(outcome)]

    def _cancel_open(self) -> list[Command]:
        """End what is still open at workers; a lease outlives its prefill job, so it is released by name."""
        out: list[Command] = [CancelJob(worker, job.key) for worker, job in self._open.items()]
        if self._giver is not None and self.pulled is None:
            out.append(ReleaseLease(self._giver, HandoffKey(self._handoff, self._attempt)))
        self._open.clear()
        self._giver = None
        return out

    def _submit(self, worker: WorkerRef, job: Job) -> Submit:
        self._open[worker] = job
        if isinstance(job, Prefill):
            self._giver = worker
        return Submit(worker, job)

    def _move(self, step: Step) -> None:
        if (self.phase, step) not in PHASE_TABLE:
            raise RuntimeError(f"{self!r} cannot take {step.name}")
        self.phase = PHASE_TABLE[self.phase, step]
