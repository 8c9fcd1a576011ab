"""Whether a worker may take a job on, and how many KV blocks it will need, as functions; never keeps a job.

Two workers that hand over to each other must never wait in a circle. What a worker has accepted may therefore wait only
for what moves by itself: running sequences, and leases, whose takers were promised room that no lease ever takes.
A prefill waiting for a promise to be redeemed would close the circle, because that promise may be waiting for a
prefill that waits in the same way; so a prefill and a promise that do not fit beside each other are not both accepted.
"""

from __future__ import annotations

from dataclasses import dataclass

from tandem.core.errors import ErrorKind, TandemError
from tandem.core.request import Job, Prefill, Resume
from tandem.sched.policy import SchedulerLimits


@dataclass(frozen=True, slots=True, kw_only=True)
class Commitments:
    """Numbers of blocks. `promises` holds one for each pull that was promised and has no blocks yet, `prefills` one
    for each prefill that waits to start. `num_seqs` counts sequences that run or are pulled."""

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


def pull_need(job: Job, block_size: int) -> int:
    """Blocks that a pull takes: the known tokens' and one more, so that decoding can begin."""
    limit = len(job.request.prompt_tokens) + job.request.sampling.max_tokens
    return min(blocks_for(job.num_known_tokens, block_size) + 1, blocks_for(limit, block_size))


def check_job(job: Job, held: Commitments, limits: SchedulerLimits, block_size: int) -> None:
    """Raises TandemError unless a worker that is held to so much already may take the job on."""
    check_fits(job, limits, held.num_blocks, block_size)
    if isinstance(job, Prefill):
        check_prefill(prefill_need(job, block_size), held)
    elif isinstance(job, Resume):
        check_promise(pull_need(job, block_size), held, limits)


def check_fits(job: Job, limits: SchedulerLimits, num_blocks: int, block_size: int) -> None:
    """Raises TandemError when the job could not run even on an empty worker."""
    prompt, output = len(job.request.prompt_tokens), job.request.sampling.max_tokens
    if prompt + output > limits.max_model_len:
        raise TandemError(
            ErrorKind.CONTEXT_LENGTH,
            f"{prompt} prompt tokens and up to {output} output tokens exceed the context of "
            f"{limits.max_model_len} tokens",
        )
    num_tokens = job.num_known_tokens if isinstance(job, Prefill) else prompt + output
    if blocks_for(num_tokens, block_size) > num_blocks:
        raise TandemError(
            ErrorKind.CONTEXT_LENGTH,
            f"{num_tokens} tokens need {blocks_for(num_tokens, block_size)} KV blocks, this worker has {num_blocks}",
        )
    if len(job.output_tokens) >= output:
        raise TandemError(ErrorKind.INVALID_REQUEST, f"all {output} output tokens were drawn already")


def check_prefill(need: int, held: Commitments) -> None:
    """Raises TandemError when the prefill would wait for a promise; it may wait for leases to end."""
    largest = max(held.promises, default=0)
    if need + largest > held.num_blocks:
        raise _overloaded(f"{need} blocks to hand over do not fit beside a promise of {largest} of {held.num_blocks}")


def check_promise(need: int, held: Commitments, limits: SchedulerLimits) -> None:
    """Raises TandemError unless a promise fits beside all leases and promises: then it gets room without the end of a
    lease. It must also leave each waiting prefill its room."""
    taken = held.num_leased + sum(held.promises)
    num_seqs = held.num_seqs + len(held.promises)
    if taken + need > held.num_blocks or num_seqs >= limits.max_num_seqs:
        raise _overloaded(
            f"no room to promise {need} blocks: {taken} of {held.num_blocks} are leased or promised, "
            f"{num_seqs} of {limits.max_num_seqs} sequences taken"
        )
    largest = max(held.prefills, default=0)
    if need + largest > held.num_blocks:
        raise _overloaded(f"a promise of {need} blocks does not fit beside {largest} of {held.num_blocks} to hand over")


def _overloaded(message: str) -> TandemError:
    return TandemError(ErrorKind.OVERLOADED, message, retry_after_s=1.0)
