"""One request's life from its admission to its one end, as a table; never does I/O and never reads a clock.

    QUEUED  --placed-->  BOOKING  --accepted-->  STARTING  --accepted-->  RUNNING
       ^                    |  (local: straight to RUNNING)  |                |
       +----- no room ------+------------- no room ----------+--- no room ----+--> ENDED (from everywhere)

The decode worker books first: it alone knows whether it has room, and only then does a prefill worker begin.

A request of several choices goes to its workers as one job. Each choice has its own tokens and its own end, and the
client may have enough of one before the others; the request ends with the last.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum, auto

from tandem.core.errors import ErrorKind, TandemError
from tandem.core.events import Cancelled, Failed, Finished, JobEvent, Moving, PromptScored, Pulled, Token
from tandem.core.ids import HandoffId, HandoffKey, JobKey, WorkerRef
from tandem.core.request import Generate, Job, Prefill, Request, Resume
from tandem.flow.choice import Choice
from tandem.flow.commands import CancelJob, Command, Deliver, End, EndChoice, Place, ReleaseLease, Score, Submit
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


@dataclass(slots=True)
class _Work:
    """A job at a worker. `choices` are those of which it may still have something to say."""

    job: Job
    choices: set[int]


class RequestLife:
    """All that decides one request. Every method returns what is to be done, in order; after the end, nothing."""

    def __init__(self, request: Request, handoff: HandoffId) -> None:
        self.request = request
        self.phase = Phase.QUEUED
        self.placement: Placement | None = None
        self.pulled: Pulled | None = None
        self._handoff = handoff
        self._attempt = 0
        self._first_choice = 0
        # Those that have not ended.
        self._choices = {index: Choice() for index in range(request.num_choices)}
        self._num_ended_tokens = 0
        self._open: dict[WorkerRef, _Work] = {}
        self._giver: WorkerRef | None = None
        # Prompt tokens from the second on whose scores the client has.
        self._num_scored = 0
        # Prompt tokens that were in a cache, as the first attempt told that drew a token; None: nobody has said.
        self.num_cached: int | None = None

    @property
    def key(self) -> JobKey:
        """Of the current attempt's jobs; what arrives under another one is void."""
        return JobKey(self.request.id, self._attempt, self._first_choice)

    @property
    def num_delivered(self) -> int:
        """Tokens the client has, of all choices."""
        return self._num_ended_tokens + sum(choice.next_index for choice in self._choices.values())

    def positions(self, worker: WorkerRef) -> list[tuple[JobKey, int]]:
        """The choices that a worker is to report on, and the index of each one's next token."""
        work = self._open.get(worker)
        open_here = sorted(work.choices) if work is not None else []
        return [(self._key_of(index), self._choices[index].next_index) for index in open_here]

    def workers(self) -> tuple[WorkerRef, ...]:
        """Who works on the current attempt."""
        return tuple(self._open)

    # ---- placing

    def placed(self, placement: Placement) -> list[Command]:
        self._move(Step.PLACED)
        self.placement = placement
        self._attempt += 1
        self._first_choice = min(self._choices)
        if placement.is_remote:
            return self._submit(
                placement.decode,
                Resume(
                    request=self.request,
                    attempt=self._attempt,
                    choice=self._first_choice,
                    num_choices=self._num_choices,
                    handoff=self._handoff,
                    source=placement.prefill,
                ),
            )
        job = Generate(
            request=self.request, attempt=self._attempt, choice=self._first_choice, num_choices=self._num_choices
        )
        return self._submit(placement.decode, job)

    def accepted(self, worker: WorkerRef, key: JobKey) -> list[Command]:
        """A worker took the job that `key` names."""
        if key != self.key or self.phase not in (Phase.BOOKING, Phase.STARTING):
            return []
        assert self.placement is not None
        if self.phase is Phase.STARTING or not self.placement.is_remote:
            self._move(Step.STARTED)
            return []
        self._move(Step.BOOKED)
        job = Prefill(
            request=self.request,
            attempt=self._attempt,
            choice=self._first_choice,
            num_choices=self._num_choices,
            handoff=self._handoff,
        )
        return self._submit(self.placement.prefill, job)

    def refused(self, worker: WorkerRef, key: JobKey, error: TandemError) -> list[Command]:
        """A worker did not take it, or cannot be reached: back to the queue. Anything else ends the request."""
        if key != self.key or self.phase not in (Phase.BOOKING, Phase.STARTING):
            return []
        # Who could not be reached may have the job all the same: it is cancelled there with the rest.
        if error.kind is not ErrorKind.WORKER_LOST:
            work = self._open.pop(worker, None)
            self._giver = None if work is not None and isinstance(work.job, Prefill) else self._giver
        if error.kind not in ELSEWHERE:
            return self._end(error)
        return self._place_again(worker)

    # ---- what workers report

    def reported(self, worker: WorkerRef, event: JobEvent) -> list[Command]:
        """A worker's word on a choice of this request. One that has no open job of it here has nothing to say; the
        prompt is that of the other choices too."""
        if isinstance(event, PromptScored):
            return self._take_scores(event) if self._is_current(worker, event.key) else []
        if not self._is_open(worker, event.key):
            return []
        match event:
            case Token():
                self._choices[event.key.choice].take(event)
                return self._deliver(event.key.choice)
            case Pulled():
                self.pulled = event
                return []
            case Moving():
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
                return self._take_cancel(worker, event.key)

    def streamed(self, worker: WorkerRef, key: JobKey, first_index: int, num_tokens: int = 1) -> bool:
        """Tokens with neighbouring indices, as `reported` takes one. True: the client gets them all at once, as it
        nearly always does. Otherwise nothing has changed, and they are to be reported one by one."""
        if not self._is_scored:
            return False
        return self._is_open(worker, key) and self._choices[key.choice].skip(first_index, num_tokens)

    def worker_lost(self, worker: WorkerRef, reason: str) -> list[Command]:
        """A worker is gone. A prefill worker that has handed everything over is not missed; before all workers have
        taken their jobs, nothing is lost but the place."""
        work = self._open.pop(worker, None)
        if work is None or self._has_done_its_part(work):
            return []
        if self.phase in (Phase.BOOKING, Phase.STARTING):
            return self._place_again(worker)
        return self._end(TandemError(ErrorKind.WORKER_LOST, f"worker {worker.id} was lost: {reason}"))

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
        return f"<life {self.key} {self.phase.name} {self.num_delivered} tokens, open at {[w.id for w in self._open]}>"

    # ---- inside

    @property
    def _num_choices(self) -> int:
        """Of the next jobs: those that have ended in between are cancelled."""
        return max(self._choices) + 1 - self._first_choice

    def _key_of(self, index: int) -> JobKey:
        return JobKey(self.request.id, self._attempt, index)

    def _is_open(self, worker: WorkerRef, key: JobKey) -> bool:
        return self._is_current(worker, key) and key.choice in self._open[worker].choices

    def _is_current(self, worker: WorkerRef, key: JobKey) -> bool:
        return key.attempt == self._attempt and worker in self._open

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
        return [Score(scores), *(command for index in list(self._choices) for command in self._deliver(index))]

    def _deliver(self, index: int) -> list[Command]:
        """A choice's tokens in order of index, and none before the prompt's scores, which may come later where another
        worker has them than the one that decodes."""
        if not self._is_scored:
            return []
        choice = self._choices[index]
        due = choice.due()
        if self.num_cached is None and due:
            self.num_cached = due[0].num_cached_tokens
        out: list[Command] = [Deliver(token) for token in due]
        end = choice.end
        if end is None:
            return out
        if self.num_cached is None:
            self.num_cached = end.num_cached_tokens
        outcome = replace(end, num_cached_tokens=self.num_cached)
        if len(self._choices) == 1:
            return [*out, *self._end(outcome)]
        return [*out, *self._close(index), EndChoice(outcome)]

    @property
    def _is_scored(self) -> bool:
        """All scores of the prompt that are wanted are here."""
        return self.request.prompt_logprobs is None or self._num_scored >= len(self.request.prompt_tokens) - 1

    def _has_done_its_part(self, work: _Work) -> bool:
        return isinstance(work.job, Prefill) and self.pulled is not None and self._is_scored

    def _take_finish(self, worker: WorkerRef, event: Finished) -> list[Command]:
        index = event.key.choice
        self._leave(worker, index)
        if event.reason is None:
            return []
        self._choices[index].finish(event)
        return self._deliver(index)

    def _take_cancel(self, worker: WorkerRef, key: JobKey) -> list[Command]:
        """Nobody on this side asked for it. A prefill whose lease was released early has done its part."""
        work = self._open[worker]
        self._leave(worker, key.choice)
        if self._has_done_its_part(work):
            return []
        return self._end(TandemError(ErrorKind.WORKER_LOST, f"worker {worker.id} gave the job up"))

    def _leave(self, worker: WorkerRef, index: int) -> None:
        """A worker has nothing more to say on a choice."""
        choices = self._open[worker].choices
        choices.discard(index)
        if not choices:
            del self._open[worker]

    def _close(self, index: int) -> list[Command]:
        """End one choice, wherever it is open, while others go on."""
        self._num_ended_tokens += self._choices.pop(index).next_index
        key = (self._key_of(index),)
        workers = [worker for worker, work in self._open.items() if index in work.choices]
        for worker in workers:
            self._leave(worker, index)
        return [CancelJob(worker, key) for worker in workers]

    def _place_again(self, without: WorkerRef) -> list[Command]:
        """Back to the queue. Tokens that the client has stay its own: the next attempt draws the same ones."""
        undo = self._cancel_open()
        self.pulled = None
        for choice in self._choices.values():
            choice.restart()
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
        out: list[Command] = [
            CancelJob(worker, tuple(map(self._key_of, sorted(work.choices)))) for worker, work in self._open.items()
        ]
        if self._giver is not None and self.pulled is None:
            out.append(ReleaseLease(self._giver, HandoffKey(self._handoff, self._attempt)))
        self._open.clear()
        self._giver = None
        return out

    def _submit(self, worker: WorkerRef, job: Job) -> list[Command]:
        """A job covers neighbours; those of them that have ended are cancelled, whichever of the two comes first."""
        self._open[worker] = _Work(job, set(self._choices))
        if isinstance(job, Prefill):
            self._giver = worker
        ended = tuple(key for key in job.keys if key.choice not in self._choices)
        return [Submit(worker, job), *([CancelJob(worker, ended)] if ended else [])]

    def _move(self, step: Step) -> None:
        if (self.phase, step) not in PHASE_TABLE:
            raise RuntimeError(f"{self!r} cannot take {step.name}")
        self.phase = PHASE_TABLE[self.phase, step]
