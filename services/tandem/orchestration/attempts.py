"""Track the jobs and hand-offs of one request at workers, in job groups: choices that run together as one job.

Attempt numbers are taken from one counter, so a job that is placed again has a new number. A worker's message is
applied only when the worker has an open job with the attempt number that the message names.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TypedDict

from tandem.core.errors import ErrorKind
from tandem.core.events import MigrationOffered
from tandem.core.ids import HandoffId, JobKey, WorkerRef
from tandem.core.request import GenerateJob, Job, PrefillJob, RemotePrefix, Request, ResumeJob
from tandem.orchestration.client_state import Choice
from tandem.orchestration.commands import (
    CancelJob,
    FindConsumer,
    OfferMigration,
    ReleaseLease,
    Requeue,
    StateCommand,
    SubmitJob,
)
from tandem.orchestration.job_group import JobGroup, JobGroupPhase, JobGroupStep, KVOffer, WorkerJob
from tandem.orchestration.phase_ledger import LedgerPhase
from tandem.routing.placement import Placement

CAPACITY_ERRORS = frozenset({ErrorKind.OVERLOADED, ErrorKind.DRAINING, ErrorKind.WORKER_LOST, ErrorKind.CANCELLED})
"""Rejections after which a job is placed again without counting a failed attempt. CANCELLED comes from a prefill worker
whose decode worker has given up its reservation in the meantime, for example to drain, and has notified the prefill
worker before this gateway."""
RETRYABLE = CAPACITY_ERRORS | {ErrorKind.KV_LOST, ErrorKind.INTERNAL}
"""Failures after which the request is tried again, because another worker, or the same one later, may succeed. INTERNAL
is a failed step, perhaps caused by this request: the limit on attempts keeps it from failing on all workers forever."""
BLAMED = frozenset({ErrorKind.KV_LOST, ErrorKind.INTERNAL})
"""Failures that count against the worker that reports them."""


class Attempts:
    """Track the jobs of one request at workers, and build the commands that submit, requeue, hand over and cancel them.
    Performs no I/O: methods return the commands to carry out, in order.

    `choices`: the choices that have not ended, by index; the caller removes each one at its end. `handoff`: the prefix
    of all hand-off ids of this request. `job_groups`: the request's job groups, each with the choices that run together
    as one job. `num_retries`: the greatest number of retries and migrations that a choice of the request has had so
    far.
    """

    def __init__(self, request: Request, handoff: HandoffId, choices: Mapping[int, Choice]) -> None:
        self.num_retries = 0
        all_choices = JobGroup(set(choices))
        self.job_groups = [all_choices]
        self._request = request
        self._handoff = handoff
        self._choices = choices
        self._job_group_of = dict.fromkeys(choices, all_choices)
        self._attempt = 0

    @property
    def phase(self) -> JobGroupPhase:
        """Return the phase of the job group that is least advanced, in the order of `JobGroupPhase`. Most requests have
        one job group."""
        if len(self.job_groups) == 1:
            return self.job_groups[0].phase
        return min((job_group.phase for job_group in self.job_groups), key=lambda phase: phase.value)

    @property
    def ledger_phase(self) -> LedgerPhase:
        """Return the phase of the request's `PhaseLedger` in which the time counts now.

        It is the latest phase of the job groups, so DECODE as long as one of them decodes; DELIVER where no job group
        is left.
        """
        if len(self.job_groups) == 1:
            return self.job_groups[0].ledger_phase
        return max((job_group.ledger_phase for job_group in self.job_groups), default=LedgerPhase.DELIVER)

    @property
    def key(self) -> JobKey:
        """Return a job key that names the request in logs: the key of the first open job; where no job is open, a key
        with the number of the last attempt."""
        works = [work for job_group in self.job_groups for work in job_group.works]
        return works[0].job.key if works else JobKey(self._request.id, self._attempt, min(self._choices, default=0))

    def workers(self) -> tuple[WorkerRef, ...]:
        return tuple(dict.fromkeys(work.worker for job_group in self.job_groups for work in job_group.works))

    def keys(self, worker: WorkerRef) -> list[JobKey]:
        """Return the keys of the request's open jobs at `worker`: for each job one key per choice about which the
        worker may still send events."""
        return [key for job_group in self.job_groups for work in job_group.at(worker) for key in work.keys]

    def seeks(self) -> list[FindConsumer]:
        return [_seek(job_group) for job_group in self.job_groups if job_group.phase is JobGroupPhase.FINDING_CONSUMER]

    def of(self, choice: int) -> JobGroup | None:
        """Return the job group of a choice; None when the choice has ended."""
        return self._job_group_of.get(choice)

    def is_open(self, worker: WorkerRef, attempt: int) -> bool:
        """Return whether `worker` has an open job with the attempt number `attempt`, even if some choices of the job
        have ended."""
        return any(job_group.find(worker, attempt) is not None for job_group in self.job_groups)

    def awaiting_reply(self, worker: WorkerRef, key: JobKey) -> JobGroup | None:
        """Return the job group whose job `key` was submitted to `worker`, which has neither accepted nor rejected it
        yet; None when there is none."""
        for job_group in self.job_groups:
            work = job_group.unanswered
            if work is not None and work.worker == worker and work.job.key == key:
                return job_group
        return None

    # ---- commands to workers

    def begin(self, job_group: JobGroup, placement: Placement) -> list[StateCommand]:
        """Return the commands that submit the jobs of a queued job group to the workers of a placement. The jobs
        continue after the tokens that the client already has.

        For a split placement (prefill and decode on different workers), only the decode worker gets its job now. Once
        it has accepted, `accepted` returns the command that submits the job of the prefill worker.
        """
        job_group.move(JobGroupStep.PLACED)
        job_group.progress = LedgerPhase.FIRST
        first = min(job_group.choices)
        job = GenerateJob(
            request=self._request,
            attempt=self._next_attempt(),
            choice=first,
            num_choices=max(job_group.choices) + 1 - first,
            output_tokens=tuple(self._choices[first].tokens),
            prefix=self._prefix(placement, first),
        )
        # On a remote placement the prefill's own token is no progress: it does not show that the KV can be handed over.
        job_group.progress_at = len(job.output_tokens) + placement.is_remote
        job_group.prefix = job.prefix
        if placement.is_remote:
            # Job groups have different hand-off ids: at one worker a newer attempt at a hand-off ends the older ones.
            handoff = HandoffId(f"{self._handoff}/{first}")
            return self._submit(
                job_group, placement.decode, ResumeJob(**_facts(job), handoff=handoff, source=placement.prefill)
            )
        return self._submit(job_group, placement.decode, job)

    def take_over(self, job_group: JobGroup, source: KVOffer, worker: WorkerRef) -> list[StateCommand]:
        """Return the commands that submit a job to `worker`, with which it reads the KV that `source` offers and
        continues.

        If a prefill job offers the KV, the new job continues after the same output tokens as that job; if a decode
        worker offers it, the new job continues after the tokens that the client has.
        """
        job_group.move(JobGroupStep.PLACED)
        first = min(job_group.choices)
        known = GenerateJob(
            request=self._request, attempt=1, choice=first, output_tokens=tuple(self._choices[first].tokens)
        )
        fields = _facts(known if source.prefill is None else source.prefill)
        fields["attempt"] = self._next_attempt()
        offer = source.offer
        job = ResumeJob(**fields, handoff=offer.handoff, source=source.worker, offer_attempt=offer.attempt)
        return self._submit(job_group, worker, job)

    def accepted(self, job_group: JobGroup) -> list[StateCommand]:
        """Record that a worker has accepted the last submitted job of a job group (`unanswered`), and return the
        commands to carry out.

        If it was the decode job of a split placement, the commands submit the prefill job. Otherwise there are none,
        and the job group is RUNNING from now on.
        """
        assert job_group.unanswered is not None
        job, job_group.unanswered = job_group.unanswered.job, None
        if isinstance(job, ResumeJob) and not job.offer_attempt:
            job_group.move(JobGroupStep.BOOKED)
            prefill = PrefillJob(**_facts(job), handoff=job.handoff, prefix=job_group.prefix)
            job_group.source = KVOffer(job.source, prefill.offer, prefill)
            return self._submit(job_group, job.source, prefill)
        job_group.move(JobGroupStep.STARTED)
        return []

    def done(self, job_group: JobGroup, work: WorkerJob, choice: int) -> list[StateCommand]:
        """Record that the job `work` of a job group has ended for `choice`, and return the commands to carry out, if
        any.

        The end implies that the worker had accepted the job, even if the reply to the submission arrives later.
        """
        is_accepted = job_group.unanswered is work and job_group.phase is JobGroupPhase.STARTING
        out = self.accepted(job_group) if is_accepted else []
        job_group.leave(work, choice)
        return out

    def undo(self, job_group: JobGroup) -> list[StateCommand]:
        """Return the commands that cancel all open jobs of a job group and release the lease on the KV that a worker
        offers for it; remove both from the group.

        A lease outlives its prefill job, so it is released separately.
        """
        out: list[StateCommand] = [CancelJob(work.worker, work.keys) for work in job_group.works]
        if job_group.source is not None:
            out.append(ReleaseLease(job_group.source.worker, job_group.source.offer))
        job_group.clear()
        return out

    # ---- moves between decode workers

    def movable(self, worker: WorkerRef) -> list[JobKey]:
        """Return the keys of the choices that may move from the decode worker `worker` to another worker now.

        A choice may move if its only job is at `worker`, this worker has sampled a token of it, and neither a move nor
        a hand-off of it is under way. Choices that share a job are left out, because each of them would copy the
        prompt's KV.
        """
        return [
            group.works[0].keys[0]
            for group in self.job_groups
            if group.phase is JobGroupPhase.RUNNING
            and group.progress is LedgerPhase.DECODE
            and group.source is None
            and group.target is None
            and len(group.works) == len(group.choices) == 1
            and group.works[0].worker == worker
        ]

    def relocate(self, choice: int, target: WorkerRef) -> list[StateCommand]:
        """Begin to move a choice that `movable` returned: return the command by which its worker offers the choice's
        KV. Once the KV is offered, `target` takes over.

        The worker makes no offer if the choice has ended there or migrates already. Then the choice stays where it is,
        and the caller must call `give_up_move` to make it movable again.
        """
        job_group = self._job_group_of[choice]
        job_group.target = target
        (work,) = job_group.works
        return [OfferMigration(work.worker, work.keys)]

    def give_up_move(self, choice: int) -> None:
        """Give up the move of a choice that `relocate` has begun, unless its worker has offered the KV already. The
        choice stays on this worker, and an offer that arrives later is refused. Does nothing after the offer, or when
        the choice has ended."""
        job_group = self._job_group_of.get(choice)
        if job_group is not None and job_group.source is None:
            job_group.target = None

    # ---- transitions of job groups

    def requeue(self, job_group: JobGroup, requeue: Requeue) -> list[StateCommand]:
        """Return the commands that cancel a job group's jobs and release the lease on its KV, followed by the command
        `requeue`, by which the request returns to the queue.

        The choices wait in the queue in the job groups into which `JobGroup.divide` divides them. The next attempt
        continues after the tokens that the client has.
        """
        out = self.undo(job_group)
        job_group.move(JobGroupStep.NO_ROOM)
        num_tokens = {index: choice.next_index for index, choice in self._choices.items()}
        self._replace(job_group, job_group.divide(num_tokens))
        return [*out, requeue]

    def offered(self, job_group: JobGroup, choice: int, work: WorkerJob, event: MigrationOffered) -> list[StateCommand]:
        """Handle that the worker of the job `work` offers the KV of `choice`, which it decodes or has preempted, and
        return the commands to carry out. If the gateway has chosen to move the choice, the commands submit a job to the
        chosen target. If the offering worker drains, they search for a worker that takes over. The offering worker
        keeps sampling meanwhile.

        A worker repeats its last offer when its Watch stream is opened again. So an offer that the gateway has
        requested is refused when the choice is not to move any more.
        """
        source = KVOffer(work.worker, event.offer)
        if work.is_handed_off or job_group.source == source:
            return []
        if not event.is_requested:
            job_group.target = None
        elif job_group.target is None:
            return [ReleaseLease(source.worker, source.offer)]
        is_starting = job_group.phase is JobGroupPhase.STARTING and job_group.unanswered is not None
        if job_group.unanswered is work or is_starting:
            # A worker that offers KV runs its job, so it and its prefill worker accepted, whatever their later replies.
            self.accepted(job_group)
        if len(job_group.choices) > 1:
            part = job_group.split(choice)
            self._replace(job_group, (job_group, part))
            job_group = part
        out: list[StateCommand] = []
        if job_group.phase in (JobGroupPhase.RUNNING, JobGroupPhase.RESERVING):
            # A worker offers a sequence anew where its offer before is void, so nothing is left to take over by that.
            stale = [other for other in job_group.works if other.worker != source.worker and not other.is_handed_off]
            for other in stale:
                job_group.drop(other)
                out.append(CancelJob(other.worker, other.keys))
            job_group.move(JobGroupStep.OFFERED)
        job_group.source = source
        if job_group.phase is not JobGroupPhase.FINDING_CONSUMER:
            return out
        if job_group.target is None:
            return [*out, _seek(job_group)]
        return [*out, *self.take_over(job_group, source, job_group.target)]

    def pulled(self, worker: WorkerRef, attempt: int) -> bool:
        """Record that `worker` has read the KV for its `ResumeJob` with the attempt number `attempt`. Returns False
        when no such job is open."""
        has_pulled = False
        for job_group in self.job_groups:
            work = job_group.find(worker, attempt)
            if work is not None and isinstance(work.job, ResumeJob):
                # The report may arrive before the reply that the job was accepted.
                if job_group.take(work.job.offer, work):
                    self.count_move(job_group)
                has_pulled = True
        return has_pulled

    def retry_consumer(self, job_group: JobGroup, worker: WorkerRef, why: ErrorKind) -> list[StateCommand]:
        """Handle that `worker` did not take over the KV that is offered for a job group, and return the commands to
        carry out. `why`: the kind of the worker's error.

        If the gateway had chosen to move the choices, the offer is withdrawn, and the choices stay where they are.
        Otherwise another worker is searched for. For this offer, `worker` is tried again later only if it had no
        capacity.
        """
        if why not in CAPACITY_ERRORS or why is ErrorKind.WORKER_LOST:
            job_group.unfit.add(worker)
        job_group.unanswered = None
        job_group.move(JobGroupStep.OFFERED)
        is_move, job_group.target = job_group.target is not None, None
        if job_group.source is None or not is_move:
            return [_seek(job_group, {worker})]
        withdrawn = ReleaseLease(job_group.source.worker, job_group.source.offer)
        job_group.source = None
        job_group.unfit.clear()
        job_group.move(JobGroupStep.WITHDRAWN)
        return [withdrawn]

    def note_scores(self) -> None:
        """Reset the counts of failed attempts of all job groups, because prompt log probabilities have arrived, which
        count as progress."""
        for job_group in self.job_groups:
            job_group.num_fruitless = 0

    def count_move(self, job_group: JobGroup) -> None:
        job_group.num_retries += 1
        self.num_retries = max(self.num_retries, job_group.num_retries)

    def close(self, choice: int) -> list[StateCommand]:
        """End one choice, and return the commands that cancel its jobs; for the last choice of a job group, also the
        one that releases the lease on the group's KV. Raises KeyError when the choice has ended."""
        job_group = self._job_group_of.pop(choice)
        job_group.choices.discard(choice)
        if not job_group.choices:
            out = self.undo(job_group)
            self._replace(job_group, ())
            return out
        works = [work for work in job_group.works if choice in work.choices]
        for work in works:
            job_group.leave(work, choice)
        return [CancelJob(work.worker, (work.key_of(choice),)) for work in works]

    def end(self) -> list[StateCommand]:
        """Return the commands that cancel all jobs and release all leases of the request, and move every job group to
        ENDED."""
        out = [command for job_group in self.job_groups for command in self.undo(job_group)]
        for job_group in self.job_groups:
            job_group.move(JobGroupStep.END)
        return out

    # ---- jobs

    def _prefix(self, placement: Placement, first: int) -> RemotePrefix | None:
        """Return the prefix that the prefill worker of a placement fetches from another worker; None where it fetches
        none. The fetch has a hand-off id of its own, because the prefill worker offers its KV under another one."""
        if placement.prefix is None:
            return None
        handoff = HandoffId(f"{self._handoff}/{first}/prefix")
        return RemotePrefix(handoff=handoff, source=placement.prefix.producer, num_blocks=placement.prefix.num_blocks)

    def _next_attempt(self) -> int:
        self._attempt += 1
        return self._attempt

    def _submit(self, job_group: JobGroup, worker: WorkerRef, job: Job) -> list[StateCommand]:
        """Submit a job. A job covers consecutive choices; those of them that have ended are cancelled at once."""
        job_group.unanswered = WorkerJob(worker, job, set(job_group.choices))
        job_group.works.append(job_group.unanswered)
        ended = tuple(key for key in job.keys if key.choice not in job_group.choices)
        return [SubmitJob(worker, job), *([CancelJob(worker, ended)] if ended else [])]

    def _replace(self, job_group: JobGroup, parts: Iterable[JobGroup]) -> None:
        """Replace a job group by its parts, of which there may be none."""
        parts = tuple(parts)
        where = self.job_groups.index(job_group)
        self.job_groups[where : where + 1] = parts
        self._job_group_of |= {index: part for part in parts for index in part.choices}


class _Facts(TypedDict):
    request: Request
    attempt: int
    choice: int
    num_choices: int
    output_tokens: tuple[int, ...]


def _facts(job: Job) -> _Facts:
    """Return the fields that the jobs of one attempt have in common."""
    return _Facts(
        request=job.request,
        attempt=job.attempt,
        choice=job.choice,
        num_choices=job.num_choices,
        output_tokens=job.output_tokens,
    )


def _seek(job_group: JobGroup, excluded: Iterable[WorkerRef] = ()) -> FindConsumer:
    assert job_group.source is not None
    return FindConsumer(
        min(job_group.choices), job_group.source.worker, frozenset(excluded), frozenset(job_group.unfit)
    )
