"""Keep the newest report of each link, and decide which links are due for a new probe.

Times are seconds of the caller's clock.
"""

from __future__ import annotations

from collections.abc import Iterable, Set
from dataclasses import dataclass

from tandem.core.ids import WorkerId, WorkerRef
from tandem.core.link import LinkReport

FRESH_S = 5.0
"""Seconds for which a report is returned instead of starting a new probe."""
RETRY_S = 15.0
"""First delay in seconds before a link with a problem, or without a measurement, is probed again; doubles each time."""
MAX_RETRY_S = 600.0
"""Upper bound of that delay, in seconds."""
GONE_S = 60.0
"""Seconds after which a source that is no longer registered is forgotten; longer than a registry takes to be
refilled."""
MAX_SOURCES = 4096
"""Reports kept; beyond that the oldest is dropped."""


@dataclass(slots=True)
class _Entry:
    """A report and its schedule. `due_at` is the time of the next probe; None: only after an event. `met_at` is when
    the source was last registered, or first seen."""

    report: LinkReport
    number: int
    measured_at: float
    num_problems: int
    due_at: float | None
    met_at: float


class LinkReports:
    """Own the newest report of each source, of its newest incarnation. Reports are numbered in order of arrival."""

    def __init__(self) -> None:
        self._entries: dict[WorkerId, _Entry] = {}
        self.number = 0

    def __repr__(self) -> str:
        return f"<links to {len(self._entries)} sources, {self.number} reports>"

    def put(self, report: LinkReport, now: float) -> bool:
        """Store a report; returns whether its link type or whether it has a problem has changed. A report of an older
        incarnation is dropped."""
        source = report.source
        known = self._entries.get(source.id)
        if known is not None and known.report.source.incarnation > source.incarnation:
            return False
        self.number += 1
        same = known is not None and known.report.source == source
        before = known.num_problems if known is not None and same else 0
        met_at = known.met_at if known is not None and same else now
        has_problem = bool(report.problem) or not report.num_bytes
        num_problems = before + 1 if has_problem else 0
        retry_s = min(MAX_RETRY_S, RETRY_S * 2.0 ** min(num_problems - 1, 10))
        due_at = now + retry_s if has_problem else None
        self._entries.pop(source.id, None)
        self._entries[source.id] = _Entry(report, self.number, now, num_problems, due_at, met_at)
        if len(self._entries) > MAX_SOURCES:
            del self._entries[next(iter(self._entries))]
        return known is None or not same or _gist(known.report) != _gist(report)

    def find(self, source: WorkerRef) -> LinkReport | None:
        """Return the report of a source, None for an unknown source or incarnation."""
        entry = self._entries.get(source.id)
        return entry.report if entry is not None and entry.report.source == source else None

    def fresh(self, source: WorkerRef, now: float) -> LinkReport | None:
        """Return the report of a source if it is less than `FRESH_S` old."""
        report = self.find(source)
        return report if report is not None and now - self._entries[source.id].measured_at < FRESH_S else None

    def suspect(self, source: WorkerRef, now: float) -> None:
        """Schedule a probe of a source after a failed read, unless one is scheduled already."""
        entry = self._entries.get(source.id)
        if entry is not None and entry.report.source == source and entry.due_at is None:
            entry.due_at = max(now, entry.measured_at + FRESH_S)

    def forget(self, source: WorkerRef) -> None:
        """Drop the report of a source that no longer exists; does nothing for another incarnation."""
        if self.find(source) is not None:
            del self._entries[source.id]

    def listed(self, sources: Set[WorkerRef], now: float) -> None:
        """Record which sources are registered; those that have not been for `GONE_S` are dropped, or they would be
        probed for ever."""
        for entry in list(self._entries.values()):
            if entry.report.source in sources:
                entry.met_at = now
            elif now - entry.met_at >= GONE_S:
                self.forget(entry.report.source)

    def due(self, chosen: Iterable[WorkerRef], now: float) -> list[WorkerRef]:
        """Return the chosen sources without a report, and those whose next probe is due."""
        new = [source for source in chosen if self.find(source) is None]
        again = (entry for entry in self._entries.values() if entry.due_at is not None and now >= entry.due_at)
        return [*new, *(entry.report.source for entry in again)]

    def since(self, number: int) -> list[LinkReport]:
        """Return the reports after report `number`, oldest first; 0: all."""
        return [entry.report for entry in self._entries.values() if entry.number > number]


def _gist(report: LinkReport) -> tuple[str, bool]:
    return report.link_type, bool(report.problem)
