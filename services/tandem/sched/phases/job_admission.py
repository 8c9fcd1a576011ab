"""Check whether a worker may accept a job.

Two workers that hand over to each other must not deadlock. An accepted job may therefore wait only for work that
finishes by itself: running sequences, and leases whose consumers hold a reservation that no lease can use up. A prefill
that waits for a reservation to be used would close a cycle, because the reservation may belong to a pull that waits for
a prefill in the same way; so a prefill and a reservation that do not fit beside each other are not both accepted.
Remote prefix fetches close no cycle either, see `engine.kv_consumer.KVConsumer` and `engine.kv_producer.KVProducer`. A
pull may be accepted for the seat of a running sequence in a less urgent lane, which yields it; if this sequence may no
longer yield when the pull gets its blocks, the pull waits until it ends. Once the KV of a pull has arrived, no other
job waits for the pull: its choices without a seat or blocks wait for running sequences and leases, as preempted
sequences do.
"""

from __future__ import annotations

from itertools import chain, takewhile
from typing import NamedTuple

from tandem.core.errors import ErrorKind, TandemError
from tandem.core.ids import RequestId
from tandem.core.lane import Lane
from tandem.core.request import Job, PrefillJob, ResumeJob
from tandem.sched.phases.admit_waiting import is_over_batch_share
from tandem.sched.phases.lane_preemption import may_yield
from tandem.sched.state.limits import Capacity, SchedulerLimits, blocks_for, num_seats, pull_need
from tandem.sched.state.scheduler_state import SchedulerState

PATIENCE_S = 0.5
"""Seconds within which a rejected job must be submitted again to keep its position."""

_Name = tuple[RequestId, int]


class _RejectedJob(NamedTuple):
    """Hold the lane of a job, what the job lacked, and when it was rejected last."""

    lane: Lane
    lacks: Capacity
    rejected_at: float


class RejectedJobs:
    """Keep capacity free for jobs that were rejected for lack of room, so that smaller jobs do not overtake them.

    A sequence that ends frees room for one other sequence. A job that needs the room of several sequences would never
    find it while smaller jobs take whatever becomes free, above all where other gateways, which do not know about the
    job, send them. Therefore the capacity that a rejected job lacks is kept from smaller jobs, as long as the job is
    submitted again at least every PATIENCE_S seconds. Jobs are ordered by their first rejection. Times are seconds of
    the caller's clock.
    """

    def __init__(self) -> None:
        self._jobs: dict[_Name, _RejectedJob] = {}

    def put(self, job: Job, lacks: Capacity, now: float) -> None:
        """Record that `job` was rejected at the time `now`, and which capacity it `lacks`.

        `lacks`: of each resource that was short (blocks or seats), all that the job needs; 0 of a resource that was not
        short.
        """
        self._jobs[_name(job)] = _RejectedJob(job.request.lane, lacks, now)

    def remove(self, job: Job) -> None:
        """Forget the rejections of a job that is accepted now, including those of earlier attempts at it. Does nothing
        if it was never rejected."""
        self._jobs.pop(_name(job), None)

    def ahead(self, job: Job, need: Capacity, now: float) -> Capacity:
        """Return the capacity that `job`, which needs `need`, must leave free for larger jobs that were rejected before
        it.

        The capacity is the sum of what the rejected jobs lack, separately for blocks and seats; a job that lacks no
        more of a resource than `need` has of it does not count there. Jobs of less urgent lanes than that of `job` do
        not count at all. Forgets jobs that were not submitted again within PATIENCE_S seconds before `now`.
        """
        self._jobs = {
            name: rejected for name, rejected in self._jobs.items() if now - rejected.rejected_at < PATIENCE_S
        }
        earlier = takewhile(lambda name: name != _name(job), self._jobs)
        before = [self._jobs[name].lacks for name in earlier if self._jobs[name].lane <= job.request.lane]
        return Capacity(
            sum(lacks.num_blocks for lacks in before if lacks.num_blocks > need.num_blocks),
            sum(lacks.num_seats for lacks in before if lacks.num_seats > need.num_seats),
        )

    def __repr__(self) -> str:
        return f"<{len(self._jobs)} rejected jobs>"


def _name(job: Job) -> _Name:
    return job.request.id, job.choice


def held_capacity(state: SchedulerState, lane: Lane) -> Capacity:
    """Return the capacity beside which a new pull in `lane` must fit: the blocks that are leased or reserved for pulls,
    and the seats that are taken or reserved. Seats of running sequences that would be preempted for a job in `lane` do
    not count."""
    pulls = (seq for seq in state.waiting if seq.is_pull)
    staying = (seq for seq in state.running if not may_yield(seq, lane, state.limits))
    seated = chain(staying, state.pulling.values(), pulls)
    num_blocks = state.pool.num_leased + state.num_reserved
    return Capacity(num_blocks, sum(map(state.num_seats_of, seated)))


def check_job(job: Job, state: SchedulerState, rejected: RejectedJobs, now: float) -> None:
    """Check that a worker can accept a job in addition to those that it has accepted; raise TandemError if it cannot.

    A `ResumeJob` that is rejected because it lacks capacity is recorded in `rejected`, with the time `now`. Once it is
    accepted, it is removed from `rejected`.
    """
    limits, num_blocks, block_size = state.limits, state.pool.num_blocks, state.pool.block_size
    check_fits(job, limits, num_blocks, block_size)
    if isinstance(job, PrefillJob):
        check_prefill(blocks_for(job.num_known_tokens, block_size), state.largest_reservation, num_blocks)
    elif isinstance(job, ResumeJob):
        need = Capacity(pull_need(job, limits, num_blocks, block_size), num_seats(job, limits))
        ahead = rejected.ahead(job, need, now)
        held = held_capacity(state, job.request.lane).plus(ahead)
        most = Capacity(num_blocks, limits.max_num_seqs)
        lacks = lacking(need, held, most)
        is_over = _is_over_batch_limit(job, need, ahead, state)
        if any(lacks) or is_over:
            rejected.put(job, need if is_over else lacks, now)
        if is_over:
            raise _overloaded(
                f"batch requests have {limits.batch_max_share:g} of this worker's sequences or blocks, with those that "
                "were refused before this one; see lanes.batch_max_share"
            )
        prefills = (len(seq.tokens) for seq in state.waiting if isinstance(seq.job, PrefillJob))
        check_reservation(need, held, most, blocks_for(max(prefills, default=0), block_size))
        rejected.remove(job)


def _is_over_batch_limit(job: ResumeJob, need: Capacity, ahead: Capacity, state: SchedulerState) -> bool:
    """Return whether a pull of the batch lane would exceed the limit of this lane, together with the batch sequences
    that run, are pulled or have a reservation, and with the capacity kept for jobs that were rejected before it
    (`ahead`)."""
    if job.request.lane != Lane.BATCH or state.limits.batch_max_share == 1:
        return False
    before = state.lane_uses(with_reservations=True)[Lane.BATCH].plus(ahead)
    return is_over_batch_share(state, before, before.plus(need))


def check_fits(job: Job, limits: SchedulerLimits, num_blocks: int, block_size: int) -> None:
    """Raise TandemError if the job could not even run alone on a worker with `num_blocks` blocks (CONTEXT_LENGTH), or
    if it is invalid for the worker's model (INVALID_REQUEST)."""
    prompt, output = len(job.request.prompt_tokens), job.request.sampling.max_tokens
    if prompt + output > limits.max_model_len:
        raise TandemError(
            ErrorKind.CONTEXT_LENGTH,
            f"{prompt} prompt tokens and up to {output} output tokens exceed the context of "
            f"{limits.max_model_len} tokens",
        )
    num_tokens = job.num_known_tokens if isinstance(job, PrefillJob) else prompt + output
    if blocks_for(num_tokens, block_size) > num_blocks:
        raise TandemError(
            ErrorKind.CONTEXT_LENGTH,
            f"{num_tokens} tokens need {blocks_for(num_tokens, block_size)} KV blocks, the worker has {num_blocks}: "
            "shorten the prompt or lower max_tokens",
        )
    if len(job.output_tokens) >= max(1, output):
        raise TandemError(ErrorKind.INVALID_REQUEST, f"all {output} output tokens were sampled already")
    for token, _ in job.request.sampling.logit_bias:
        if not 0 <= token < limits.vocab_size:
            message = f"logit_bias names token {token}; this model's token ids are 0 to {limits.vocab_size - 1}"
            raise TandemError(ErrorKind.INVALID_REQUEST, message, param="logit_bias")


def check_prefill(need: int, largest_reservation: int, num_blocks: int) -> None:
    """Raise TandemError (OVERLOADED) if a prefill of `need` blocks does not fit beside the largest reservation of a
    pull on a worker with `num_blocks` blocks.

    It might then have to wait until the pull has used its reservation, and two workers that wait so for each other
    would deadlock. A wait for leases to end is allowed.
    """
    if need + largest_reservation > num_blocks:
        raise _overloaded(
            f"a prefill of {need} blocks does not fit beside a pull of {largest_reservation} reserved blocks: "
            f"this worker has {num_blocks}"
        )


def lacking(need: Capacity, held: Capacity, most: Capacity) -> Capacity:
    """Return what a new pull lacks to fit beside all leases and reservations.

    For blocks and for seats, the result is the whole number in `need` if that number does not fit, and 0 if it fits.
    `held`: what is leased, taken or reserved. `most`: the capacity of the worker.
    """
    sums = held.plus(need)
    is_short, has_no_seat = sums.num_blocks > most.num_blocks, sums.num_seats > most.num_seats
    return Capacity(need.num_blocks * is_short, need.num_seats * has_no_seat)


def check_reservation(need: Capacity, held: Capacity, most: Capacity, largest_prefill: int) -> None:
    """Raise TandemError (OVERLOADED) if a new pull cannot reserve the blocks and seats of `need` on a worker with the
    capacity `most`.

    Two conditions must hold. `need` fits beside all that is leased or reserved by now (`held`), so that the pull waits
    for running sequences at most, never for the end of a lease. And it leaves enough blocks for the largest waiting
    prefill, which needs `largest_prefill`.
    """
    if any(lacking(need, held, most)):
        raise _overloaded(
            f"no room to reserve {need.num_blocks} blocks: {held.num_blocks} of {most.num_blocks} are leased or "
            f"reserved, {held.num_seats} sequences run or have a seat reserved, max_num_seqs is {most.num_seats}"
        )
    if need.num_blocks + largest_prefill > most.num_blocks:
        raise _overloaded(
            f"a pull of {need.num_blocks} blocks does not fit beside a waiting prefill of {largest_prefill} blocks: "
            f"this worker has {most.num_blocks}"
        )


def _overloaded(message: str) -> TandemError:
    return TandemError(ErrorKind.OVERLOADED, message, retry_after_s=1.0)
