"""Generate a day's load from a recorded hour: several copies of a trace at once, thinned by a daily curve.

One recorded service is too small for a fleet, and its hour shows no daily cycle. So copies of it run side by side at
the recorded pace, each started at another offset and wrapping around at the end, with prompts of its own; the requests
are sampled at the rate that the curve gives. Bursts and lengths stay as recorded, and minutes remain minutes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tandem.workload import seeded_random
from tandem.workload.scheduled_request import ScheduledRequest
from tandem.workload.trace_entry import TraceEntry
from tandem.workload.trace_reader import scheduled_request_of


@dataclass(frozen=True, slots=True)
class Day:
    """A day of load: `num_copies` of a trace during `lasts_s` seconds, which represent `num_days` days.

    At night the load falls to the share `low`.
    """

    num_copies: int
    lasts_s: float
    low: float
    num_days: float = 1.0
    seed: int = 0

    def share(self, at_s: float) -> float:
        """Return the share of requests that are kept at the time `at_s`: low at the beginning and end (night), 1 at
        noon."""
        wave = (1 - math.cos(2 * math.pi * self.num_days * at_s / self.lasts_s)) / 2
        return self.low + (1 - self.low) * wave


@dataclass(frozen=True, slots=True)
class _Due:
    at_s: float
    copy: int
    index: int


def requests(day: Day, entries: Sequence[TraceEntry]) -> Iterator[ScheduledRequest]:
    """Yield the requests of a day in the order of their times; each prompt is generated when its request is reached."""
    for number, due in enumerate(_schedule(day, entries)):
        # Each copy has its own salt in its block names, so that no copy hits another's prefixes.
        yield scheduled_request_of(entries[due.index], number, due.at_s, day.seed, f"copy {due.copy}")


def _schedule(day: Day, entries: Sequence[TraceEntry]) -> list[_Due]:
    first_us, lasts_s = entries[0].due_us, (entries[-1].due_us - entries[0].due_us) / 1e6
    found: list[_Due] = []
    for copy in range(day.num_copies):
        begin_s = lasts_s * seeded_random.uniform(day.seed, "begin", copy)
        for index, entry in enumerate(entries):
            at_s = (entry.due_us - first_us) / 1e6 - begin_s
            at_s = at_s % lasts_s
            while at_s < day.lasts_s:
                if seeded_random.uniform(day.seed, "keep", copy, index, math.floor(at_s)) < day.share(at_s):
                    found.append(_Due(at_s, copy, index))
                at_s += lasts_s
    return sorted(found, key=lambda due: (due.at_s, due.copy, due.index))
