"""Track the jobs and hand-offs of one request at workers, in job groups: choices that run together as one job.

Attempt numbers are taken from one counter, so a job that is placed again has a new number, and a worker's message
counts only when the worker's open job has that attempt.
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
"""Rejections of a job that cost nothing but its place. CANCELLED: by a prefill worker, whose decode worker has given up
its reservation in the meantime, for example to drain, and notified the prefill worker first."""
RETRYABLE = CAPACITY_ERRORS | {ErrorKind.KV_LOST, ErrorKind.INTERNAL}
"""Failures that another worker, or the same one later, may not repeat. INTERNAL is a failed step, perhaps caused by
this request: the limit on attempts keeps it from failing on all workers forever."""
BLAMED = frozenset({ErrorKind.KV_LOST, ErrorKind.INTERNAL})
"""Failures that count against the worker that reports them."""


class Attempts:
    """Submit, requeue, hand over and cancel the jobs of one request at workers.

    `choices`: those that have not ended; the caller removes them. `handoff`: the prefix of all hand-off ids of this
    request. `num_retries`: the most retries and migrations of any choice. Methods return the commands to carry out, in
    order.
    """

    def __init__(self, request: Request, handoff: HandoffId, choices: Mapping[int, Choice]) -> None:
        self.num_retries = 0
        all_choices = JobGroup(choices)
        self.job_groups = [all_choices]
        self._request = request
        self._handoff = handoff
        self._choices = choices
        self._job_group_of = dict.fromkeys(choices, all_choices)
        self._attempt = 0

    @property
    def phase(self) -> JobGroupPhase:
        """Return the earliest phase of the request's job groups, in the order of `JobGroupPhase`; mostly there is one
        group."""
        if len(self.job_groups) == 1:
            return self.job_groups[0].phase
        return min((job_group.phase for job_group in self.job_groups), key=lambda phase: phase.value)

    @property
    def ledger_phase(self) -> LedgerPhase:
        """Return the phase to which the request's time counts.

        It is the latest phase of the job groups, so DECODE as long as one of them decodes.
        """
        if len(self.job_groups) == 1:
            return self.job_groups[0].ledger_phase
        return max((job_group.ledger_phase for job_group in self.job_groups), default=LedgerPhase.DELIVER)

    @property
    def key(self) -> JobKey:
        """Return the key of the first open job, for logs; without an open job, a key of the last attempt."""
        works = [work for job_group in self.job_groups for work in job_group.works]
        return works[0].job.key if works else JobKey(self._request.id, self._attempt, min(self._choices, default=0))

    def workers(self) -> tuple[WorkerRef, ...]:
        return tuple(dict.fromkeys(work.worker for job_group in self.job_groups for work in job_group.works))

    def keys(self, worker: WorkerRef) -> list[JobKey]:
        """Return the keys of the choices about which a worker may still send events, one key for each choice and
        job."""
        return [key for job_group in self.job_groups for work in job_group.at(worker) for key in work.keys]

    def seeks(self) -> list[FindConsumer]:
        return [_seek(job_group) for job_group in self.job_groups if job_group.phase is JobGroupPhase.FINDING_CONSUMER]

    def of(self, choice: int) -> JobGroup | None:
        """Return the job group of a choice; None when the choice has ended."""
        return self._job_group_of.get(choice)

    def is_open(self, worker: WorkerRef, attempt: int) -> bool:
        """Return whether the job with the number `attempt` is open at a worker, even if some of its choices have
        ended."""
        return any(job_group.find(worker, attempt) is not None for job_group in self.job_groups)

    def awaiting_reply(self, worker: WorkerRef, key: JobKey) -> JobGroup | None:
        """Return the job group whose job `key` waits for this worker's reply (accepted or rejected); None when there is
        none."""
        for job_group in self.job_groups:
            if (
                job_group.unanswered is not None
                and job_group.unanswered.worker == worker
                and job_group.unanswered.job.key == key
            ):
                return job_group
        return None

    # ---- commands to workers

    def begin(self, job_group: JobGroup, placement: Placement) -> list[StateCommand]:
        """Submit a queued job group to the workers of a placement, to continue after the tokens that the client has.

        For a split placement the decode worker gets its job first; the prefill worker gets its job once the decode
        worker has accepted.
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
        """Submit a job to `worker` that continues from the KV that `source` offers.

        If a prefill job offers the KV, the new job has the same known tokens as that job; if a decode worker offers
        it, the new job continues after the tokens that the client has.
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
        """Record that a worker has accepted the job group's unanswered job.

        If that was the decode job of a split placement, returns the submission of the prefill job; otherwise the job
        group is RUNNING from now on and nothing is returned.
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
        """Record that a job has ended for a choice; return further submissions, if any.

        The end implies that the job was accepted, even if the reply to its submission arrives later.
        """
        out = (
            self.accepted(job_group)
            if job_group.unanswered is work and job_group.phase is JobGroupPhase.STARTING
            else []
        )
        job_group.leave(work, choice)
        return out

    def undo(self, job_group: JobGroup) -> list[StateCommand]:
        """Cancel all open jobs of a job group and release the lease of its offered KV.

        A lease outlives its prefill job, so it is released separately.
        """
        out: list[StateCommand] = [CancelJob(work.worker, work.keys) for work in job_group.works]
        if job_group.source is not None:
            out.append(ReleaseLease(job_group.source.worker, job_group.source.offer))
        job_group.clear()
        return out

    # ---- moves between decode workers

    def movable(self, worker: WorkerRef) -> list[JobKey]:
        """Return the choices that `worker` decodes alone and that may move to another worker now.

        Choices that share a job are left out, because each of them would copy the prompt's KV.
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
        """Have the worker of a `movable` choice offer its KV, which `target` takes over.

        The worker does not offer it if it has ended there or migrates already. Then the choice stays, and
        `give_up_move` makes it movable again.
        """
        job_group = self._job_group_of[choice]
        job_group.target = target
        (work,) = job_group.works
        return [OfferMigration(work.worker, work.keys)]

    def give_up_move(self, choice: int) -> None:
        """Let a choice stay that is to move and that its worker has not offered; a later offer is refused. Does nothing
        where it is offered."""
        job_group = self._job_group_of.get(choice)
        if job_group is not None and job_group.source is None:
            job_group.target = None

    # ---- transitions of job groups

    def requeue(self, job_group: JobGroup, requeue: Requeue) -> list[StateCommand]:
        """Cancel a job group's jobs and return its choices to the queue, in groups as `JobGroup.divide` requires.

        The next attempt continues after the tokens that the client has.
        """
        out = self.undo(job_group)
        job_group.move(JobGroupStep.NO_ROOM)
        self._replace(
            job_group, job_group.divide({index: choice.next_index for index, choice in self._choices.items()})
        )
        return [*out, requeue]

    def offered(self, job_group: JobGroup, choice: int, work: WorkerJob, event: MigrationOffered) -> list[StateCommand]:
        """Hand one choice whose decode worker offers its KV over to the worker to which it is to move, or search a
        consumer where the worker drains; the worker keeps sampling meanwhile.

        A requested offer of a choice that is not to move any more is refused: the worker repeats its last offer when
        its Watch stream is opened again.
        """
        source = KVOffer(work.worker, event.offer)
        if work.is_handed_off or job_group.source == source:
            return []
        if not event.is_requested:
            job_group.target = None
        elif job_group.target is None:
            return [ReleaseLease(source.worker, source.offer)]
        if job_group.unanswered is not None and (
            job_group.unanswered is work or job_group.phase is JobGroupPhase.STARTING
        ):
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
        """Record that a worker has read the KV of its job; return False when no such job is open."""
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
        """Search another consumer of KV that is still offered, because `worker` did not take it over, or let the
        choices stay where they are if they were to move to it.

        The worker is tried again later only if it had no capacity.
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
        """Reset the failure counts, because prompt log probabilities have arrived, which count as progress."""
        for job_group in self.job_groups:
            job_group.num_fruitless = 0

    def count_move(self, job_group: JobGroup) -> None:
        job_group.num_retries += 1
        self.num_retries = max(self.num_retries, job_group.num_retries)

    def close(self, choice: int) -> list[StateCommand]:
        """End one choice, and return the cancellations of its jobs. Raises KeyError when the choice has ended."""
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
        """Cancel all jobs, release all leases and move every job group to ENDED."""
        out = [command for job_group in self.job_groups for command in self.undo(job_group)]
        for job_group in self.job_groups:
            job_group.move(JobGroupStep.END)
        return out

    # ---- jobs

    def _prefix(self, placement: Placement, first: int) -> RemotePrefix | None:
        """Return the remote prefix of a placement. It has a hand-off id of its own, because the prefill offers its KV
        under another."""
        if placement.prefix is None:
            return None
        handoff = HandoffId(f"{self._handoff}/{first}/prefix")
        return RemotePrefix(handoff=handoff, source=placement.prefix.worker, num_blocks=placement.prefix.num_blocks)

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
