"""Keep the console's history: the records of the last ended requests, and sums of the last minutes by lane and by
tenant. All of it is bounded; callers pass the time."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count, islice
from operator import attrgetter
from typing import Generic, NamedTuple, TypeVar

import msgspec

from tandem.core.quantile_sketch import QuantileSketch
from tandem.gateway.console.schema import RequestCounts
from tandem.gateway.telemetry.request_record import RequestRecord

NUM_RECORDS = 200
SLICE_S = 5.0
NUM_SLICES = 60
"""Number of slices of SLICE_S that are kept: five minutes."""
TENANT_SLICE_S = 60.0
NUM_TENANT_SLICES = 5
MAX_TENANTS = 100
"""Largest number of tenants in a slice; further ones are added up as `OTHER`, which cannot be a tenant's name."""
OTHER = "(others)"
_NUM_EXACT = 128
_BATCH = 256
_NUM_MERGED = 4096
_QUANTILES = (0.5, 0.99)
_lane_and_tenant = attrgetter("lane", "tenant")


class Numbered(NamedTuple):
    """Record of an ended request with its `number`, which counts the ended requests of this gateway from 1 on."""

    number: int
    record: RequestRecord


class BatchedHistogram:
    """Quantile sketch that adds values in batches; adding them one by one would cost several times as much."""

    __slots__ = ("_fresh", "_known")

    def __init__(self, num_exact: int = _NUM_EXACT) -> None:
        self._known = QuantileSketch(exact=num_exact)
        self._fresh: list[float] = []

    def extend(self, values: Iterable[float]) -> None:
        self._fresh.extend(values)
        if len(self._fresh) >= _BATCH:
            self.histogram()

    def histogram(self) -> QuantileSketch:
        """Return the sketch of all values so far."""
        self._known.extend(self._fresh)
        self._fresh.clear()
        return self._known


class Tally(RequestCounts):
    """Sums over ended requests. `first_sum_s`: total seconds to the first token of those `num_first` requests that had
    one."""

    first_sum_s: float = 0.0
    num_first: int = 0

    def count(self, other: Tally) -> None:
        self.num_answers += other.num_answers
        self.num_failed += other.num_failed
        self.num_prompt += other.num_prompt
        self.num_cached += other.num_cached
        self.num_output += other.num_output
        self.first_sum_s += other.first_sum_s
        self.num_first += other.num_first


class EndedBatch(Tally, kw_only=True):
    """Sums over requests that ended together, of which there is at least one.

    `first_s`: seconds to the first token, for each request that had one. `token_s`: mean seconds between two tokens,
    for each request that had two."""

    longest_gap_s: float
    first_s: Sequence[float]
    token_s: Sequence[float]

    @classmethod
    def of(cls, records: Sequence[RequestRecord]) -> EndedBatch:
        usages = [record.usage for record in records]
        first_s = [record.first_token_s for record in records if record.first_token_s is not None]
        return cls(
            num_answers=len(records),
            num_failed=sum(map(has_failed, records)),
            num_prompt=sum(usage.num_prompt for usage in usages),
            num_cached=sum(usage.num_cached or 0 for usage in usages),
            num_output=sum(usage.num_output for usage in usages),
            first_sum_s=sum(first_s),
            num_first=len(first_s),
            longest_gap_s=max(record.longest_gap_s for record in records),
            first_s=first_s,
            token_s=[record.token_s for record in records if record.token_s is not None],
        )


class LaneFigures(Tally):
    """Sums and distributions over requests; fields as in EndedBatch."""

    longest_gap_s: float = 0.0
    first_s: BatchedHistogram = msgspec.field(default_factory=BatchedHistogram)
    token_s: BatchedHistogram = msgspec.field(default_factory=BatchedHistogram)

    def add(self, ended: EndedBatch) -> None:
        self.count(ended)
        self.longest_gap_s = max(self.longest_gap_s, ended.longest_gap_s)
        self.first_s.extend(ended.first_s)
        self.token_s.extend(ended.token_s)

    def merge(self, other: LaneFigures) -> None:
        self.count(other)
        self.longest_gap_s = max(self.longest_gap_s, other.longest_gap_s)
        self.first_s.histogram().merge(other.first_s.histogram())
        self.token_s.histogram().merge(other.token_s.histogram())


Figures = TypeVar("Figures", bound=Tally)


@dataclass(slots=True)
class Slice(Generic[Figures]):
    """Figures by lane or by tenant over the slice of time `[index * width, (index + 1) * width)` of the gateway's
    clock. `number`: of the last request that ended in the slice."""

    index: int
    number: int = 0
    figures: dict[str, Figures] = field(default_factory=dict)


class ConsoleState:
    """Own the history of one gateway. `number`: of the last ended request; 0: none has ended. Times are seconds of the
    gateway's clock."""

    def __init__(self) -> None:
        self.number = 0
        self._records: deque[Numbered] = deque(maxlen=NUM_RECORDS)
        self._slices: deque[Slice[LaneFigures]] = deque(maxlen=NUM_SLICES)
        self._tenants: deque[Slice[Tally]] = deque(maxlen=NUM_TENANT_SLICES)
        self._recent: tuple[tuple[int, int], LaneFigures] | None = None

    def add(self, records: Sequence[RequestRecord], now: float) -> None:
        """Add requests that have ended."""
        self._records.extend(map(Numbered, count(self.number + 1), records))
        self.number += len(records)
        lanes = self._current(self._slices, int(now // SLICE_S))
        tenants = self._current(self._tenants, int(now // TENANT_SLICE_S))
        groups: defaultdict[tuple[str, str], list[RequestRecord]] = defaultdict(list)
        for record in records:
            groups[_lane_and_tenant(record)].append(record)
        for (lane, tenant), group in groups.items():
            ended = EndedBatch.of(group)
            lanes.setdefault(lane, LaneFigures()).add(ended)
            name = tenant if tenant in tenants or len(tenants) < MAX_TENANTS else OTHER
            tenants.setdefault(name, Tally()).count(ended)

    def records(self, since: int, tenant: str | None) -> list[Numbered]:
        """Return the kept records after number `since`, the newest first; of one tenant, or with None of all."""
        num_new = max(0, self.number - since)
        found = islice(reversed(self._records), num_new)
        return [each for each in found if tenant is None or each.record.tenant == tenant]

    def slices(self, since: int, now: float) -> Iterator[Slice[LaneFigures]]:
        """Iterate over the kept slices in which a request after number `since` ended, the oldest first."""
        first = int(now // SLICE_S) - NUM_SLICES + 1
        return (each for each in self._slices if each.index >= first and each.number > since)

    def recent(self, num_slices: int, now: float) -> LaneFigures:
        """Return the sums of all lanes over the last `num_slices`; they are cached for up to a second."""
        first = int(now // SLICE_S) - num_slices + 1
        key = (int(now), first)
        if self._recent is None or self._recent[0] != key:
            total = LaneFigures(first_s=BatchedHistogram(_NUM_MERGED), token_s=BatchedHistogram(_NUM_MERGED))
            for each in (lane for part in self._slices if part.index >= first for lane in part.figures.values()):
                total.merge(each)
            self._recent = key, total
        return self._recent[1]

    def tenants(self, now: float) -> dict[str, Tally]:
        """Return the sums of each tenant whose requests ended in the last NUM_TENANT_SLICES, by name."""
        first = int(now // TENANT_SLICE_S) - NUM_TENANT_SLICES + 1
        found: dict[str, Tally] = {}
        for name, tally in (item for part in self._tenants if part.index >= first for item in part.figures.items()):
            found.setdefault(name, Tally()).count(tally)
        return found

    def __repr__(self) -> str:
        return f"<console state of {self.number} answers, {len(self._records)} of them whole>"

    # ---- inside

    def _current(self, slices: deque[Slice[Figures]], index: int) -> dict[str, Figures]:
        """Return the figures of the slice `index`, in which the request `number` has ended."""
        if not slices or slices[-1].index < index:
            slices.append(Slice(index))
        slices[-1].number = self.number
        return slices[-1].figures


def percentiles(values: BatchedHistogram) -> tuple[float, float] | None:
    """Return p50 and p99; None where there are no values."""
    histogram = values.histogram()
    if not histogram.count:
        return None
    p50, p99 = histogram.percentiles(_QUANTILES)
    return p50, p99


def has_failed(record: RequestRecord) -> bool:
    """Return whether a request was refused, or ended for another reason than its client's disconnect."""
    return record.outcome not in ("finished", "cancelled")
