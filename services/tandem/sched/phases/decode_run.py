"""Forecast a series of identical decode-only steps, called a run, and commit many of them at once.

Where no waiting sequence may start, all running sequences decode, and no latency target limits the steps, `plan` and
`commit` only advance each sequence by one token until a sequence ends, a block is missing, or a new event arrives.
Committing such steps at once leaves the same state as committing one after the other.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from tandem.core.events import TokenRun
from tandem.core.ids import SeqId
from tandem.core.request import PrefillJob
from tandem.core.step_cost import StepFeatures
from tandem.kv.block_pool import BlockPool
from tandem.sched.phases.apply_results import shares_tail
from tandem.sched.state.limits import SchedulerLimits
from tandem.sched.state.sequence import MigrationState
from tandem.sched.state.sequence import Sequence as Seq
from tandem.sched.state.step_plan import Sampling


@dataclass(frozen=True, slots=True)
class DecodeRun:
    """Describe consecutive plans with the numbers `[number, number + num_steps)`, each of which computes one token of
    each of the sequences `seqs`.

    - `samplings`: how the first plan samples, one entry per sequence. In each further plan `index` is one greater;
      where `needs_history` is set, the history has one more token.
    - `context`: number of tokens that the decodes of the first plan attend to, added up over all sequences.
    - `grown_at`: one entry for each KV block that these plans allocate: the index of the plan (0 is the first) that
      allocates it, ascending.
    """

    number: int
    num_steps: int
    seqs: tuple[SeqId, ...]
    samplings: tuple[Sampling, ...]
    context: int
    grown_at: tuple[int, ...]

    def features(self, index: int) -> StepFeatures:
        """Return the work of the plan at `index` (0 is the first), from which its time is predicted."""
        return StepFeatures(num_decode_seqs=len(self.seqs), decode_context=self.context + index * len(self.seqs))


def forecast(
    number: int, limit: int, seqs: Sequence[Seq], pool: BlockPool, limits: SchedulerLimits
) -> DecodeRun | None:
    """Return the next plans, as long as each decodes one token of every sequence in `seqs` and the plans differ only in
    their tokens. Returns None if not even the next plan is of this kind.

    `number`: number of the first plan. `limit`: most plans to return. The forecast assumes that no other sequence
    starts meanwhile. It ends before a plan that samples the last token of a sequence, or one that may be the last, and
    before a plan that could allocate a block only after a copy to host memory.
    """
    num_steps = min(limit, _num_alike(seqs, pool, limits))
    if num_steps < 1:
        return None
    grown = sorted(step for step, _ in _growths(seqs, num_steps, pool.block_size))
    num_free = pool.num_free_at_once
    if len(grown) > num_free:
        num_steps = grown[num_free]
        del grown[num_free:]
    samplings = []
    for seq in seqs:
        sampling = seq.sampling_at(len(seq.tokens))
        assert sampling is not None, f"{seq!r} is not sampling"
        samplings.append(sampling)
    context = sum(len(seq.tokens) for seq in seqs)
    run = DecodeRun(number, num_steps, tuple(seq.id for seq in seqs), tuple(samplings), context, tuple(grown))
    return run if num_steps > 0 else None


def advance(run: DecodeRun, seqs: Sequence[Seq], sampled: Sequence[Sequence[int]], pool: BlockPool) -> list[TokenRun]:
    """Apply the first plans of a run to its sequences, and return the sampled tokens, one `TokenRun` per sequence.

    `seqs`: the sequences of `run`. `sampled`: the ids of the sampled tokens, one list per sequence in the same order;
    the length of the lists is the number of plans. Raises ValueError when the lists have different lengths or more
    tokens than the run has plans.
    """
    num_steps = len(sampled[0])
    if not 0 < num_steps <= run.num_steps or any(len(ids) != num_steps for ids in sampled):
        raise ValueError(f"a run of {run.num_steps} steps, but {[len(ids) for ids in sampled]} tokens were sampled")
    updates = [TokenRun(seq.key, seq.num_output, ids) for seq, ids in zip(seqs, sampled, strict=True)]
    acts = [(step, False, place) for step, place in _growths(seqs, num_steps, pool.block_size)]
    for place, seq in enumerate(seqs):
        if pool.is_caching:
            first = -(seq.num_computed + 1) % pool.block_size
            acts += [(step, True, place) for step in range(first, num_steps, pool.block_size)]
        seq.tokens += sampled[place]
        seq.num_computed += num_steps
    for _, is_publish, place in sorted(acts):
        seq = seqs[place]
        if is_publish:
            pool.publish(seq.table, seq.hashes(seq.table.num_published + 1, pool.block_size))
        else:
            grown = pool.grow(seq.table, len(seq.table) + 1)
            assert grown, "room was counted"
    return updates


def _num_alike(seqs: Iterable[Seq], pool: BlockPool, limits: SchedulerLimits) -> int:
    """Count the next plans that only decode one token of each of `seqs`, if there are enough blocks; 0 when the next
    plan does anything else or copies blocks."""
    num_steps = num_seqs = 0
    for seq in seqs:
        sampling = seq.job.request.sampling
        if isinstance(seq.job, PrefillJob) or seq.num_remaining != 1 or sampling.stop_token_ids:
            return 0
        if seq.migration_state is not MigrationState.NONE or sampling.logprobs is not None:
            return 0
        if seq.num_open_plans or limits.targets.lane(seq.lane).itl_s or seq.is_unforked or shares_tail(seq, pool):
            return 0
        left = sampling.max_tokens - seq.num_output - 1
        num_steps = left if num_seqs == 0 else min(num_steps, left)
        num_seqs += 1
    return num_steps if num_seqs <= limits.max_num_batched_tokens else 0


def _growths(seqs: Sequence[Seq], num_steps: int, block_size: int) -> list[tuple[int, int]]:
    """Return (plan index, index in `seqs`) of each block that `num_steps` plans allocate."""
    out: list[tuple[int, int]] = []
    for place, seq in enumerate(seqs):
        first = len(seq.table) * block_size - seq.num_computed
        out += [(step, place) for step in range(first, num_steps, block_size)]
    return out
