"""Keep the console's history: the records of the last ended requests, and sums of the last minutes by lane and by
tenant.

The sums are kept by time slice, a period of fixed length on the gateway's clock. All collections have a maximum size.
Nothing here reads a clock: callers pass the current time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Generic, TypeVar

import msgspec

from tandem.core.quantile_sketch import QuantileSketch
from tandem.gateway.console.schema import RequestCounts
from tandem.gateway.telemetry.request_record import CANCELLED, FINISHED, RequestRecord

NUM_RECORDS = 200
SLICE_S = 5.0
NUM_SLICES = 60
"""Number of slices of SLICE_S seconds that are kept: five minutes."""
TENANT_SLICE_S = 60.0
NUM_TENANT_SLICES = 5
MAX_TENANTS = 100
"""Largest number of tenants that a slice counts separately; the others are added up as OTHER, which cannot be a
tenant's name."""
OTHER = "(others)"
_NUM_EXACT = 128
_NUM_MERGED = 4096
_QUANTILES = (0.5, 0.99)


class Tally(RequestCounts):
    """Add up figures of ended requests: the counts of RequestCounts, and the following ones. `num_first`: number of
    requests that sent a first token. `first_sum_s`: sum of their times to first token, in seconds."""

    first_sum_s: float = 0.0
    num_first: int = 0

    def add(self, record: RequestRecord) -> None:
        """Add one ended request; a cancelled one does not count as failed."""
        self.num_answers += 1
        self.num_failed += record.outcome not in (FINISHED, CANCELLED)
        self.num_prompt += record.usage.num_prompt
        self.num_cached += record.usage.num_cached or 0
        self.num_output += record.usage.num_output
        if record.first_token_s is not None:
            self.first_sum_s += record.first_token_s
            self.num_first += 1

    def add_all(self, other: Tally) -> None:
        for name in Tally.__struct_fields__:
            setattr(self, name, getattr(self, name) + getattr(other, name))


class LaneFigures(Tally):
    """Add up figures of ended requests: the sums of Tally, and distributions of latencies.

    `longest_gap_s`: the longest time between two tokens of a choice in any of these requests, in seconds. `first_s`:
    distribution of the time to first token in seconds, with one value for each request that sent a token. `token_s`:
    distribution of a request's mean time between two tokens in seconds, with one value for each request that sent at
    least two tokens of a choice.
    """

    longest_gap_s: float = 0.0
    first_s: QuantileSketch = msgspec.field(default_factory=partial(QuantileSketch, exact=_NUM_EXACT))
    token_s: QuantileSketch = msgspec.field(default_factory=partial(QuantileSketch, exact=_NUM_EXACT))

    def add(self, record: RequestRecord) -> None:
        super().add(record)
        self.longest_gap_s = max(self.longest_gap_s, record.longest_gap_s)
        if record.first_token_s is not None:
            self.first_s.add(record.first_token_s)
        if record.token_s is not None:
            self.token_s.add(record.token_s)

    def merge(self, other: LaneFigures) -> None:
        """Add the sums and distributions of `other`."""
        self.add_all(other)
        self.longest_gap_s = max(self.longest_gap_s, other.longest_gap_s)
        self.first_s.merge(other.first_s)
        self.token_s.merge(other.token_s)


Figures = TypeVar("Figures", bound=Tally)


@dataclass(slots=True)
class Slice(Generic[Figures]):
    """Hold the figures of the requests that ended in one time slice.

    `index`: position of the slice, which lasts from `index * width` to `(index + 1) * width` seconds on the gateway's
    clock. The width is SLICE_S where figures are kept by lane, and TENANT_SLICE_S where they are kept by tenant.
    `number`: number (see ConsoleState) of the last request that ended in the slice. `figures`: by the name of the lane
    or of the tenant.
    """

    index: int
    number: int = 0
    figures: dict[str, Figures] = field(default_factory=dict)


class ConsoleState:
    """Keep the history of ended requests of one gateway for the console: the last NUM_RECORDS records, and figures of
    the last five minutes by lane and by tenant.

    The first request that ended since the start of this gateway has number 1, the next one number 2, and so on.
    `number`: number of the last ended request; 0 while none has ended. In all methods, `now` is the current time in
    seconds on the gateway's clock."""

    def __init__(self) -> None:
        self.number = 0
        self._records: deque[RequestRecord] = deque(maxlen=NUM_RECORDS)
        self._slices: deque[Slice[LaneFigures]] = deque(maxlen=NUM_SLICES)
        self._tenants: deque[Slice[Tally]] = deque(maxlen=NUM_TENANT_SLICES)
        self._recent: tuple[tuple[int, int], LaneFigures] | None = None

    def add(self, record: RequestRecord, now: float) -> None:
        """Add the record of a request that ended at the time `now`."""
        self.number += 1
        self._records.append(record)
        lanes = self._current(self._slices, int(now // SLICE_S))
        tenants = self._current(self._tenants, int(now // TENANT_SLICE_S))
        lanes.setdefault(record.lane, LaneFigures()).add(record)
        name = record.tenant if record.tenant in tenants or len(tenants) < MAX_TENANTS else OTHER
        tenants.setdefault(name, Tally()).add(record)

    def records(self, since: int, tenant: str | None) -> list[tuple[int, RequestRecord]]:
        """Return number and record of the kept requests with a number greater than `since`, the newest first.

        `tenant`: return only the records of this tenant; None: those of all tenants.
        """
        newest = zip(range(self.number, since, -1), reversed(self._records), strict=False)
        return [(number, record) for number, record in newest if tenant is None or record.tenant == tenant]

    def slices(self, since: int, now: float) -> Iterator[Slice[LaneFigures]]:
        """Iterate over the time slices of the last NUM_SLICES * SLICE_S seconds, the oldest first, with their figures
        by lane.

        Only slices in which a request with a number greater than `since` ended are included; with 0 these are all
        slices in which any request ended."""
        first = int(now // SLICE_S) - NUM_SLICES + 1
        return (each for each in self._slices if each.index >= first and each.number > since)

    def recent(self, num_slices: int, now: float) -> LaneFigures:
        """Return the figures of all lanes together over the last `num_slices` time slices of SLICE_S seconds, of which
        the last is the current one. The figures may be up to a second old."""
        first = int(now // SLICE_S) - num_slices + 1
        key = (int(now), first)
        if self._recent is None or self._recent[0] != key:
            total = LaneFigures(first_s=QuantileSketch(exact=_NUM_MERGED), token_s=QuantileSketch(exact=_NUM_MERGED))
            for each in (lane for part in self._slices if part.index >= first for lane in part.figures.values()):
                total.merge(each)
            self._recent = key, total
        return self._recent[1]

    def tenants(self, now: float) -> dict[str, Tally]:
        """Return the sums of each tenant over the last NUM_TENANT_SLICES time slices of TENANT_SLICE_S seconds, by
        tenant name.

        Tenants without an ended request in that time are left out. Tenants beyond the first MAX_TENANTS of a slice are
        added up under the name OTHER.
        """
        first = int(now // TENANT_SLICE_S) - NUM_TENANT_SLICES + 1
        found: dict[str, Tally] = {}
        for name, tally in (item for part in self._tenants if part.index >= first for item in part.figures.items()):
            found.setdefault(name, Tally()).add_all(tally)
        return found

    # ---- inside

    def _current(self, slices: deque[Slice[Figures]], index: int) -> dict[str, Figures]:
        """Return the figures, by lane or tenant, of the time slice `index`, which is appended to `slices` where it is
        new. The caller adds the request that has just ended, whose number becomes the slice's `number`."""
        if not slices or slices[-1].index < index:
            slices.append(Slice(index))
        slices[-1].number = self.number
        return slices[-1].figures


def percentiles(values: QuantileSketch) -> tuple[float, float] | None:
    """Return the percentiles p50 and p99 of the values; None where there are no values."""
    if not values.count:
        return None
    p50, p99 = values.percentiles(_QUANTILES)
    return p50, p99
