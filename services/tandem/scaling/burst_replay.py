"""Replay past bursts at another load level and compute the fraction of work that would be late.

Queueing formulas assume independent arrivals. Where arrivals depend on each other (one client sends for half a minute,
then another), only the history shows their pattern.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from itertools import accumulate

from tandem.scaling.forecast import Sample


def shape(samples: Sequence[Sample], around_s: float) -> list[tuple[float, float]]:
    """Return the shape of past bursts: for each sample a pair of its seconds and its rate divided by the mean rate
    around it.

    The mean is over the samples that end within `around_s` seconds before and after the end of the sample, so that a
    slowly changing level has no effect. `late_share` and `least_workers` take the result.
    """
    ends = [sample.at for sample in samples]
    seconds = [0.0, *accumulate(sample.seconds for sample in samples)]
    amounts = [0.0, *accumulate(sample.amount for sample in samples)]
    out: list[tuple[float, float]] = []
    for sample in samples:
        first = bisect_left(ends, sample.at - around_s)
        last = bisect_right(ends, sample.at + around_s)
        level = (amounts[last] - amounts[first]) / (seconds[last] - seconds[first])
        out.append((sample.seconds, sample.rate / level if level > 0 else 0.0))
    return out


def late_share(bursts: Sequence[tuple[float, float]], load: float, num_workers: int, slack_s: float) -> float:
    """Return the fraction of work that would wait for more than `slack_s` seconds if past bursts repeated; 0 without
    work.

    `bursts`: the result of `shape`. `load`: seconds of work that arrive per second on average. Work is treated as a
    fluid, of which `num_workers` workers take equal parts.
    """
    max_backlog = slack_s * num_workers
    backlog = 0.0
    late = 0.0
    total = 0.0
    for seconds, ratio in bursts:
        arrived = seconds * ratio * load
        after = backlog + arrived - seconds * num_workers
        late += arrived * _share_above(backlog, after, max_backlog)
        total += arrived
        backlog = max(0.0, after)
    return late / total if total > 0 else 0.0


def least_workers(bursts: Sequence[tuple[float, float]], load: float, slack_s: float, tolerated: float) -> int:
    """Return the fewest workers with which at most the fraction `tolerated` of the work waits for more than `slack_s`
    seconds.

    `bursts` and `load` are those of `late_share`.
    """
    num_workers = 1
    while late_share(bursts, load, num_workers, slack_s) > tolerated:
        num_workers += 1
    return num_workers


def _share_above(begin: float, end: float, limit: float) -> float:
    """Return the fraction of the segment from `begin` to `end` that lies above `limit`."""
    low = min(begin, end)
    high = max(begin, end)
    if low >= limit:
        return 1.0
    return (high - limit) / (high - low) if high > limit else 0.0
