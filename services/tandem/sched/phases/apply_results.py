"""Apply what a finished plan computed to its sequences: tokens, scores, published blocks, forks and ends.

A sequence of several choices is forked into one sequence per choice after its first sampled tokens. All choices share
the blocks of the prompt. A last block that is partly filled is shared until a sequence writes to it: the writer takes a
copy, and the last sequence that holds the block writes in place (copy on write, as in PagedAttention, SOSP 2023).
"""

from __future__ import annotations

from collections.abc import Sequence as Many
from dataclasses import replace

from tandem.core.errors import ErrorKind
from tandem.core.events import FinishReason, SampledToken
from tandem.core.request import PrefillJob
from tandem.kv.block_pool import BlockPool
from tandem.kv.handoff import BlockDigest
from tandem.sched.phases.spec_decode import Speculation
from tandem.sched.state.limits import blocks_for
from tandem.sched.state.schedule_result import SequenceUpdate
from tandem.sched.state.scheduler_state import SchedulerState
from tandem.sched.state.sequence import Sequence, Status
from tandem.sched.state.step_plan import ScheduledSlice, SliceResult


def shares_tail(seq: Sequence, pool: BlockPool) -> bool:
    """Return whether the block into which a sequence writes next must be copied first: it is partly filled and another
    sequence shares it.
    """
    index, num_filled = divmod(seq.num_planned, pool.block_size)
    return num_filled > 0 and pool.is_shared(seq.table, index)


def fork_update(
    seq: Sequence, sampled: Many[SampledToken], digests: tuple[BlockDigest, ...]
) -> tuple[SequenceUpdate, list[Sequence]]:
    """Return the update of a job of several choices after its first tokens were sampled, and a new sequence for each
    choice that this worker continues.

    Changes nothing. `seq`: the sequence that stands for all choices until now. `sampled`: one token per choice of the
    job, also for choices that have ended; empty where the request samples nothing or a grammar allows no token.
    `digests`: checksums from the finished slice, which are copied into the update. A choice of a `PrefillJob` is not
    continued here, because it is handed over.
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
        # All choices waited as one sequence, so the first reports its pauses and what yielded to it.
        preemption = None if parts else seq.preemption
        parts.append(
            SequenceUpdate(branch.job, *facts, tokens, finish=finish, handed_over=handed_over, preemption=preemption)
        )
    handed_over = any(part.handed_over for part in parts)
    finish = None if any(part.finish is None for part in parts) else parts[0].finish
    first_tokens = tuple(sampled) if handed_over else ()
    whole = SequenceUpdate(
        job, *facts, (), digests, finish, handed_over, first_tokens=first_tokens, branches=tuple(parts)
    )  # fmt: skip
    return whole, going_on


def failure(seq: Sequence, error: str, kind: ErrorKind) -> SequenceUpdate:
    """Return the update that ends a sequence, with all its choices, after its slice failed with `error`; changes
    nothing."""
    facts = (seq.num_computed, seq.num_cached, seq.num_output)
    parts = [SequenceUpdate(seq.job.for_choice(choice), *facts, error=error, error_kind=kind) for choice in seq.choices]
    return replace(parts[0], job=seq.job, branches=tuple(parts)) if seq.is_unforked else parts[0]


def fork_sequence(seq: Sequence, going_on: Many[Sequence], pool: BlockPool, num_seats: int) -> None:
    """Turn `seq`, which stands for several choices, into the first sequence of `going_on`, and share its blocks with
    the next `num_seats` sequences of `going_on`, which then run.

    `going_on`: the sequences that `fork_update` returned. `num_seats`: number of free seats. Sequences that get no seat
    wait without blocks, as preempted sequences do.
    """
    pool.trim(seq.table, blocks_for(seq.num_computed, pool.block_size))
    for other in going_on[1 : 1 + num_seats]:
        other.status = Status.RUNNING
        other.num_computed = seq.num_computed
        pool.fork(other.table, seq.table)
    seq.narrow_to(going_on[0])


def apply_slice(
    state: SchedulerState,
    speculation: Speculation | None,
    seq: Sequence,
    piece: ScheduledSlice,
    outcome: SliceResult,
) -> SequenceUpdate:
    """Apply the result `outcome` of the slice `piece` to its sequence, and return the sequence's update. A slice that
    failed ends the sequence."""
    seq.num_in_flight -= piece.num_certain
    seq.num_drafted -= piece.num_drafted
    seq.num_pending -= piece.sampling is not None
    if outcome.error is not None:
        state.finish(seq)
        return failure(seq, outcome.error, outcome.error_kind)
    seq.num_computed += piece.num_certain
    seq.num_scored = max(seq.num_scored, piece.start + len(piece.scored))
    if speculation is not None:
        speculation.learn(seq, piece.num_drafted, len(outcome.tokens) + outcome.is_complete)
    progress = append_sampled(state, seq, outcome.tokens, outcome.digests, outcome.is_complete)
    return replace(progress, first_scored=piece.start + 1, scores=outcome.scores) if outcome.scores else progress


def append_sampled(
    state: SchedulerState,
    seq: Sequence,
    tokens: tuple[SampledToken, ...],
    digests: tuple[BlockDigest, ...] = (),
    is_complete: bool = False,
) -> SequenceUpdate:
    """Append sampled tokens to a sequence and return its update; tokens after the end of the sequence are dropped.

    Blocks that became full are published in the prefix cache. The sequence ends with its last token; a sequence of
    several choices is forked after their first tokens. `digests`: checksums of blocks, which are copied into the
    update. `is_complete`: the grammar allows no further token.
    """
    # With max_tokens=0 nothing is sampled after the prompt.
    is_last = seq.job.request.sampling.max_tokens == 0 and seq.num_computed == len(seq.tokens)
    if seq.is_unforked and (tokens or is_last or is_complete):
        return _fork(state, seq, tokens, digests)
    first_index = seq.num_output
    finish = seq.finish_reason() if is_last else None
    kept: list[SampledToken] = []
    for token in tokens:
        seq.append(token)
        kept.append(token)
        finish = seq.finish_reason()
        if finish is not None:
            break
    if finish is None and is_complete:
        finish = FinishReason.STOP
    # Every kept token but the last one confirmed a guess, so the KV computed for that guess is valid.
    seq.num_computed += max(0, len(kept) - 1)
    _publish(state, seq)
    handed_over = bool(kept) and isinstance(seq.job, PrefillJob) and finish is None
    if finish is not None or handed_over:
        state.finish(seq)
    sampled = tuple(kept)
    return SequenceUpdate(
        seq.job,
        seq.num_computed,
        seq.num_cached,
        first_index,
        sampled,
        digests,
        finish,
        handed_over,
        first_tokens=sampled if handed_over else (),
        preemption=seq.take_preemption() if seq.preemption and sampled else None,
    )


def _fork(
    state: SchedulerState, seq: Sequence, tokens: tuple[SampledToken, ...], digests: tuple[BlockDigest, ...]
) -> SequenceUpdate:
    """Fork a job of several choices after its first tokens: each choice that goes on becomes a sequence of its own."""
    _publish(state, seq)
    progress, going_on = fork_update(seq, tokens, digests)
    seq.take_preemption()
    if not going_on:
        state.finish(seq)
        return progress
    fork_sequence(seq, going_on, state.pool, state.num_free_seats)
    state.replace_by_branches(seq, [part.key for part in progress.branches], going_on[1:])
    return progress


def _publish(state: SchedulerState, seq: Sequence) -> None:
    num_full = seq.num_computed // state.pool.block_size
    if state.pool.is_caching and num_full > seq.table.num_published:
        state.pool.publish(seq.table, seq.hashes(num_full, state.pool.block_size))
