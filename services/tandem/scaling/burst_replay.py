"""The bursts of the past, played again at another level: how much of the work would come too late; never knows what is
counted.

Formulas of queues take arrivals to be independent of each other. Where they are not (one client sends for half a
minute, then another), only what has come says how they come.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from itertools import accumulate

from tandem.scaling.demand_history import Sample


def shape(samples: Sequence[Sample], around_s: float) -> list[tuple[float, float]]:
    """(seconds, rate by the mean rate in the `around_s` before and after) of each sample, so that a level that changes
    slowly is none of it."""
    ends = [one.at for one in samples]
    seconds = [0.0, *accumulate(one.seconds for one in samples)]
    amounts = [0.0, *accumulate(one.amount for one in samples)]
    out: list[tuple[float, float]] = []
    for one in samples:
        first, last = bisect_left(ends, one.at - around_s), bisect_right(ends, one.at + around_s)
        level = (amounts[last] - amounts[first]) / (seconds[last] - seconds[first])
        out.append((one.seconds, one.rate / level if level > 0 else 0.0))
    return out


def late_share(bursts: Sequence[tuple[float, float]], load: float, num_workers: int, slack_s: float) -> float:
    """Of work that comes as these bursts, `load` seconds of it in a second on average: the share that has to wait for
    more than `slack_s`, as a fluid."""
    most = slack_s * num_workers
    behind = late = whole = 0.0
    for seconds, ratio in bursts:
        came = seconds * ratio * load
        after = behind + came - seconds * num_workers
        late += came * _share_above(behind, after, most)
        whole += came
        behind = max(0.0, after)
    return late / whole if whole > 0 else 0.0


def least_workers(bursts: Sequence[tuple[float, float]], load: float, slack_s: float, tolerated: float) -> int:
    number = 1
    while late_share(bursts, load, number, slack_s) > tolerated:
        number += 1
    return number


def _share_above(begin: float, end: float, limit: float) -> float:
    """Of a way from `begin` to `end`."""
    low, high = min(begin, end), max(begin, end)
    if low >= limit:
        return 1.0
    return (high - limit) / (high - low) if high > limit else 0.0
