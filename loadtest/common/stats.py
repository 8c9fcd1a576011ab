"""Summarise runs: percentiles, rates, goodput and ratios of pairs, as pure functions of records."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import msgspec

from loadtest.client.records import Record, Run, Step
from tandem.core.quantile_sketch import LatencySummary, QuantileSketch
from tandem.core.slo import Slo


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """Summary of one run, or of several runs of one system pooled.

    Rates are per second of the runs' wall times together. `tpot` is the time per output token after the first, one
    value per request; `itl` pools the gaps of all requests. `good_rate` is requests per second that met the SLO,
    `good_share` their share. `late_s` is the largest delay of the client itself.
    """

    num_requests: int
    num_failed: int
    wall_s: float
    ttft: LatencySummary
    itl: LatencySummary | None
    tpot: LatencySummary | None
    prompt_rate: float
    output_rate: float
    good_share: float
    good_rate: float
    late_s: float
    ttft_by_group: dict[str, LatencySummary]


def meets(record: Record, slo: Slo) -> bool:
    """Return whether the request met the latency targets; a failed request does not."""
    if record.error:
        return False
    gaps = record.gaps_s
    return slo.is_met(record.ttft_s, slo.num_late(gaps), len(gaps))


def percentile(values: Sequence[float], share: float) -> float:
    """Return the percentile of the values at `share` (0 to 1), interpolated linearly between the two nearest ranks as
    in numpy.

    Raises ValueError without values.
    """
    if not values:
        raise ValueError("no values")
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def spread(values: Sequence[float]) -> LatencySummary | None:
    """Return the exact summary of the values; None without values."""
    return QuantileSketch(values, exact=len(values)).spread()


def summarise(runs: Sequence[Run], slo: Slo) -> Summary | None:
    """Summarise the runs of one workload at one system together; None when none of their requests was answered."""
    records = [record for run in runs for record in run.records]
    whole = [record for record in records if not record.error]
    ttft = spread([record.ttft_s for record in whole])
    if ttft is None:
        return None
    wall_s = sum(run.wall_s for run in runs)
    num_good = sum(meets(record, slo) for record in records)
    return Summary(
        num_requests=len(records),
        num_failed=len(records) - len(whole),
        wall_s=wall_s,
        ttft=ttft,
        itl=spread([gap for record in whole for gap in record.gaps_s]),
        tpot=spread([r.decode_s / (r.num_output_tokens - 1) for r in whole if r.num_output_tokens > 1]),
        prompt_rate=sum(record.num_prompt_tokens for record in whole) / wall_s,
        output_rate=sum(record.num_output_tokens for record in whole) / wall_s,
        good_share=num_good / len(records),
        good_rate=num_good / wall_s,
        late_s=max(record.lateness_s for record in records),
        ttft_by_group=_by_group(whole),
    )


def _by_group(records: Iterable[Record]) -> dict[str, LatencySummary]:
    groups: dict[str, list[float]] = {}
    for record in records:
        groups.setdefault(record.group, []).append(record.ttft_s)
    spreads = {group: spread(values) for group, values in groups.items()}
    return {group: found for group, found in spreads.items() if found is not None}


# ---- steps


class Overhead(msgspec.Struct, frozen=True, kw_only=True):
    """Time of a step outside the model, as medians in seconds over steps with at least `at_least` decodes and no
    prefill.

    `share` is the median of each step's share outside the model, so that a step delayed by the machine does not distort
    it.
    """

    at_least: int
    num_steps: int
    plan_s: float
    batch_s: float
    commit_s: float
    stream_s: float
    model_s: float
    share: float


def overhead(steps: Sequence[Step], at_least: int) -> Overhead | None:
    """Return the overhead over the steps with at least `at_least` decodes and no prefill; None when there is no such
    step."""
    chosen = [step for step in steps if step.num_decodes >= at_least and not step.num_prefill_tokens]
    if not chosen:
        return None
    return Overhead(
        at_least=at_least,
        num_steps=len(chosen),
        plan_s=statistics.median(step.plan_s for step in chosen),
        batch_s=statistics.median(step.batch_s for step in chosen),
        commit_s=statistics.median(step.commit_s for step in chosen),
        stream_s=statistics.median(step.stream_s for step in chosen),
        model_s=statistics.median(step.model_s for step in chosen),
        share=statistics.median(step.overhead_s / step.total_s for step in chosen),
    )


# ---- comparisons


VOID = 0.15
"""Two runs whose probes differ in speed by more than this share are not compared."""


class StatsPoint(NamedTuple):
    """Value of one run, with the machine's speed.

    `speed` comes from the probes around the run; None when there were none.
    """

    at: float
    value: float
    speed: float | None = None


class Ratio(msgspec.Struct, frozen=True):
    """Ratios of neighbouring runs of two systems.

    Median, least and greatest of `count` ratios; `num_void` more pairs were not compared, because the machine's speed
    had changed.
    """

    count: int
    median: float
    least: float
    greatest: float
    num_void: int = 0


def pair_ratio(ours: Sequence[StatsPoint], theirs: Sequence[StatsPoint]) -> Ratio | None:
    """Return the ratios ours / theirs of runs in alternation A B A B A; None when no pair can be compared.

    Each of their runs is paired with our nearest run before it and our nearest after it, so that a slow drift of the
    machine favours neither.
    """
    pairs: list[tuple[StatsPoint, StatsPoint]] = []
    for their in theirs:
        before = max((our for our in ours if our.at < their.at), default=None)
        after = min((our for our in ours if our.at > their.at), default=None)
        pairs += [(our, their) for our in (before, after) if our is not None and their.value]
    ratios = [our.value / their.value for our, their in pairs if not _is_void(our, their)]
    if not ratios:
        return None
    return Ratio(len(ratios), statistics.median(ratios), min(ratios), max(ratios), len(pairs) - len(ratios))


def _is_void(a: StatsPoint, b: StatsPoint) -> bool:
    if a.speed is None or b.speed is None:
        return False
    return abs(a.speed - b.speed) > VOID * max(a.speed, b.speed)


class Agreement(msgspec.Struct, frozen=True):
    """Agreement of two systems' answers to the same prompts.

    `first_differences` maps a request's name to the index of the first token that differs (the first character where a
    side reports no ids).
    """

    num_equal: int
    num_compared: int
    by_tokens: bool
    first_differences: dict[str, int]


def agreement(ours: Iterable[Record], theirs: Iterable[Record]) -> Agreement:
    """Compare the answers in two systems' records of the same requests and the same seed; failed records are left
    out."""
    others = {record.name: record for record in theirs if not record.error}
    pairs = [(record, others[record.name]) for record in ours if not record.error and record.name in others]
    by_tokens = all(a.tokens is not None and b.tokens is not None for a, b in pairs)
    differences: dict[str, int] = {}
    for mine, other in pairs:
        place = _first_difference(mine.tokens or (), other.tokens or ()) if by_tokens else None
        place = place if by_tokens else _first_difference(mine.text, other.text)
        if place is not None:
            differences[mine.name] = place
    return Agreement(len(pairs) - len(differences), len(pairs), by_tokens, differences)


def _first_difference(a: Sequence[int] | str, b: Sequence[int] | str) -> int | None:
    if a == b:
        return None
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
