"""Implement the state machine of one request from its admission to its end, without I/O or clock.

The choices run as one job or as several, each with its own phase (`orchestration.job_group`). Every choice has its own
tokens and its own end, and the client may end one before the others; the request ends with the last. When workers are
lost, their choices are retried elsewhere from the tokens that the client has, as long as there is progress.
"""

from __future__ import annotations

from collections.abc import Sequence

from tandem.core.errors import ErrorKind, TandemError
from tandem.core.events import (
    Cancelled,
    Failed,
    Finished,
    JobEvent,
    KVReceived,
    MigrationOffered,
    Preempted,
    PromptLogprobs,
    Token,
)
from tandem.core.ids import HandoffId, JobKey, WorkerRef
from tandem.core.request import PrefillJob, Request
from tandem.orchestration.attempts import BLAMED, CAPACITY_ERRORS, RETRYABLE, Attempts
from tandem.orchestration.client_state import ClientState
from tandem.orchestration.commands import (
    CancelJob,
    EndRequest,
    FindConsumer,
    ReportWorkerFailure,
    Requeue,
    StateCommand,
)
from tandem.orchestration.job_group import JobGroup, JobGroupPhase, WorkerJob
from tandem.routing.placement import Placement
from tandem.routing.rebalance import MovableSequence


class RequestState:
    """Decide the next commands for one request. Each handler returns the commands to carry out, in order; after the
    end, none.

    Up to `max_retries` attempts may fail in a row without progress. Progress is a new token or prompt log probability
    for the client; for a split request, a token beyond the one that the prefill worker samples. `handoff`: the prefix
    of all hand-off ids of the request. `placement`: the last placement; None before the first. `was_held`: the caller
    sets it where the request has waited while no worker could serve its model. `pulled`: the last report that KV of the
    request has arrived at a worker; None before the first. `attempts` is read-only for callers.
    """

    def __init__(self, request: Request, handoff: HandoffId, max_retries: int = 4) -> None:
        self.request = request
        self.placement: Placement | None = None
        self.was_held = False
        self.pulled: KVReceived | None = None
        self._max_retries = max_retries
        self._has_ended = False
        self._client_state = ClientState(request)
        self._choices = self._client_state.choices
        self.attempts = Attempts(request, handoff, self._choices)

    @property
    def phase(self) -> JobGroupPhase:
        """Return ENDED after the end of the request, else the phase of the job group that is least advanced."""
        return JobGroupPhase.ENDED if self._has_ended else self.attempts.phase

    @property
    def key(self) -> JobKey:
        """Return the key of the first open job, for logs and debugging."""
        return self.attempts.key

    @property
    def num_retries(self) -> int:
        """Return the greatest number of retries and migrations that a choice of the request has had so far."""
        return self.attempts.num_retries

    @property
    def path(self) -> str:
        """Return where the request ran, as the response reports it, such as `remote;held;retries=1`; empty before the
        first placement."""
        path = "" if self.placement is None else self.placement.path
        held, retries = ";held" if self.was_held else "", f";retries={self.num_retries}" if self.num_retries else ""
        return f"{path}{held}{retries}"

    @property
    def num_delivered(self) -> int:
        """Return the number of output tokens that the client has, over all choices."""
        return self._client_state.num_tokens

    @property
    def num_context(self) -> int:
        """Return the number of tokens whose KV the request needs: its prompt, once for all choices, and the output that
        the client has of the choices that have not ended."""
        return len(self.request.prompt_tokens) + self._client_state.num_open_tokens

    @property
    def num_cached(self) -> int | None:
        """Return the number of prompt tokens whose KV came from a prefix cache, as reported by the first attempt that
        sampled a token; None before."""
        return self._client_state.num_cached

    def positions(self, worker: WorkerRef) -> list[tuple[JobKey, int]]:
        """Return, for each choice about which `worker` still has to send events, the pair (key of the choice's job
        there, index of the next token that the client needs)."""
        return [(key, self._choices[key.choice].next_index) for key in self.attempts.keys(worker)]

    def workers(self) -> tuple[WorkerRef, ...]:
        """Return the workers at which the request has jobs that have not ended."""
        return self.attempts.workers()

    def seeks(self) -> list[FindConsumer]:
        """Return the searches for workers that take over offered KV: one for each job group that no worker takes over
        yet."""
        return self.attempts.seeks()

    # ---- placing

    def placed(self, placement: Placement) -> list[StateCommand]:
        """Return the commands that submit all queued job groups to the workers of a placement. Raises RuntimeError when
        no group is queued."""
        queued = [job_group for job_group in self.attempts.job_groups if job_group.phase is JobGroupPhase.QUEUED]
        if not queued:
            raise RuntimeError(f"{self!r} cannot take PLACED")
        self.placement = placement
        return [command for job_group in queued for command in self.attempts.begin(job_group, placement)]

    def consumer_found(self, choice: int, worker: WorkerRef | None) -> list[StateCommand]:
        """Apply the result of a FindConsumer search, and return the commands to carry out: `worker` gets a job that
        takes over the offered KV of `choice`. `worker` is None where no worker can take over now.

        Without a worker, KV of a decode worker stays offered, because that worker keeps decoding and the search is
        repeated; KV of a prefill worker is recomputed elsewhere.
        """
        job_group = self.attempts.of(choice)
        if job_group is None or job_group.phase is not JobGroupPhase.FINDING_CONSUMER or job_group.source is None:
            return []
        if worker is not None:
            return self.attempts.take_over(job_group, job_group.source, worker)
        return [] if job_group.source.prefill is None else self._requeue(job_group, Requeue(frozenset()))

    def accepted(self, worker: WorkerRef, key: JobKey) -> list[StateCommand]:
        """Record that a worker has accepted the job `key`, and return the commands to carry out, if any."""
        job_group = self.attempts.awaiting_reply(worker, key)
        return [] if job_group is None else self.attempts.accepted(job_group)

    def refused(self, worker: WorkerRef, key: JobKey, error: TandemError) -> list[StateCommand]:
        """Handle a worker's rejection of the job `key`, or its failure to reply, and return the commands to carry out.

        If the job was to take over KV that another worker still offers, another worker is searched for, or a move that
        the gateway has chosen is given up. Otherwise the request is requeued; it ends if no other attempt, now or
        later, could cure the error.
        """
        job_group = self.attempts.awaiting_reply(worker, key)
        if job_group is None or job_group.unanswered is None:
            return []
        work, out = job_group.unanswered, list[StateCommand]()
        # An unreachable worker may have the job all the same, so the job is cancelled there.
        if error.kind is ErrorKind.WORKER_LOST:
            out.append(ReportWorkerFailure(frozenset({worker})))
        else:
            job_group.drop(work)
            job_group.source = None if isinstance(work.job, PrefillJob) else job_group.source
        if job_group.phase is JobGroupPhase.RESERVING and job_group.is_offered_besides(worker):
            if job_group.unanswered is work:
                job_group.drop(work)
                out.append(CancelJob(worker, work.keys))
            return [*out, *self.attempts.retry_consumer(job_group, worker, error.kind)]
        return [*out, *self._go_on(job_group, worker, error, is_attempt=error.kind not in CAPACITY_ERRORS)]

    # ---- what workers report

    def reported(self, worker: WorkerRef, event: JobEvent) -> list[StateCommand]:
        """Apply one event that a worker sends about a job; events of a job that is not open are ignored.

        Prompt log probabilities and the arrival of KV concern all choices of the job.
        """
        if isinstance(event, PromptLogprobs):
            return self._take_scores(event) if self.attempts.is_open(worker, event.key.attempt) else []
        if isinstance(event, KVReceived):
            self.pulled = event if self.attempts.pulled(worker, event.key.attempt) else self.pulled
            return []
        choice = event.key.choice
        job_group = self.attempts.of(choice)
        work = None if job_group is None else job_group.find(worker, event.key.attempt)
        if job_group is None or work is None or choice not in work.choices:
            return []
        match event:
            case Token():
                job_group.drew(work, event.index)
                self._choices[choice].take(event)
                return self._deliver(choice)
            case Preempted():
                return []  # nothing changes for the client; the rebalancer may move the choice
            case MigrationOffered():
                return self.attempts.offered(job_group, choice, work, event)
            case Finished():
                return self._take_finish(job_group, work, event)
            case Failed():
                return self._take_failure(job_group, work, event)
            case Cancelled():
                return self._take_cancel(job_group, work, choice)

    def streamed(self, worker: WorkerRef, key: JobKey, first_index: int, ids: Sequence[int]) -> bool:
        """Record consecutive tokens of one choice at once, and return whether the client gets all of them now, as in
        nearly all cases.

        False: nothing has changed, and each token must be passed to `reported`. `ids`: the token ids from output
        position `first_index` on.
        """
        job_group = self.attempts.of(key.choice)
        work = None if job_group is None or not self._client_state.is_scored else job_group.find(worker, key.attempt)
        if job_group is None or work is None or key.choice not in work.choices:
            return False
        if has_them := self._choices[key.choice].skip(first_index, ids):
            job_group.streamed(work, first_index + len(ids) - 1)
        return has_them

    def worker_lost(self, worker: WorkerRef, reason: str) -> list[StateCommand]:
        """Continue the choices of a lost worker elsewhere, or end the request when its retries are used up. `reason`:
        why the worker is lost, for error texts.

        The loss of a worker that has handed everything over has no effect. The loss does not count as a failed attempt
        when not all workers of a new placement have accepted their jobs yet, or when the worker was to take over in a
        migration.
        """
        error = TandemError(ErrorKind.WORKER_LOST, f"worker {worker.id} was lost: {reason}")
        return [
            command for job_group in list(self.attempts.job_groups) for command in self._lose(job_group, worker, error)
        ]

    def stalled(self, reason: str) -> list[StateCommand]:
        """Count a failed attempt for every job group that does not wait in the queue, and requeue the group or end the
        request.

        `reason`: the error text.
        """
        out: list[StateCommand] = []
        for job_group in list(self.attempts.job_groups):
            workers = frozenset(work.worker for work in job_group.works)
            if job_group.phase is not JobGroupPhase.QUEUED and not self._has_ended:
                out += [ReportWorkerFailure(workers)] if workers else []
                out += self._fail(job_group, workers, TandemError(ErrorKind.DEADLINE, reason))
        return out

    # ---- moves between decode workers

    def movable(self, worker: WorkerRef) -> list[MovableSequence]:
        """Return the sequences, one for each choice, that `worker` decodes and that may move to another worker now."""
        return [self._sequence(key) for key in self.attempts.movable(worker)]

    def relocate(self, choice: int, target: WorkerRef) -> list[StateCommand]:
        """Begin to move a choice to the decode worker `target`, and return the commands to carry out. `choice`: the
        index of a choice that may move, see `movable`."""
        return self.attempts.relocate(choice, target)

    def next_index(self, key: JobKey) -> int | None:
        """Return the index of the next output token that the client needs of the choice in `key`; None where no worker
        has an open job with this key."""
        choice = self._choices.get(key.choice)
        group = self.attempts.of(key.choice)
        is_open = group is not None and any(work.job.attempt == key.attempt for work in group.works)
        return choice.next_index if is_open and choice is not None else None

    # ---- ends by this side

    def cancelled(self) -> list[StateCommand]:
        """End the request because the client has disconnected or needs no more output."""
        return self._end(TandemError(ErrorKind.CANCELLED, "cancelled by the client"))

    def finished(self, index: int) -> list[StateCommand]:
        """End the choice `index`, of which the client needs no more output; does nothing if it has ended."""
        if index not in self._choices:
            return []
        return self._close(index) if len(self._choices) > 1 else self.cancelled()

    def failed(self, error: TandemError) -> list[StateCommand]:
        """End the request with an error of this gateway, such as a missed deadline."""
        return self._end(error)

    def __repr__(self) -> str:
        return f"<life {self.key} {self.phase.name} {self.num_delivered} tokens, {self.attempts.job_groups}>"

    # ---- worker events

    def _sequence(self, key: JobKey) -> MovableSequence:
        request, num_output = self.request, self._choices[key.choice].next_index
        num_left = request.sampling.max_tokens - num_output
        return MovableSequence(key, request.lane, len(request.prompt_tokens) + num_output, num_left)

    def _take_scores(self, event: PromptLogprobs) -> list[StateCommand]:
        try:
            scores = self._client_state.take_scores(event)
        except TandemError as error:
            return self._end(error)
        if scores is None:
            return []
        self.attempts.note_scores()
        return [scores, *(command for index in list(self._choices) for command in self._deliver(index))]

    def _take_finish(self, job_group: JobGroup, work: WorkerJob, event: Finished) -> list[StateCommand]:
        index = event.key.choice
        out = self.attempts.done(job_group, work, index)
        if event.reason is None:
            return [*out, *self._if_forgotten(job_group, index)]
        self._choices[index].finished = event
        return [*out, *self._deliver(index), *self._if_forgotten(job_group, index)]

    def _take_failure(self, job_group: JobGroup, work: WorkerJob, event: Failed) -> list[StateCommand]:
        job_group.leave(work, event.key.choice)
        if not self._is_missed(work):
            return []
        producer = (
            {job_group.source.worker} if event.kind is ErrorKind.KV_LOST and job_group.source is not None else set()
        )
        # A move is optional, so its failure does not exclude workers from new requests.
        is_blamed = event.kind in BLAMED and work.worker != job_group.target
        blame = [ReportWorkerFailure(frozenset({work.worker, *producer}))] if is_blamed else []
        return [*blame, *self._replace_consumer(job_group, work.worker, TandemError(event.kind, event.message))]

    def _take_cancel(self, job_group: JobGroup, work: WorkerJob, index: int) -> list[StateCommand]:
        """Handle the end of a job by a cancellation that the gateway did not request.

        A producer may have been released by its consumer, whose report is yet to arrive; then nothing needs to be
        retried.
        """
        out = self.attempts.done(job_group, work, index)
        if not self._is_missed(work):
            return out
        if job_group.source is not None and job_group.source.worker == work.worker:
            return [*out, *self._if_forgotten(job_group, index)]
        error = TandemError(ErrorKind.WORKER_LOST, f"worker {work.worker.id} cancelled the job")
        return [*out, *self._replace_consumer(job_group, work.worker, error)]

    def _if_forgotten(self, job_group: JobGroup, index: int) -> list[StateCommand]:
        """Fail a choice whose workers are all done although it has no end."""
        if self._has_ended or index not in self._choices or job_group.is_worked_on(index):
            return []
        lost = TandemError(ErrorKind.KV_LOST, f"the workers of choice {index} ended without a result")
        return self._fail(job_group, frozenset(), lost)

    def _is_missed(self, work: WorkerJob) -> bool:
        return not work.is_handed_off or not self._client_state.is_scored

    # ---- retries

    def _lose(self, job_group: JobGroup, worker: WorkerRef, error: TandemError) -> list[StateCommand]:
        works = job_group.at(worker)
        is_source = job_group.source is not None and job_group.source.worker == worker
        if self._has_ended or not (works or (is_source and job_group.phase is JobGroupPhase.FINDING_CONSUMER)):
            return []
        for work in works:
            job_group.drop(work)
        if works and not any(map(self._is_missed, works)):
            return []
        can_go_on = job_group.phase in (JobGroupPhase.RUNNING, JobGroupPhase.RESERVING)
        if can_go_on and job_group.is_offered_besides(worker):
            # In a migration the source keeps decoding, so the loss of the consumer is no failed attempt.
            end = [] if job_group.is_source_open else self._count_failure(job_group, error)
            return end or self.attempts.retry_consumer(job_group, worker, error.kind)
        if job_group.phase in (JobGroupPhase.RESERVING, JobGroupPhase.STARTING):
            return self._requeue(job_group, Requeue(frozenset({worker})))
        return self._fail(job_group, frozenset({worker}), error)

    def _replace_consumer(self, job_group: JobGroup, worker: WorkerRef, error: TandemError) -> list[StateCommand]:
        """Handle that a worker gave up a job: in a migration whose source still decodes, another consumer is searched
        for or the move is given up; otherwise the job group is retried. A draining worker does not count as a failed
        attempt."""
        if job_group.is_source_open:
            return self.attempts.retry_consumer(job_group, worker, error.kind)
        return self._go_on(job_group, worker, error, is_attempt=error.kind is not ErrorKind.DRAINING)

    def _go_on(
        self, job_group: JobGroup, worker: WorkerRef, error: TandemError, *, is_attempt: bool
    ) -> list[StateCommand]:
        if error.kind not in RETRYABLE:
            return self._end(error)
        without = frozenset({worker})
        return self._fail(job_group, without, error) if is_attempt else self._requeue(job_group, Requeue(without))

    def _fail(self, job_group: JobGroup, workers: frozenset[WorkerRef], error: TandemError) -> list[StateCommand]:
        """Count a failed attempt and requeue the job group, to run on one worker where KV transfers failed twice in a
        row."""
        end = self._count_failure(job_group, error)
        is_undivided = error.kind is ErrorKind.KV_LOST and job_group.num_fruitless > 1
        return end or self._requeue(job_group, Requeue(workers, True, is_undivided))

    def _count_failure(self, job_group: JobGroup, error: TandemError) -> list[StateCommand]:
        """Count a failed attempt; return the end of the request when retries are exhausted, else nothing. If more than
        one attempt in a row has failed, the text of its error also says how many."""
        job_group.num_fruitless += 1
        num_failed = job_group.num_fruitless
        if num_failed > self._max_retries:
            if num_failed > 1:
                error = TandemError(error.kind, f"{error.message}; {num_failed} attempts in a row failed")
            return self._end(error)
        self.attempts.count_move(job_group)
        return []

    def _requeue(self, job_group: JobGroup, requeue: Requeue) -> list[StateCommand]:
        """Requeue a job group. A choice that has all its tokens ends here: no worker may sample one more."""
        ended = self._client_state.restart(job_group.choices, self.key.attempt)
        out = [command for index in ended for command in self._deliver(index)]
        if self._has_ended or not job_group.choices:
            return out
        return [*out, *self.attempts.requeue(job_group, requeue)]

    # ---- delivery to the client

    def _deliver(self, index: int) -> list[StateCommand]:
        due, end = self._client_state.due(index)
        if due and (job_group := self.attempts.of(index)) is not None:
            job_group.note_token(due[-1].index)
        out: list[StateCommand] = [*due]
        if end is None:
            return out
        if len(self._choices) == 1:
            return [*out, *self._end(end)]
        return [*out, *self._close(index), end]

    def _close(self, index: int) -> list[StateCommand]:
        """End one choice, wherever it is open, while others go on."""
        self._client_state.close(index)
        return self.attempts.close(index)

    def _end(self, outcome: Finished | TandemError) -> list[StateCommand]:
        if self._has_ended:
            return []
        self._has_ended = True
        return [*self.attempts.end(), EndRequest(self.request.id, outcome)]
