"""Aggregate records as they arrive: distributions, errors, goodput, a timeline and a sample.

Memory grows with classes, tenants and windows, not with requests: a record is dropped once it is counted.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Iterable
from itertools import pairwise

from loadtest.client.records import Record
from loadtest.common.distribution import distribution
from loadtest.common.stats import meets
from loadtest.load.load_report import METRICS, LoadWindow, Sampled, Scope
from tandem.core.quantile_sketch import QuantileSketch
from tandem.core.slo import Slo

WINDOW_S = 10.0
SAMPLE = 10_000
"""Number of single requests that a report keeps for comparisons; a larger run is sampled uniformly."""
_EXACT = 256
"""Number of a window's gaps that are kept exactly; a long run has many windows."""


class _Cell:
    """Figures of one class and tenant. Latencies are of requests that ended well."""

    def __init__(self) -> None:
        self.num_requests = self.num_good = self.num_prompt_tokens = self.num_output_tokens = 0
        self.errors: Counter[str] = Counter()
        self.times = {metric: QuantileSketch() for metric in METRICS}

    def add(self, record: Record, is_good: bool) -> None:
        self.num_requests += 1
        self.num_good += is_good
        if record.error_kind:
            self.errors[record.error_kind] += 1
            return
        self.num_prompt_tokens += record.num_prompt_tokens
        self.num_output_tokens += record.num_output_tokens
        for metric, values in timed(record).items():
            self.times[metric].extend(values)

    def merge(self, other: _Cell) -> None:
        self.num_requests += other.num_requests
        self.num_good += other.num_good
        self.num_prompt_tokens += other.num_prompt_tokens
        self.num_output_tokens += other.num_output_tokens
        self.errors += other.errors
        for metric, histogram in self.times.items():
            histogram.merge(other.times[metric])

    def scope(self, kind: str, name: str, wall_s: float) -> Scope:
        return Scope(
            kind=kind,
            name=name,
            num_requests=self.num_requests,
            num_whole=self.num_requests - self.errors.total(),
            num_good=self.num_good,
            errors=dict(sorted(self.errors.items())),
            request_rate=(self.num_requests - self.errors.total()) / wall_s,
            good_rate=self.num_good / wall_s,
            prompt_rate=self.num_prompt_tokens / wall_s,
            output_rate=self.num_output_tokens / wall_s,
            times={m: found for m, h in self.times.items() if (found := distribution(h)) is not None},
        )


def timed(record: Record) -> dict[str, Iterable[float]]:
    """Return the values of each of `METRICS` for one complete answer.

    TTFT, the first gap and the rest add up to the time until the last token.
    """
    gaps = record.gaps_s
    found: dict[str, Iterable[float]] = {"ttft": [record.ttft_s], "itl": gaps, "e2e": [record.e2e_s]}
    found["first_gap"] = gaps[:1]
    found["rest"] = [sum(gaps[1:])] if len(gaps) > 1 else []
    found["tpot"] = [record.decode_s / (record.num_output_tokens - 1)] if record.num_output_tokens > 1 else []
    return found


class _Window:
    def __init__(self) -> None:
        self.num_sent = self.num_ended = self.num_failed = self.num_tokens = self.most_open = 0
        self.gaps = QuantileSketch(exact=_EXACT)

    def summary(self, start_s: float, seconds: float) -> LoadWindow:
        return LoadWindow(
            start_s=start_s,
            num_sent=self.num_sent,
            num_ended=self.num_ended,
            num_failed=self.num_failed,
            output_rate=self.num_tokens / seconds,
            itl_p99_s=self.gaps.percentile(0.99) if self.gaps.count else None,
            most_open=self.most_open,
        )


class StatsCollector:
    """Collect the statistics of one run; `seed` determines which requests are sampled."""

    def __init__(self, slo: Slo, seed: int = 0) -> None:
        self.num_ended = self.num_failed = self.num_tokens = 0
        self.last_end_s = 0.0
        self.late = QuantileSketch()
        self.examples: dict[str, str] = {}
        self._slo = slo
        self._cells: dict[tuple[str, str], _Cell] = {}
        self._windows: dict[int, _Window] = {}
        self._sample: list[Sampled] = []
        self._chance = random.Random(f"sample {seed}")

    def sent(self, at_s: float, num_open: int) -> None:
        """Record that a request was sent, with the number of requests now open."""
        window = self._at(at_s)
        window.num_sent += 1
        window.most_open = max(window.most_open, num_open)

    def ended(self, record: Record, num_open: int) -> None:
        """Record that a request has ended, with the number of requests still open."""
        is_good = meets(record, self._slo)
        self.num_ended += 1
        self.num_tokens += record.num_output_tokens
        self.last_end_s = max(self.last_end_s, record.ended_s)
        self.late.add(record.lateness_s)
        self._cells.setdefault((record.group, record.tenant), _Cell()).add(record, is_good)
        if record.error_kind:
            self.num_failed += 1
            self.examples.setdefault(record.error_kind, f"{record.name}: {record.error}"[:300])
        else:
            self._keep(record, is_good)
        self._place_in_time(record, num_open)

    def scopes(self, wall_s: float) -> tuple[Scope, ...]:
        """Return the figures of all requests, then of each class, then of each tenant if there are any."""
        whole, groups, tenants = _Cell(), dict[str, _Cell](), dict[str, _Cell]()
        for (group, tenant), cell in sorted(self._cells.items()):
            for one in (whole, groups.setdefault(group, _Cell()), tenants.setdefault(tenant, _Cell())):
                one.merge(cell)
        summary = [whole.scope("all", "all", wall_s), *(c.scope("class", n, wall_s) for n, c in groups.items())]
        if set(tenants) - {""}:
            summary += [cell.scope("tenant", name, wall_s) for name, cell in sorted(tenants.items())]
        return tuple(summary)

    def windows(self, wall_s: float) -> tuple[LoadWindow, ...]:
        """Return the windows from the beginning to `wall_s`, without gaps between them; the last one may be shorter."""
        starts = [i * WINDOW_S for i in range(max(math.ceil(wall_s / WINDOW_S), 1))]
        return tuple(self._at(start).summary(start, min(WINDOW_S, wall_s - start)) for start in starts)

    def sample(self) -> tuple[Sampled, ...]:
        return tuple(self._sample)

    def _keep(self, record: Record, is_good: bool) -> None:
        """Sample requests that ended well uniformly (Vitter's algorithm R)."""
        place = self.num_ended - self.num_failed - 1
        if place >= SAMPLE:
            place = self._chance.randrange(place + 1)
            if place >= SAMPLE:
                return
        tpot = next(iter(timed(record)["tpot"]), None)
        one = Sampled(
            group=record.group,
            tenant=record.tenant,
            is_good=is_good,
            ttft_s=round(record.ttft_s, 6),
            e2e_s=round(record.e2e_s, 6),
            tpot_s=None if tpot is None else round(tpot, 6),
            gaps_s=tuple(round(gap, 6) for gap in record.gaps_s),
        )
        self._sample[place : place + 1] = [one]

    def _place_in_time(self, record: Record, num_open: int) -> None:
        window = self._at(record.ended_s)
        window.num_ended += 1
        window.num_failed += bool(record.error_kind)
        window.most_open = max(window.most_open, num_open)
        for stamp in record.stamps_s:
            self._at(stamp).num_tokens += 1
        for before, after in pairwise(sorted(set(record.stamps_s))):
            self._at(after).gaps.add(after - before)

    def _at(self, at_s: float) -> _Window:
        index = int(at_s // WINDOW_S)
        window = self._windows.get(index)
        if window is None:
            window = self._windows[index] = _Window()
        return window
