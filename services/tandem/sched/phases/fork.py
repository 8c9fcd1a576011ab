"""Fork a sequence of several choices into one sequence per choice, after its first sampled tokens.

All choices share the blocks of the prompt. A last block that is partly filled is shared until a sequence writes to it:
the writer takes a copy, and the last sequence that holds the block writes in place (copy on write, as in
PagedAttention, SOSP 2023).
"""

from __future__ import annotations

from collections.abc import Sequence as Many
from dataclasses import replace

from tandem.core.errors import ErrorKind
from tandem.core.events import FinishReason, SampledToken
from tandem.core.request import PrefillJob
from tandem.kv.block_pool import BlockPool
from tandem.kv.handoff import BlockDigest
from tandem.sched.state.limits import blocks_for
from tandem.sched.state.schedule_result import SequenceUpdate
from tandem.sched.state.sequence import Sequence, Status


def shares_tail(seq: Sequence, pool: BlockPool) -> bool:
    """Return whether the block that a sequence writes next holds tokens already and is shared with another sequence."""
    index, num_filled = divmod(seq.num_planned, pool.block_size)
    return num_filled > 0 and pool.is_shared(seq.table, index)


def fork_update(
    seq: Sequence, sampled: Many[SampledToken], digests: tuple[BlockDigest, ...]
) -> tuple[SequenceUpdate, list[Sequence]]:
    """Build the update of an unforked sequence from the first tokens of its choices, and a sequence for each choice
    that goes on here; changes nothing.

    `sampled` has one token per choice of the job, choices that have ended meanwhile included; it is empty where the
    request samples nothing or a grammar allows no token.
    """
    job, facts = seq.job, (seq.num_computed, seq.num_cached, seq.num_output)
    parts: list[SequenceUpdate] = []
    going_on: list[Sequence] = []
    for choice in seq.choices:
        tokens = tuple(sampled[choice - job.choice :][:1])
        branch = seq.fork_choice(choice, tokens)
        finish = branch.finish_reason() or (None if tokens else FinishReason.STOP)
        handed_over = finish is None and isinstance(job, PrefillJob)
        if finish is None and not handed_over:
            going_on.append(branch)
        parts.append(SequenceUpdate(branch.job, *facts, tokens, finish=finish, handed_over=handed_over))
    handed_over = any(part.handed_over for part in parts)
    finish = None if any(part.finish is None for part in parts) else parts[0].finish
    first_tokens = tuple(sampled) if handed_over else ()
    whole = SequenceUpdate(
        job, *facts, (), digests, finish, handed_over, first_tokens=first_tokens, branches=tuple(parts)
    )  # fmt: skip
    return whole, going_on


def failure(seq: Sequence, error: str, kind: ErrorKind) -> SequenceUpdate:
    """Return the update that ends a sequence, and each choice that it stands for, after a failed step."""
    facts = (seq.num_computed, seq.num_cached, seq.num_output)
    parts = [SequenceUpdate(seq.job.for_choice(choice), *facts, error=error, error_kind=kind) for choice in seq.choices]
    return replace(parts[0], job=seq.job, branches=tuple(parts)) if seq.is_unforked else parts[0]


def fork_sequence(seq: Sequence, going_on: Many[Sequence], pool: BlockPool, num_seats: int) -> None:
    """Turn an unforked sequence into the first of `going_on`. `num_seats` of the others run on the same blocks; the
    rest wait without blocks, as preempted sequences do."""
    pool.trim(seq.table, blocks_for(seq.num_computed, pool.block_size))
    for other in going_on[1 : 1 + num_seats]:
        other.status = Status.RUNNING
        other.num_computed = seq.num_computed
        pool.fork(other.table, seq.table)
    seq.narrow_to(going_on[0])
