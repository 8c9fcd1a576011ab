"""How prompts share what a step has for them; never takes from decodes and never looks at room for KV.

Shortest remaining first, and half of every step for the oldest. With B tokens per step for prompts:

- The *oldest* prompt, by lane, priority and arrival, gets at least B/2 in every step. So a prompt of n tokens with m
  tokens of older prompts ahead of it has its first token within 2(m + n)/B steps and one more per older prompt,
  whatever arrives later: nobody starves within a lane.
- The other half goes to the most urgent lane, there to prompts that are late first, then to the one with the fewest
  tokens left. So a prompt of n tokens has its first token within ceil(2(n + s)/B) steps, and one more to begin, where
  s are the tokens of prompts that are late, or shorter than it, or of a more urgent lane: a short prompt is never stuck
  behind a long one, however many of those there are.
- What either does not need goes to the other, so a step is full while there is work. Prompts of equal length are
  served one after the other, because half-done ones would delay the first without hastening the last.

All that is of prompts of one tenant. Where several have prompts here, the oldest is sure of an eighth only: whose turn
it is was decided in the gateways' fair queues, and who asks for little must not wait for half of somebody's long
prompt. In the bounds 2 becomes 8, and 8/7.

Seats (`max_num_seqs`) and KV blocks are given in order of arrival, so these bounds count from the step in which both
suffice. A lane, and in it a priority, is served before all below it and may starve them; that is what they say.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tandem.core.ids import OPEN_TENANT, SeqId, TenantId
from tandem.sched.budget.step_budget import LEAST_TOKENS, PrefillBudget
from tandem.sched.state.sequence import Order, Status
from tandem.sched.state.sequence import Sequence as Seq
from tandem.sched.state.slo_targets import LatencyTargets

OWN_PART, OTHERS_PART = 2, 8
"""What of a step the oldest prompt is sure of, as 1 / so many: beside its own tenant's, and beside those of others."""
MIN_START = 16
"""A waiting prompt is started with no fewer tokens, or an eighth of what prompts have: it takes all its blocks, which
is too much for the last few tokens of a step."""
LATE_SHARE = 0.5
"""A prompt is late when so much of its lane's time to the first token has gone: what is left is for computing it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PendingPrefill:
    """A sequence with `num_remaining` tokens to compute from position `start` on. `is_late`: the first token is due,
    or the client waits for the next one after a preemption."""

    seq: SeqId
    order: Order
    start: int
    num_remaining: int
    is_late: bool = False
    is_waiting: bool = False
    tenant: TenantId = OPEN_TENANT


def prompt_of(seq: Seq, start: int, targets: LatencyTargets, now: float) -> PendingPrefill:
    """`start`: where its computation would go on, or begin with the prefix hits of the moment."""
    due_s = LATE_SHARE * targets.lane(seq.lane).ttft_s
    is_overdue = 0 < due_s <= now - seq.arrived_at
    return PendingPrefill(
        seq=seq.id,
        order=seq.order,
        start=start,
        num_remaining=len(seq.tokens) + seq.num_pending - start,
        is_late=seq.num_output > 0 or is_overdue,
        is_waiting=seq.status is Status.WAITING,
        tenant=seq.job.request.tenant,
    )


def split_budget(prompts: Sequence[PendingPrefill], allowance: PrefillBudget) -> dict[SeqId, int]:
    """Tokens per prompt, those who get some, in order of service. Prompts that wait are started only with a chunk
    worth it. When time runs out before tokens, the floor of an allowance is divided in the same way."""
    if not prompts or allowance.num_tokens < 1:
        return {}
    shares = _divide(prompts, allowance)
    least = min(LEAST_TOKENS, allowance.num_tokens, sum(p.num_remaining for p in prompts))
    return shares if sum(shares.values()) >= least else _divide(prompts, allowance.floor())


def redistribute(
    prompts: Sequence[PendingPrefill], shares: Mapping[SeqId, int], allowance: PrefillBudget
) -> dict[SeqId, int]:
    """Divide what is left after some of those who were to start did not: nobody gets less than in `shares`."""
    ranked = sorted(prompts, key=_urgency)
    left = allowance
    for prompt in ranked:
        left = left.less(prompt.start, shares.get(prompt.seq, 0))
    final: dict[SeqId, int] = {}
    for prompt in ranked:
        num_tokens = shares.get(prompt.seq, 0)
        more = left.fit(prompt.start + num_tokens, prompt.num_remaining - num_tokens)
        left = left.less(prompt.start + num_tokens, more)
        if num_tokens + more:
            final[prompt.seq] = num_tokens + more
    return final


def _divide(prompts: Sequence[PendingPrefill], allowance: PrefillBudget) -> dict[SeqId, int]:
    oldest = min(prompts, key=lambda prompt: prompt.order)
    is_alone = all(prompt.tenant == oldest.tenant for prompt in prompts)
    own = allowance.part(OWN_PART if is_alone else OTHERS_PART)
    kept = max(1, own.fit(oldest.start, oldest.num_remaining))
    least = min(MIN_START, max(1, allowance.num_tokens // 8))
    shares: dict[SeqId, int] = {}
    left = allowance.less(oldest.start, kept)
    for prompt in sorted(prompts, key=_urgency):
        if prompt is oldest:
            more = left.fit(oldest.start + kept, oldest.num_remaining - kept)
            left = left.less(oldest.start + kept, more)
            shares[oldest.seq] = kept + more
            continue
        num_tokens = left.fit(prompt.start, prompt.num_remaining)
        if num_tokens == 0 or (prompt.is_waiting and num_tokens < min(least, prompt.num_remaining)):
            continue
        left = left.less(prompt.start, num_tokens)
        shares[prompt.seq] = num_tokens
    return shares


def _urgency(prompt: PendingPrefill) -> tuple[int, int, bool, int, int]:
    lane, priority, arrival = prompt.order
    return (lane, priority, not prompt.is_late, prompt.num_remaining, arrival)
