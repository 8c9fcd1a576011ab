"""What the console remembers of answers that have ended: the last ones whole, of the last minutes figures by lane and
by tenant; never reads a clock, and never grows beyond its bounds."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice

from tandem.core.histogram import Histogram
from tandem.gateway.record import AnswerRecord

NUM_RECORDS = 200
SLICE_S = 5.0
NUM_SLICES = 60
"""Five minutes."""
TENANT_SLICE_S = 60.0
NUM_TENANT_SLICES = 5
MAX_TENANTS = 100
"""Of a slice; those beyond are added up as `OTHER`, which is no tenant's name."""
OTHER = "(others)"
_NUM_EXACT = 128
_SHARES = (0.5, 0.99)


@dataclass(frozen=True, slots=True)
class Numbered:
    """`number` counts the answers of this gateway from 1 on."""

    number: int
    record: AnswerRecord


@dataclass(slots=True)
class LaneSlice:
    """Answers of one lane that ended within one slice of time. Seconds: `first_s` to the first token, `token_s` between
    tokens, as the mean of each answer."""

    num_answers: int = 0
    num_failed: int = 0
    num_prompt: int = 0
    num_cached: int = 0
    num_output: int = 0
    longest_gap_s: float = 0.0
    first_s: Histogram = field(default_factory=lambda: Histogram(exact=_NUM_EXACT))
    token_s: Histogram = field(default_factory=lambda: Histogram(exact=_NUM_EXACT))

    def add(self, record: AnswerRecord) -> None:
        self.num_answers += 1
        self.num_failed += has_failed(record)
        self.num_prompt += record.usage.num_prompt
        self.num_cached += record.usage.num_cached or 0
        self.num_output += record.usage.num_output
        self.longest_gap_s = max(self.longest_gap_s, record.longest_gap_s)
        if record.first_token_s is not None:
            self.first_s.add(record.first_token_s)
        if record.token_s is not None:
            self.token_s.add(record.token_s)


@dataclass(slots=True)
class Slice:
    """`[index * SLICE_S, (index + 1) * SLICE_S)` of the gateway's clock. `number` is that of its last answer."""

    index: int
    number: int = 0
    lanes: dict[str, LaneSlice] = field(default_factory=dict)


@dataclass(slots=True)
class TenantFigures:
    """Of one tenant's answers that ended in the last minutes. Sums are in seconds, over as many as have them."""

    num_answers: int = 0
    num_failed: int = 0
    num_prompt: int = 0
    num_cached: int = 0
    num_output: int = 0
    first_sum_s: float = 0.0
    num_first: int = 0

    def add(self, record: AnswerRecord) -> None:
        first_s = record.first_token_s
        usage = record.usage
        self.take(
            TenantFigures(
                num_answers=1,
                num_failed=has_failed(record),
                num_prompt=usage.num_prompt,
                num_cached=usage.num_cached or 0,
                num_output=usage.num_output,
                first_sum_s=first_s or 0.0,
                num_first=first_s is not None,
            )
        )

    def take(self, other: TenantFigures) -> None:
        self.num_answers += other.num_answers
        self.num_failed += other.num_failed
        self.num_prompt += other.num_prompt
        self.num_cached += other.num_cached
        self.num_output += other.num_output
        self.first_sum_s += other.first_sum_s
        self.num_first += other.num_first


class ConsoleState:
    """`number` is that of the last answer; 0: none has ended. Times are seconds of the gateway's clock."""

    __slots__ = ("_recent", "_records", "_slices", "_tenants", "number")

    def __init__(self) -> None:
        self.number = 0
        self._records: deque[Numbered] = deque(maxlen=NUM_RECORDS)
        self._slices: deque[Slice] = deque(maxlen=NUM_SLICES)
        self._tenants: deque[tuple[int, dict[str, TenantFigures]]] = deque(maxlen=NUM_TENANT_SLICES)
        self._recent: tuple[tuple[int, int], LaneSlice] | None = None

    def add(self, record: AnswerRecord, now: float) -> None:
        """An answer has ended."""
        self.number += 1
        self._records.append(Numbered(self.number, record))
        current = self._current(now)
        current.number = self.number
        current.lanes.setdefault(record.lane, LaneSlice()).add(record)
        tenants = self._current_tenants(now)
        name = record.tenant if record.tenant in tenants or len(tenants) < MAX_TENANTS else OTHER
        tenants.setdefault(name, TenantFigures()).add(record)

    def records(self, since: int, tenant: str | None) -> list[Numbered]:
        """Those after number `since`, the last first; of one tenant, or of all."""
        num_new = max(0, self.number - since)
        found = islice(reversed(self._records), num_new)
        return [each for each in found if tenant is None or each.record.tenant == tenant]

    def slices(self, since: int, now: float) -> Iterator[Slice]:
        """Those of the last minutes in which anything ended after answer `since`, the first first."""
        first = int(now // SLICE_S) - NUM_SLICES + 1
        return (each for each in self._slices if each.index >= first and each.number > since)

    def recent(self, num_slices: int, now: float) -> LaneSlice:
        """All lanes together, over the last `num_slices`."""
        first = int(now // SLICE_S) - num_slices + 1
        key = (self.number, first)
        if self._recent is None or self._recent[0] != key:
            total = LaneSlice(first_s=Histogram(), token_s=Histogram())
            for each in (lane for part in self._slices if part.index >= first for lane in part.lanes.values()):
                _take(total, each)
            self._recent = key, total
        return self._recent[1]

    def tenants(self, now: float) -> dict[str, TenantFigures]:
        """By name, those who asked something in the last minutes."""
        first = int(now // TENANT_SLICE_S) - NUM_TENANT_SLICES + 1
        found: dict[str, TenantFigures] = {}
        for index, slice_ in self._tenants:
            for name, figures in slice_.items() if index >= first else ():
                found.setdefault(name, TenantFigures()).take(figures)
        return found

    def __repr__(self) -> str:
        return f"<console state of {self.number} answers, {len(self._records)} of them whole>"

    # ---- inside

    def _current(self, now: float) -> Slice:
        index = int(now // SLICE_S)
        if not self._slices or self._slices[-1].index < index:
            self._slices.append(Slice(index))
        return self._slices[-1]

    def _current_tenants(self, now: float) -> dict[str, TenantFigures]:
        index = int(now // TENANT_SLICE_S)
        if not self._tenants or self._tenants[-1][0] < index:
            self._tenants.append((index, {}))
        return self._tenants[-1][1]


def percentiles(histogram: Histogram) -> tuple[float, float] | None:
    """p50 and p99; None of no values."""
    if not histogram.count:
        return None
    p50, p99 = histogram.percentiles(_SHARES)
    return p50, p99


def has_failed(record: AnswerRecord) -> bool:
    """Refused, or broken off by other than its client."""
    return record.outcome not in ("finished", "cancelled")


def _take(total: LaneSlice, other: LaneSlice) -> None:
    total.num_answers += other.num_answers
    total.num_failed += other.num_failed
    total.num_prompt += other.num_prompt
    total.num_cached += other.num_cached
    total.num_output += other.num_output
    total.longest_gap_s = max(total.longest_gap_s, other.longest_gap_s)
    total.first_s.merge(other.first_s)
    total.token_s.merge(other.token_s)
