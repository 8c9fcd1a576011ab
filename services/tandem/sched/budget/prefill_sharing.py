"""Split the prefill budget of a step among prompts; decodes and KV blocks are decided elsewhere.

The prompt with the fewest remaining tokens is first, but half of every step is for the oldest prompt. With B prefill
tokens per step:

- The *oldest* prompt, by lane, priority and arrival, gets at least B/2 in every step. A prompt of n tokens with m
  tokens of older prompts ahead of it therefore has its first token within 2(m + n)/B steps plus one per older prompt,
  whatever arrives later: no prompt starves within a lane.
- The other half goes to the most urgent lane, there first to prompts that are late, then to the prompt with the fewest
  tokens left. A prompt of n tokens therefore has its first token within ceil(2(n + s)/B) steps plus one to begin, where
  s counts the tokens of prompts that are late, shorter, or in a more urgent lane: a short prompt is not delayed by long
  ones, however many there are.
- What one half does not need goes to the other, so a step is full while there is work. Prompts of equal length are
  served one after the other, because interleaving would delay the first without speeding up the last.

These bounds hold for prompts of one tenant. Where prompts of several tenants are queued, the oldest prompt is
guaranteed only an eighth of a step: the fair queues of the gateways have already decided which tenant is next, and a
tenant with short prompts must not wait for half of another tenant's long prompt. The factor 2 then becomes 8 in the
first bound, and 8/7 in the second.

Seats (`max_num_seqs`) and KV blocks are assigned in order of arrival, so the bounds count from the step in which both
suffice. A lane, and within it a priority, is served before all below and may starve them, by design.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tandem.core.ids import OPEN_TENANT, SeqId, TenantId
from tandem.sched.budget.step_sizer import LEAST_TOKENS, PrefillBudget
from tandem.sched.state.sequence import Order, Status
from tandem.sched.state.sequence import Sequence as Seq
from tandem.sched.state.slo_targets import LatencyTargets

OWN_PART, OTHERS_PART = 2, 8
"""Guaranteed part of the oldest prompt, as 1/n of the step: among prompts of its own tenant only, and beside other
tenants."""
MIN_START = 16
"""Fewest tokens with which a waiting prompt is started (or an eighth of the prefill budget, if less): a start takes all
blocks of the prompt, which is too much for the last few tokens of a step."""
LATE_SHARE = 0.5
"""Fraction of its lane's TTFT target after which a prompt counts as late; the rest is needed to compute it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PendingPrefill:
    """Describe the tokens of one sequence that a step may prefill, for `split_budget`: those of a prompt, or of a
    preempted sequence that is computed again.

    - `order`: position in the order of service. `tenant`: the tenant of the request.
    - `start`: position of the first token to compute; `num_remaining`: number of tokens to compute from it on.
    - `is_late`: whether the fraction LATE_SHARE of its TTFT target has passed, or the sequence has output already, so
      that its client waits for the next token.
    - `is_waiting`: whether the sequence still has to start, and holds no blocks yet.
    """

    seq: SeqId
    order: Order
    start: int
    num_remaining: int
    is_late: bool = False
    is_waiting: bool = False
    tenant: TenantId = OPEN_TENANT


def prompt_of(seq: Seq, start: int, targets: LatencyTargets, now: float) -> PendingPrefill:
    """Describe the tokens that a sequence still has to prefill, for `split_budget`.

    `start`: the next position to compute; for a waiting sequence, the length of its prefix-cache hit. `targets`: the
    latency targets, by which the prompt counts as late. `now`: the present time in seconds, on the clock of
    `seq.arrived_at`.
    """
    due_s = LATE_SHARE * (targets.lane(seq.lane).ttft_s or 0.0)
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


def split_budget(prompts: Sequence[PendingPrefill], budget: PrefillBudget) -> dict[SeqId, int]:
    """Split the prefill budget of a step among prompts. Returns the number of tokens of each prompt that gets some, in
    order of service.

    A waiting prompt gets at least MIN_START tokens or none, so that it is not started for too little. If the time in
    `budget` suffices for fewer than LEAST_TOKENS tokens in all, `budget.floor()` is split instead, which has no time
    limit.
    """
    if not prompts or budget.num_tokens < 1:
        return {}
    shares = _divide(prompts, budget)
    least = min(LEAST_TOKENS, budget.num_tokens, sum(p.num_remaining for p in prompts))
    return shares if sum(shares.values()) >= least else _divide(prompts, budget.floor())


def redistribute(
    prompts: Sequence[PendingPrefill], shares: Mapping[SeqId, int], budget: PrefillBudget
) -> dict[SeqId, int]:
    """Split among running `prompts` what waiting prompts left of the prefill budget because they could not start.
    Returns the number of tokens of each prompt that gets some.

    `shares`: the result of `split_budget`; no prompt gets fewer tokens than in it. `budget`: all that the step may
    still spend on `prompts`, including the tokens that `shares` has for them.
    """
    ranked = sorted(prompts, key=_urgency)
    left = budget
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


def _divide(prompts: Sequence[PendingPrefill], budget: PrefillBudget) -> dict[SeqId, int]:
    oldest = min(prompts, key=lambda prompt: prompt.order)
    is_alone = all(prompt.tenant == oldest.tenant for prompt in prompts)
    own = budget.part(OWN_PART if is_alone else OTHERS_PART)
    kept = max(1, own.fit(oldest.start, oldest.num_remaining))
    least = min(MIN_START, max(1, budget.num_tokens // 8))
    shares: dict[SeqId, int] = {}
    left = budget.less(oldest.start, kept)
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
