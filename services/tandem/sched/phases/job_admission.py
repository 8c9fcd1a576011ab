"""Whether a worker may take a job on, and how many KV blocks it will need, as functions; never keeps a job.

Two workers that hand over to each other must never wait in a circle. What a worker has accepted may therefore wait only
for what moves by itself: running sequences, and leases, whose consumers were promised room that no lease ever takes.
A prefill waiting for a promise to be redeemed would close the circle, because that promise may be waiting for a
prefill that waits in the same way; so a prefill and a promise that do not fit beside each other are not both accepted.
Prefixes that workers borrow of each other close none either: `sched.borrowing` and `sched.prefix_server` say why.
Once a pull has arrived nobody waits for it: of its choices, those that find neither seat nor blocks then wait for
running sequences and leases, as what was preempted does.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from tandem.core.errors import ErrorKind, TandemError
from tandem.core.request import Job, PrefillJob, ResumeJob
from tandem.sched.phases.rejected_jobs import Capacity, RejectedJobs
from tandem.sched.state.limits import SchedulerLimits


@dataclass(frozen=True, slots=True, kw_only=True)
class ReservedCapacity:
    """Numbers of blocks. `promises` holds one for each pull that was promised and has no blocks yet, `prefills` one
    for each prefill that waits to start. `num_seqs` counts the seats (`num_seats`) of all that runs, is pulled or was
    promised room."""

    num_blocks: int
    num_leased: int
    num_seqs: int
    promises: tuple[int, ...]
    prefills: tuple[int, ...]


def blocks_for(num_tokens: int, block_size: int) -> int:
    return -(-num_tokens // block_size)


def prefill_need(job: Job, block_size: int) -> int:
    """Blocks that a prefill takes, all of them when it starts."""
    return blocks_for(job.num_known_tokens, block_size)


def num_seats(job: Job, limits: SchedulerLimits) -> int:
    """Sequences that a job becomes, as far as it must find room for them at once: of its choices those beyond half of
    a worker's seats may wait, or it would wait for a worker that does nothing else."""
    return min(job.num_choices, max(1, limits.max_num_seqs // 2))


GROWTH_BLOCKS = 2
"""What a sequence that moves may fill while it does, without competing for room."""


def pull_need(job: Job, limits: SchedulerLimits, num_blocks: int, block_size: int) -> int:
    """Blocks that a pull takes: the known tokens', and one more for each choice that is to have a seat, so that
    decoding can begin; never more than there are. KV of another attempt may be that of a sequence that goes on."""
    num_choices, known = num_seats(job, limits), job.num_known_tokens
    limit = blocks_for(len(job.request.prompt_tokens) + job.request.sampling.max_tokens, block_size)
    shared = known // block_size
    spare = GROWTH_BLOCKS if isinstance(job, ResumeJob) and job.offer_attempt else 0
    need = blocks_for(known, block_size) + num_choices + spare
    return min(need, shared + num_choices * (limit - shared), num_blocks)


def check_job(
    job: Job, held: ReservedCapacity, limits: SchedulerLimits, block_size: int, rejected: RejectedJobs, now: float
) -> None:
    """Raises TandemError unless a worker that is held to so much already may take the job on; notes whom it turns
    away."""
    check_fits(job, limits, held.num_blocks, block_size)
    if isinstance(job, PrefillJob):
        check_prefill(prefill_need(job, block_size), held)
    elif isinstance(job, ResumeJob):
        need = Capacity(pull_need(job, limits, held.num_blocks, block_size), num_seats(job, limits))
        held = _with(rejected.ahead(job, need, now), held)
        lacks = lacking(need, held, limits)
        if any(lacks):
            rejected.put(job, lacks, now)
        check_reservation(need, held, limits)
        rejected.remove(job)


def check_fits(job: Job, limits: SchedulerLimits, num_blocks: int, block_size: int) -> None:
    """Raises TandemError when the job could not run even on an empty worker."""
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
            f"{num_tokens} tokens need {blocks_for(num_tokens, block_size)} KV blocks, this worker has {num_blocks}",
        )
    if len(job.output_tokens) >= max(1, output):
        raise TandemError(ErrorKind.INVALID_REQUEST, f"all {output} output tokens were drawn already")
    for token, _ in job.request.sampling.logit_bias:
        if not 0 <= token < limits.vocab_size:
            message = f"logit_bias names the token {token}, outside of [0, {limits.vocab_size})"
            raise TandemError(ErrorKind.INVALID_REQUEST, message, param="logit_bias")


def check_prefill(need: int, held: ReservedCapacity) -> None:
    """Raises TandemError when the prefill would wait for a promise; it may wait for leases to end."""
    largest = max(held.promises, default=0)
    if need + largest > held.num_blocks:
        raise _overloaded(f"{need} blocks to hand over do not fit beside a promise of {largest} of {held.num_blocks}")


def lacking(need: Capacity, held: ReservedCapacity, limits: SchedulerLimits) -> Capacity:
    """What of `need` there is too little of, all of it: a promise must fit beside all leases and promises."""
    is_short = held.num_leased + sum(held.promises) + need.num_blocks > held.num_blocks
    has_no_seat = held.num_seqs + need.num_seats > limits.max_num_seqs
    return Capacity(need.num_blocks * is_short, need.num_seats * has_no_seat)


def check_reservation(need: Capacity, held: ReservedCapacity, limits: SchedulerLimits) -> None:
    """Raises TandemError unless a promise fits beside all leases and promises: then it gets room without the end of a
    lease. It must also leave each waiting prefill its room."""
    if any(lacking(need, held, limits)):
        raise _overloaded(
            f"no room to promise {need.num_blocks} blocks: {held.num_leased + sum(held.promises)} of {held.num_blocks} "
            f"are leased, promised or kept, {held.num_seqs} of {limits.max_num_seqs} sequences taken or kept"
        )
    largest = max(held.prefills, default=0)
    if need.num_blocks + largest > held.num_blocks:
        raise _overloaded(
            f"a promise of {need.num_blocks} blocks does not fit beside {largest} of {held.num_blocks} to hand over"
        )


def _with(ahead: Capacity, held: ReservedCapacity) -> ReservedCapacity:
    """Beside what is kept for others, which nobody may take."""
    return replace(held, num_leased=held.num_leased + ahead.num_blocks, num_seqs=held.num_seqs + ahead.num_seats)


def _overloaded(message: str) -> TandemError:
    return TandemError(ErrorKind.OVERLOADED, message, retry_after_s=1.0)
