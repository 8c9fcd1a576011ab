"""What a workload asks for at the least, as plain numbers, and how many workers it takes at the least; never
simulates."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from tandem.core.slo import Slo
from tandem.core.step_cost import StepFeatures
from tandem.kv.hashing import chain_hashes, root_hash
from tandem.sim.cluster.worker import WorkerSpec
from tandem.workload.ask import ScheduledRequest


@dataclass(frozen=True, slots=True)
class Need:
    """Of one request: prompt tokens that no earlier request had at its beginning, all of them, and output tokens."""

    group: str
    num_fresh: int
    num_prompt: int
    num_output: int

    @property
    def prefill(self) -> StepFeatures:
        """All of the prompt that is not cached, in one step."""
        cached = self.num_prompt - self.num_fresh
        pairs = self.num_fresh * cached + self.num_fresh * (self.num_fresh + 1) // 2
        return StepFeatures(num_prefill_tokens=self.num_fresh, num_prefill_pairs=pairs)

    @property
    def decode(self) -> StepFeatures:
        """All further output tokens, as if at once."""
        number = self.num_output - 1
        context = number * self.num_prompt + number * (number + 1) // 2
        return StepFeatures(num_decode_seqs=number, decode_context=context)


@dataclass(frozen=True, slots=True)
class WorkloadDemand:
    """`lasts_s`: between the first and the last arrival. Turns that follow on an answer are not in it, and a cache is
    taken to keep everything, so that whatever is derived is a lower bound."""

    needs: tuple[Need, ...]
    lasts_s: float

    @property
    def prefill(self) -> StepFeatures:
        return _sum(need.prefill for need in self.needs)

    @property
    def decode(self) -> StepFeatures:
        return _sum(need.decode for need in self.needs)

    @property
    def whole(self) -> StepFeatures:
        return _sum((self.prefill, self.decode))


def demand(asks: Sequence[ScheduledRequest], block_size: int, *, has_cache: bool) -> WorkloadDemand:
    """Raises ValueError without requests."""
    if not asks:
        raise ValueError("the workload has no request")
    seen: set[bytes] = set()
    needs = tuple(_need(ask, block_size, seen if has_cache else None) for ask in asks)
    return WorkloadDemand(needs, max(ask.due_s for ask in asks) - min(ask.due_s for ask in asks))


def least_workers(prefill: WorkerSpec | None, decode: WorkerSpec | None, found: WorkloadDemand, slo: Slo) -> int:
    """How many workers it takes that do the prompts (of the kind `prefill`) or the decodes (`decode`) or both, while
    they come and in the time that the targets leave after the last; work without a target bounds nothing. One step of
    everything is the fastest way to do it: splitting it only reads the weights more often."""
    bounds = [1]
    if prefill is not None and slo.ttft_s is not None:
        bounds.append(_workers(prefill.step_time(found.prefill), found.lasts_s + slo.ttft_s))
    if decode is not None and slo.itl_s is not None:
        ends_s = found.lasts_s + _answer_s(found, slo)
        work = found.decode if prefill is None else found.whole
        bounds.append(_workers(decode.step_time(work), ends_s))
        bounds.append(_workers(_held(decode, found) / (decode.num_blocks * decode.layout.block_size), ends_s))
    return max(bounds)


def why_never(
    prefill: WorkerSpec, decode: WorkerSpec, found: WorkloadDemand, slo: Slo, percentile: float
) -> str | None:
    """What no number of such workers can mend: a prompt or a token that takes too long all alone; None for nothing."""
    for group in sorted({need.group for need in found.needs}):
        needs = [need for need in found.needs if need.group == group]
        allowed = (1 - percentile / 100) * len(needs)
        if slo.ttft_s is not None and sum(prefill.step_time(n.prefill) > slo.ttft_s for n in needs) > allowed:
            return f"prompts of {group} take longer than the target even alone"
        num_gaps = sum(n.num_output - 1 for n in needs)
        if slo.itl_s is not None:
            late = sum(n.num_output - 1 for n in needs if decode.step_time(_token(n)) > slo.itl_s)
            if late > (1 - percentile / 100) * num_gaps:
                return f"tokens of {group} take longer than the target even alone"
    return None


def _workers(seconds: float, within_s: float) -> int:
    return math.ceil(seconds / within_s - 1e-9)


def _answer_s(found: WorkloadDemand, slo: Slo) -> float:
    """The longest that an answer may take."""
    longest = max(need.num_output for need in found.needs)
    return (slo.ttft_s or math.inf) + longest * (slo.itl_s or math.inf)


def _held(spec: WorkerSpec, found: WorkloadDemand) -> float:
    """Token seconds of KV, each request's for as long as it decodes alone."""
    return sum(need.num_fresh * (need.num_output - 1) * spec.step_time(_token(need)) for need in found.needs)


def _token(need: Need) -> StepFeatures:
    return StepFeatures(num_decode_seqs=1, decode_context=need.num_prompt)


def _need(ask: ScheduledRequest, block_size: int, seen: set[bytes] | None) -> Need:
    prompt = ask.request.prompt_tokens
    num_cached = 0
    if seen is not None:
        hashes = chain_hashes(root_hash("plan", block_size, ask.request.cache_salt), prompt, block_size)
        hits = 0
        while hits < len(hashes) and hashes[hits] in seen:
            hits += 1
        num_cached = min(hits * block_size, (len(prompt) - 1) // block_size * block_size)
        seen.update(hashes)
    return Need(ask.group, len(prompt) - num_cached, len(prompt), ask.request.sampling.max_tokens)


def _sum(steps: Iterable[StepFeatures]) -> StepFeatures:
    vectors = [step.vector[1:] for step in steps]
    totals = [int(sum(column)) for column in zip(*vectors, strict=True)]
    return StepFeatures(*totals)
