"""Check whether a worker may accept a job.

Two workers that hand over to each other must not deadlock. An accepted job may therefore wait only for work that
finishes by itself: running sequences, and leases whose consumers hold a reservation that no lease can use up. A prefill
that waits for a reservation to be used would close a cycle, because the reservation may belong to a pull that waits for
a prefill in the same way; so a prefill and a reservation that do not fit beside each other are not both accepted.
Remote prefix fetches close no cycle either, see `engine.kv_consumer.KVConsumer` and `engine.kv_producer.KVProducer`.
A pull may be accepted to a seat that a running sequence of a less urgent lane yields; if that sequence may no longer
yield, the pull waits until it ends.
Once a pull has arrived, no other job waits for it: of its choices, those without seat or blocks wait for running
sequences and leases, as a preempted sequence does.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import chain
from typing import NamedTuple

from tandem.core.errors import ErrorKind, TandemError
from tandem.core.ids import RequestId
from tandem.core.lane import Lane
from tandem.core.request import Job, PrefillJob, ResumeJob
from tandem.sched.phases.batch_limit import is_over_limit
from tandem.sched.phases.lane_preemption import may_yield
from tandem.sched.state.limits import SchedulerLimits, blocks_for, num_seats, prefill_need, pull_need
from tandem.sched.state.scheduler_state import SchedulerState

PATIENCE_S = 0.5
"""Seconds within which a rejected job must be submitted again to keep its position."""

_Name = tuple[RequestId, int]


class Capacity(NamedTuple):
    """KV blocks and sequence seats (places of `max_num_seqs`) of a worker."""

    num_blocks: int
    num_seats: int


class _RejectedJob(NamedTuple):
    """Hold the lane of a job, what the job lacked, and when it was rejected last."""

    lane: Lane
    lacks: Capacity
    rejected_at: float


class RejectedJobs:
    """Keep capacity free for jobs that were rejected for lack of room, so that smaller jobs do not overtake them.

    A sequence that ends frees room for one other. A job that needs the room of several would find none while smaller
    jobs take whatever becomes free, above all where other gateways, which do not know about it, send them. Therefore
    the capacity that a rejected job lacks is kept from smaller jobs while the job is submitted again at least every
    PATIENCE_S seconds. Jobs are ordered by their first rejection. Times are seconds of the caller's clock.
    """

    def __init__(self) -> None:
        self._jobs: dict[_Name, _RejectedJob] = {}

    def put(self, job: Job, lacks: Capacity, now: float) -> None:
        """Record that `job` was rejected at `now`, and the capacity that it `lacks`.

        `lacks` has the job's whole need of each resource that was short, and 0 for a resource that was not.
        """
        self._jobs[_name(job)] = _RejectedJob(job.request.lane, lacks, now)

    def remove(self, job: Job) -> None:
        """Forget the rejections of a job that is accepted now, in this attempt or another; nothing happens if there are
        none."""
        self._jobs.pop(_name(job), None)

    def ahead(self, job: Job, need: Capacity, now: float) -> Capacity:
        """Return the capacity that a job with this `need` must leave free for larger jobs that were rejected before it,
        except those in less urgent lanes.

        Forgets jobs that were not submitted again within PATIENCE_S seconds.
        """
        self._jobs = {
            name: rejected for name, rejected in self._jobs.items() if now - rejected.rejected_at < PATIENCE_S
        }
        before = list(self._before(job))
        return Capacity(
            sum(lacks.num_blocks for lacks in before if lacks.num_blocks > need.num_blocks),
            sum(lacks.num_seats for lacks in before if lacks.num_seats > need.num_seats),
        )

    def __repr__(self) -> str:
        return f"<{len(self._jobs)} rejected jobs>"

    def _before(self, job: Job) -> Iterator[Capacity]:
        mine = _name(job)
        for name, rejected in self._jobs.items():
            if name == mine:
                return
            if rejected.lane <= job.request.lane:
                yield rejected.lacks


def _name(job: Job) -> _Name:
    return job.request.id, job.choice


@dataclass(frozen=True, slots=True, kw_only=True)
class ReservedCapacity:
    """KV blocks and seats that the accepted jobs of a worker hold or have reserved.

    - `num_blocks`: blocks of the whole pool; `num_leased`: those that other workers may read.
    - `reservations`: the blocks reserved for each accepted pull that holds none yet; `prefills`: the blocks that each
      waiting prefill needs.
    - `num_seqs`: seats (places of `max_num_seqs`) of all sequences that run and yield nothing to the new job, are
      pulled or have a reservation.
    """

    num_blocks: int
    num_leased: int
    num_seqs: int
    reservations: tuple[int, ...]
    prefills: tuple[int, ...]


def reserved_capacity(state: SchedulerState, lane: Lane) -> ReservedCapacity:
    """Return what the accepted jobs hold or have reserved, in addition to which a new job in `lane` must fit. Seats
    that running sequences yield to that lane do not count."""
    pulls = (seq for seq in state.waiting if seq.is_pull)
    staying = (seq for seq in state.running if not may_yield(seq, lane, state.limits))
    seated = chain(staying, state.pulling.values(), pulls)
    size = state.pool.block_size
    return ReservedCapacity(
        num_blocks=state.pool.num_blocks,
        num_leased=state.pool.num_leased,
        num_seqs=sum(num_seats(seq.job, state.limits) for seq in seated),
        reservations=tuple(state.reserved_blocks.values()),
        prefills=tuple(blocks_for(len(seq.tokens), size) for seq in state.waiting if isinstance(seq.job, PrefillJob)),
    )


def check_job(job: Job, state: SchedulerState, rejected: RejectedJobs, now: float) -> None:
    """Check that a worker can accept a job in addition to its present ones; raise TandemError otherwise.

    A `ResumeJob` that is rejected for lack of capacity is recorded in `rejected`, at the time `now`.
    """
    held = reserved_capacity(state, job.request.lane)
    limits = state.limits
    block_size = state.pool.block_size
    check_fits(job, limits, held.num_blocks, block_size)
    if isinstance(job, PrefillJob):
        check_prefill(prefill_need(job, block_size), held)
    elif isinstance(job, ResumeJob):
        need = Capacity(pull_need(job, limits, held.num_blocks, block_size), num_seats(job, limits))
        ahead = rejected.ahead(job, need, now)
        held = _with(ahead, held)
        lacks = lacking(need, held, limits)
        is_over = _is_over_batch_limit(job, need, ahead, state)
        if any(lacks) or is_over:
            rejected.put(job, need if is_over else lacks, now)
        if is_over:
            raise _overloaded(
                f"batch requests have {limits.batch_max_share:g} of this worker's sequences or blocks, with those that "
                "were refused before this one; see lanes.batch_max_share"
            )
        check_reservation(need, held, limits)
        rejected.remove(job)


def _is_over_batch_limit(job: ResumeJob, need: Capacity, ahead: Capacity, state: SchedulerState) -> bool:
    """Return whether a pull of the batch lane would exceed the limit of that lane, together with the pulls that run,
    that have a reservation, or that were rejected before it (`ahead`)."""
    if job.request.lane != Lane.BATCH or state.limits.batch_max_share == 1:
        return False
    before = state.lane_uses(with_reservations=True)[Lane.BATCH].plus(ahead.num_seats, ahead.num_blocks)
    return is_over_limit(state, before, before.plus(need.num_seats, need.num_blocks))


def check_fits(job: Job, limits: SchedulerLimits, num_blocks: int, block_size: int) -> None:
    """Raise TandemError if the job could not even run alone on a worker with `num_blocks` blocks, or is invalid for its
    model."""
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


def check_prefill(need: int, held: ReservedCapacity) -> None:
    """Raise TandemError (OVERLOADED) if a prefill of `need` blocks might have to wait until a pull uses its
    reservation.

    Such a wait could deadlock two workers; a wait for leases to end is allowed. `held`: what the accepted jobs hold.
    """
    largest = max(held.reservations, default=0)
    if need + largest > held.num_blocks:
        raise _overloaded(
            f"a prefill of {need} blocks does not fit beside a pull of {largest} reserved blocks: "
            f"this worker has {held.num_blocks}"
        )


def lacking(need: Capacity, held: ReservedCapacity, limits: SchedulerLimits) -> Capacity:
    """Return the capacity that a new pull lacks beside all leases and reservations.

    A resource of `need` that does not fit is returned in full, one that fits as 0. `held`: what the accepted jobs hold.
    """
    is_short = held.num_leased + sum(held.reservations) + need.num_blocks > held.num_blocks
    has_no_seat = held.num_seqs + need.num_seats > limits.max_num_seqs
    return Capacity(need.num_blocks * is_short, need.num_seats * has_no_seat)


def check_reservation(need: Capacity, held: ReservedCapacity, limits: SchedulerLimits) -> None:
    """Raise TandemError (OVERLOADED) if a new pull cannot reserve the blocks and seats of `need`.

    Two conditions must hold. `need` fits beside all that is leased or reserved by now (`held`), so that the pull waits
    for running sequences at most, never for the end of a lease. And it leaves enough blocks for the largest waiting
    prefill.
    """
    if any(lacking(need, held, limits)):
        raise _overloaded(
            f"no room to reserve {need.num_blocks} blocks: {held.num_leased + sum(held.reservations)} of "
            f"{held.num_blocks} are leased or reserved, "
            f"{held.num_seqs} sequences run or have a seat reserved, max_num_seqs is {limits.max_num_seqs}"
        )
    largest = max(held.prefills, default=0)
    if need.num_blocks + largest > held.num_blocks:
        raise _overloaded(
            f"a pull of {need.num_blocks} blocks does not fit beside a waiting prefill of {largest} blocks: "
            f"this worker has {held.num_blocks}"
        )


def _with(ahead: Capacity, held: ReservedCapacity) -> ReservedCapacity:
    """Add the capacity that is kept for jobs rejected earlier to what is reserved."""
    return replace(held, num_leased=held.num_leased + ahead.num_blocks, num_seqs=held.num_seqs + ahead.num_seats)


def _overloaded(message: str) -> TandemError:
    return TandemError(ErrorKind.OVERLOADED, message, retry_after_s=1.0)
