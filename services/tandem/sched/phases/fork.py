"""How a sequence of several choices becomes one for each of them, as functions; never decides who runs.

All choices share the blocks of the prompt. The last one, filled in part, is shared as well until somebody writes on:
whoever does takes a copy, and the last to hold it writes in place (copy on write, as in PagedAttention, SOSP 2023).
"""

from __future__ import annotations

from collections.abc import Sequence as Many
from dataclasses import replace

from tandem.core.errors import ErrorKind
from tandem.core.events import FinishReason, SampledToken
from tandem.core.request import PrefillJob
from tandem.kv.block_pool import BlockPool
from tandem.kv.handoff import BlockDigest
from tandem.sched.phases.job_admission import blocks_for
from tandem.sched.state.schedule_result import SequenceUpdate
from tandem.sched.state.sequence import Sequence, Status


def shares_tail(seq: Sequence, pool: BlockPool) -> bool:
    """Whether the block that it writes next holds tokens already, and another sequence has it too."""
    index, num_filled = divmod(seq.num_planned, pool.block_size)
    return num_filled > 0 and pool.is_shared(seq.table, index)


def first_draws(
    seq: Sequence, drawn: Many[SampledToken], digests: tuple[BlockDigest, ...]
) -> tuple[SequenceUpdate, list[Sequence]]:
    """What the first tokens of all choices of an undivided sequence come to, and a sequence for each that goes on
    here; nothing is changed. `drawn` has one for each choice of the job, those that were ended meanwhile included, or
    none where the prompt alone is wanted or a grammar lets nothing follow it."""
    job, facts = seq.job, (seq.num_computed, seq.num_cached, seq.num_output)
    parts: list[SequenceUpdate] = []
    going_on: list[Sequence] = []
    for choice in seq.choices:
        tokens = tuple(drawn[choice - job.choice :][:1])
        branch = seq.branch(choice, tokens)
        finish = branch.finish_reason() or (None if tokens else FinishReason.STOP)
        handed_over = finish is None and isinstance(job, PrefillJob)
        if finish is None and not handed_over:
            going_on.append(branch)
        parts.append(SequenceUpdate(branch.job, *facts, tokens, finish=finish, handed_over=handed_over))
    handed_over = any(part.handed_over for part in parts)
    finish = None if any(part.finish is None for part in parts) else parts[0].finish
    first_tokens = tuple(drawn) if handed_over else ()
    whole = SequenceUpdate(
        job, *facts, (), digests, finish, handed_over, first_tokens=first_tokens, branches=tuple(parts)
    )  # fmt: skip
    return whole, going_on


def failure(seq: Sequence, error: str, kind: ErrorKind) -> SequenceUpdate:
    """The end of a sequence, and of each choice that it stood for, in a step that went wrong."""
    facts = (seq.num_computed, seq.num_cached, seq.num_output)
    parts = [SequenceUpdate(seq.job.for_choice(choice), *facts, error=error, error_kind=kind) for choice in seq.choices]
    return replace(parts[0], job=seq.job, branches=tuple(parts)) if seq.is_undivided else parts[0]


def fork_sequence(seq: Sequence, going_on: Many[Sequence], pool: BlockPool, num_seats: int) -> None:
    """Become the first of those that go on. `num_seats` of the others run, on the same blocks; the rest waits like
    what was preempted."""
    pool.trim(seq.table, blocks_for(seq.num_computed, pool.block_size))
    for other in going_on[1 : 1 + num_seats]:
        other.status = Status.RUNNING
        other.num_computed = seq.num_computed
        pool.fork(other.table, seq.table)
    seq.become(going_on[0])
