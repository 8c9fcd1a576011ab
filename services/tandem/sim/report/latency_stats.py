"""Aggregate requests by class as they end, in memory that does not grow with their number."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from dataclasses import dataclass, field, fields

from tandem.core.errors import TandemError
from tandem.core.events import Finished
from tandem.core.quantile_sketch import QuantileSketch
from tandem.core.slo import Slo
from tandem.sim.cluster.client_trace import ClientTrace


@dataclass(slots=True)
class GroupTally:
    """Counts and latency distributions of one class of requests.

    - `ttft`, `itl`, `tpot`, `e2e`: seconds of complete requests; `ttft` and `e2e` count from the due time.
    - `num_good`: requests that met the SLO. `num_late`: requests that failed or whose first token missed its target.
      `num_late_gaps`: token gaps above the ITL target.
    - `num_cached`: prompt tokens served from prefix caches, out of `num_prompt`; both of complete requests only.
    - `num_output`: tokens that clients received, including those of failed requests.
    - `errors`: failed requests by the kind of their error.
    """

    num_requests: int = 0
    num_complete: int = 0
    num_good: int = 0
    num_late: int = 0
    num_late_gaps: int = 0
    num_prompt: int = 0
    num_cached: int = 0
    num_output: int = 0
    errors: Counter[str] = field(default_factory=Counter)
    ttft: QuantileSketch = field(default_factory=QuantileSketch)
    itl: QuantileSketch = field(default_factory=QuantileSketch)
    tpot: QuantileSketch = field(default_factory=QuantileSketch)
    e2e: QuantileSketch = field(default_factory=QuantileSketch)

    def add(self, trace: ClientTrace, slo: Slo) -> None:
        self.num_requests += 1
        self.num_output += len(trace.token_times)
        ttft_s = trace.ttft_s if trace.is_complete else None
        self.num_late += slo.violates_ttft(ttft_s)
        outcome = trace.outcome
        if not isinstance(outcome, Finished):
            assert outcome is not None, f"{trace.id} has no end"
            self.errors[_error_label(outcome)] += 1
        if ttft_s is None:
            return
        assert isinstance(outcome, Finished)
        gaps = trace.gaps_s
        num_late_gaps = slo.num_late(gaps)
        self.num_complete += 1
        self.num_good += slo.is_met(ttft_s, num_late_gaps, len(gaps))
        self.num_late_gaps += num_late_gaps
        self.num_prompt += trace.num_prompt
        self.num_cached += outcome.num_cached_tokens
        self.ttft.add(ttft_s)
        self.e2e.add(trace.token_times[-1] - trace.due_s)
        if gaps:
            self.itl.extend(gaps)
            self.tpot.add((trace.token_times[-1] - trace.token_times[0]) / len(gaps))

    def merge(self, other: GroupTally) -> None:
        for each in fields(self):
            mine, theirs = getattr(self, each.name), getattr(other, each.name)
            if isinstance(mine, QuantileSketch):
                mine.merge(theirs)
            else:
                setattr(self, each.name, mine + theirs)


def _error_label(error: TandemError) -> str:
    """Return the kind of an error and its reason, such as `quota_exceeded (tokens_per_minute)`."""
    return f"{error.kind.value} ({error.reason})" if error.reason else error.kind.value


class LatencyStats:
    """Count the requests and latencies of a run by class.

    `slo`: the targets that requests are compared with; `groups`: the tally of each class by name; `began_s`: the
    earliest due time; `ended_s`: the last end.
    """

    def __init__(self, slo: Slo) -> None:
        self.slo = slo
        self.groups: defaultdict[str, GroupTally] = defaultdict(GroupTally)
        self.began_s = math.inf
        self.ended_s = -math.inf

    def add(self, trace: ClientTrace) -> None:
        """Add a request that has ended to the tally of its class."""
        self.began_s = min(self.began_s, trace.due_s)
        self.ended_s = max(self.ended_s, trace.ended_at)
        self.groups[trace.group].add(trace, self.slo)

    def all(self) -> GroupTally:
        """Return the tally of all classes together."""
        whole = GroupTally()
        for name in sorted(self.groups):
            whole.merge(self.groups[name])
        return whole
