"""The next steps of a worker that would all be the same decodes, and what they come to at once; never decides what a
step computes.

Where nothing that waits may start, all that runs decodes, and nobody's latency target shapes the steps, `plan` and
`commit` only move each sequence on by a token, until one ends, a block is missing, or something comes. So many of
them may be committed in one go: the state that they leave is that of one after the other.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from tandem.core.events import TokenRun
from tandem.core.ids import SeqId
from tandem.core.request import PrefillJob
from tandem.core.step_cost import StepFeatures
from tandem.kv.block_pool import BlockPool
from tandem.sched.phases.fork import shares_tail
from tandem.sched.state.limits import SchedulerLimits
from tandem.sched.state.sequence import MigrationState
from tandem.sched.state.sequence import Sequence as Seq
from tandem.sched.state.step_plan import Sampling


@dataclass(frozen=True, slots=True)
class DecodeRun:
    """Plans `[number, number + num_steps)` compute one token of each of `seqs`, in this order. `draws` are the first
    plan's; each further one has the next index, and has seen one token more where it looks back. `context` is the first
    plan's, in tokens. `grown_at` holds, rising, the plan counted from 0 for which each block is taken."""

    number: int
    num_steps: int
    seqs: tuple[SeqId, ...]
    draws: tuple[Sampling, ...]
    context: int
    grown_at: tuple[int, ...]

    def features(self, index: int) -> StepFeatures:
        """Of the plan at `index`, counted from 0."""
        return StepFeatures(num_decode_seqs=len(self.seqs), decode_context=self.context + index * len(self.seqs))


def forecast(
    number: int, limit: int, seqs: Sequence[Seq], pool: BlockPool, limits: SchedulerLimits
) -> DecodeRun | None:
    """The plans from `number` on, at most `limit`, while no other sequence may start: as many as there are blocks for
    that are taken without a copy. None where the next one is not only decodes, draws somebody's last token, or one that
    might be."""
    num_steps = min(limit, _num_alike(seqs, pool, limits))
    if num_steps < 1:
        return None
    grown = sorted(step for step, _ in _growths(seqs, num_steps, pool.block_size))
    num_free = pool.num_free_at_once
    if len(grown) > num_free:
        num_steps = grown[num_free]
        del grown[num_free:]
    draws = []
    for seq in seqs:
        sampling = seq.sampling_at(len(seq.tokens))
        assert sampling is not None, f"{seq!r} is not drawing"
        draws.append(sampling)
    context = sum(len(seq.tokens) for seq in seqs)
    run = DecodeRun(number, num_steps, tuple(seq.id for seq in seqs), tuple(draws), context, tuple(grown))
    return run if num_steps > 0 else None


def advance(run: DecodeRun, seqs: Sequence[Seq], drawn: Sequence[Sequence[int]], pool: BlockPool) -> list[TokenRun]:
    """Take in as many plans as tokens were drawn of each of the run's sequences. Blocks are taken, and full ones
    published, in the order of the plans: a plan takes before its commit publishes."""
    num_steps = len(drawn[0])
    if not 0 < num_steps <= run.num_steps or any(len(ids) != num_steps for ids in drawn):
        raise ValueError(f"a run of {run.num_steps} steps, but {[len(ids) for ids in drawn]} tokens were drawn")
    told = [TokenRun(seq.key, seq.num_output, ids) for seq, ids in zip(seqs, drawn, strict=True)]
    acts = [(step, False, place) for step, place in _growths(seqs, num_steps, pool.block_size)]
    for place, seq in enumerate(seqs):
        if pool.is_caching:
            first = -(seq.num_computed + 1) % pool.block_size
            acts += [(step, True, place) for step in range(first, num_steps, pool.block_size)]
        seq.tokens += drawn[place]
        seq.num_computed += num_steps
    for _, is_publish, place in sorted(acts):
        seq = seqs[place]
        if is_publish:
            pool.publish(seq.table, seq.hashes(seq.table.num_published + 1, pool.block_size))
        else:
            grown = pool.grow(seq.table, len(seq.table) + 1)
            assert grown, "room was counted"
    return told


def _num_alike(seqs: Iterable[Seq], pool: BlockPool, limits: SchedulerLimits) -> int:
    """How many of the next plans would be alike if there were blocks enough; 0 when the next one is not, as where it
    copies blocks."""
    num_steps = num_seqs = 0
    for seq in seqs:
        sampling = seq.job.request.sampling
        if isinstance(seq.job, PrefillJob) or seq.num_remaining != 1 or sampling.stop_token_ids:
            return 0
        if seq.migration_state is not MigrationState.NONE or sampling.logprobs is not None:
            return 0
        if seq.num_open_plans or limits.targets.lane(seq.lane).itl_s > 0 or seq.is_undivided or shares_tail(seq, pool):
            return 0
        left = sampling.max_tokens - seq.num_output - 1
        num_steps = left if num_seqs == 0 else min(num_steps, left)
        num_seqs += 1
    return num_steps if num_seqs <= limits.max_num_batched_tokens else 0


def _growths(seqs: Sequence[Seq], num_steps: int, block_size: int) -> list[tuple[int, int]]:
    """(plan, place among `seqs`) for each block that `num_steps` plans take; plans are counted from 0."""
    out: list[tuple[int, int]] = []
    for place, seq in enumerate(seqs):
        first = len(seq.table) * block_size - seq.num_computed
        out += [(step, place) for step in range(first, num_steps, block_size)]
    return out
