"""Compute the least work of a workload and the least number of workers that it needs, without simulation."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from tandem.core.slo import Slo
from tandem.core.step_cost import StepFeatures
from tandem.kv.hashing import chain_hashes, root_hash
from tandem.sim.cluster.worker import WorkerSpec
from tandem.workload.scheduled_request import ScheduledRequest


@dataclass(frozen=True, slots=True)
class Need:
    """Tokens of one request, which belongs to the class `group`.

    `num_fresh`: the prompt tokens that must be computed, because they are in no prefix shared with an earlier request.
    `num_prompt`: all prompt tokens. `num_output`: the most output tokens that the request allows.
    """

    group: str
    num_fresh: int
    num_prompt: int
    num_output: int

    @property
    def prefill(self) -> StepFeatures:
        """Return the features of one step that computes the whole uncached part of the prompt."""
        cached = self.num_prompt - self.num_fresh
        pairs = self.num_fresh * cached + self.num_fresh * (self.num_fresh + 1) // 2
        return StepFeatures(num_prefill_tokens=self.num_fresh, num_prefill_pairs=pairs)

    @property
    def decode(self) -> StepFeatures:
        """Return the features of one step that computes all output tokens but the first at once."""
        number = self.num_output - 1
        context = number * self.num_prompt + number * (number + 1) // 2
        return StepFeatures(num_decode_seqs=number, decode_context=context)


@dataclass(frozen=True, slots=True)
class WorkloadDemand:
    """Lower bound of what a whole workload demands: later turns of conversations are left out, and prefix caches keep
    everything.

    `needs`: one per request. `lasts_s`: seconds between the first and the last arrival."""

    needs: tuple[Need, ...]
    lasts_s: float

    @property
    def prefill(self) -> StepFeatures:
        return _sum(need.prefill for need in self.needs)

    @property
    def decode(self) -> StepFeatures:
        return _sum(need.decode for need in self.needs)


def demand(requests: Sequence[ScheduledRequest], block_size: int, *, has_cache: bool) -> WorkloadDemand:
    """Return the demand of a workload: the tokens of each request, and the seconds over which the requests arrive.

    `has_cache`: whether workers cache prefixes of whole blocks of `block_size` tokens. If so, the leading blocks of a
    prompt that an earlier prompt has as well do not count as fresh; otherwise every prompt token does. Raises
    ValueError when `requests` is empty."""
    if not requests:
        raise ValueError("the workload has no request")
    seen: set[bytes] = set()
    needs = tuple(_need(scheduled, block_size, seen if has_cache else None) for scheduled in requests)
    return WorkloadDemand(
        needs, max(scheduled.due_s for scheduled in requests) - min(scheduled.due_s for scheduled in requests)
    )


def least_workers(
    prefill: WorkerSpec | None, decode: WorkerSpec | None, found: WorkloadDemand, slo: Slo, percentile: float
) -> int:
    """Return a lower bound, at least 1, of the workers of one pool that compute the workload `found` within the targets
    `slo`, which `percentile` percent of each class must meet.

    `prefill`: the kind of worker if the pool computes the prompts, else None. `decode`: the kind of worker if the pool
    computes the output tokens, else None; a pool of mixed workers has both. All work must be done between the first
    arrival and the latest time that the targets allow after the last arrival, except that of the requests that may be
    late; these are assumed to be the most expensive ones of each class. Work without a target is ignored. The work is
    assumed to take as long as one step that computes all of it; in several steps it takes longer, because each of them
    reads the weights again. Decode workers must also have enough KV blocks.
    """
    bounds = [1]
    if prefill is not None and slo.ttft_s is not None:
        needs = _in_time(found.needs, percentile, lambda need: prefill.step_time(need.prefill))
        bounds.append(_workers(prefill.step_time(_sum(need.prefill for need in needs)), found.lasts_s + slo.ttft_s))
    if decode is not None and slo.itl_s is not None:
        ends_s = found.lasts_s + _answer_s(found, slo)
        works = {need: need.decode if prefill is None else _sum((need.prefill, need.decode)) for need in found.needs}
        needs = _in_time(found.needs, percentile, lambda need: decode.step_time(works[need]))
        bounds.append(_workers(decode.step_time(_sum(works[need] for need in needs)), ends_s))
        needs = _in_time(found.needs, percentile, lambda need: _held(decode, need))
        held = sum(_held(decode, need) for need in needs)
        bounds.append(_workers(held / (decode.num_blocks * decode.layout.block_size), ends_s))
    return max(bounds)


def why_never(
    prefill: WorkerSpec, decode: WorkerSpec, found: WorkloadDemand, slo: Slo, percentile: float
) -> str | None:
    """Return why no number of workers of these kinds meets the targets `slo` for the workload `found`; None if no
    reason is known.

    The reason is a class of requests that fails even on workers with no other load: more than (100 - `percentile`) % of
    its prompts take longer than the TTFT target, or more than (100 - `percentile`) % of its token gaps are longer than
    the ITL target. `prefill`, `decode`: the kind of worker that computes prompts, and the kind that decodes.
    """
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
    """Return the longest time that the longest answer may take within the targets."""
    longest = max(need.num_output for need in found.needs)
    return (slo.ttft_s or math.inf) + longest * (slo.itl_s or math.inf)


def _held(spec: WorkerSpec, need: Need) -> float:
    """Return the token seconds of KV that a request holds while it decodes without other load."""
    return need.num_fresh * (need.num_output - 1) * spec.step_time(_token(need))


def _in_time(needs: Iterable[Need], percentile: float, cost: Callable[[Need], float]) -> list[Need]:
    """Return the requests without those that may be late: of each class the share above `percentile` percent with the
    greatest `cost`."""
    classes: defaultdict[str, list[Need]] = defaultdict(list)
    for need in needs:
        classes[need.group].append(need)
    out: list[Need] = []
    for members in classes.values():
        members.sort(key=cost)
        out += members[: len(members) - int((1 - percentile / 100) * len(members) + 1e-9)]
    return out


def _token(need: Need) -> StepFeatures:
    return StepFeatures(num_decode_seqs=1, decode_context=need.num_prompt)


def _need(scheduled: ScheduledRequest, block_size: int, seen: set[bytes] | None) -> Need:
    prompt = scheduled.request.prompt_tokens
    num_cached = 0
    if seen is not None:
        hashes = chain_hashes(root_hash("plan", block_size, scheduled.request.cache_salt), prompt, block_size)
        hits = 0
        while hits < len(hashes) and hashes[hits] in seen:
            hits += 1
        num_cached = min(hits * block_size, (len(prompt) - 1) // block_size * block_size)
        seen.update(hashes)
    return Need(scheduled.group, len(prompt) - num_cached, len(prompt), scheduled.request.sampling.max_tokens)


def _sum(steps: Iterable[StepFeatures]) -> StepFeatures:
    vectors = [step.vector[1:] for step in steps]
    totals = [int(sum(column)) for column in zip(*vectors, strict=True)]
    return StepFeatures(*totals)
