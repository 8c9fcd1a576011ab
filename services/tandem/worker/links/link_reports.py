"""What a worker knows of the ways by which it reads others, and which of them are to be measured now; never measures.

Times are seconds of the caller's clock.
"""

from __future__ import annotations

from collections.abc import Iterable, Set
from dataclasses import dataclass

from tandem.core.ids import WorkerId, WorkerRef
from tandem.core.link import LinkReport

FRESH_S = 5.0
"""Whoever asks for a measurement within this time of one is told that one's report."""
RETRY_S = 15.0
MAX_RETRY_S = 600.0
"""Between two measurements of a way that is not as it should be, or was not measured; each time twice as long."""
GONE_S = 60.0
"""A source that has not been listed for so long is forgotten: longer than a registry takes to be filled anew."""
MAX_SOURCES = 4096


@dataclass(slots=True)
class _Entry:
    """`due_at`: when it is to be measured again; None: when something happens to it. `met_at`: when its source was
    listed last, or met first."""

    report: LinkReport
    number: int
    measured_at: float
    num_problems: int
    due_at: float | None
    met_at: float


class LinkReports:
    """The newest report of each source, of its newest life. Each report has a number, the later the greater."""

    def __init__(self) -> None:
        self._entries: dict[WorkerId, _Entry] = {}
        self.number = 0

    def __repr__(self) -> str:
        return f"<ways to {len(self._entries)} sources, {self.number} reports>"

    def put(self, report: LinkReport, now: float) -> bool:
        """Whether it says something new: another way or another problem. A report on an older life is dropped."""
        source = report.source
        known = self._entries.get(source.id)
        if known is not None and known.report.source.incarnation > source.incarnation:
            return False
        self.number += 1
        same = known is not None and known.report.source == source
        before = known.num_problems if known is not None and same else 0
        met_at = known.met_at if known is not None and same else now
        is_wanting = bool(report.problem) or not report.num_bytes
        num_problems = before + 1 if is_wanting else 0
        retry_s = min(MAX_RETRY_S, RETRY_S * 2.0 ** min(num_problems - 1, 10))
        due_at = now + retry_s if is_wanting else None
        self._entries.pop(source.id, None)
        self._entries[source.id] = _Entry(report, self.number, now, num_problems, due_at, met_at)
        if len(self._entries) > MAX_SOURCES:
            del self._entries[next(iter(self._entries))]
        return known is None or not same or _gist(known.report) != _gist(report)

    def find(self, source: WorkerRef) -> LinkReport | None:
        entry = self._entries.get(source.id)
        return entry.report if entry is not None and entry.report.source == source else None

    def fresh(self, source: WorkerRef, now: float) -> LinkReport | None:
        """A report from so short a time ago that another measurement would tell nothing new."""
        report = self.find(source)
        return report if report is not None and now - self._entries[source.id].measured_at < FRESH_S else None

    def doubt(self, source: WorkerRef, now: float) -> None:
        """A read of a source has failed: it is to be measured again, if it was, and not just now."""
        entry = self._entries.get(source.id)
        if entry is not None and entry.report.source == source and entry.due_at is None:
            entry.due_at = max(now, entry.measured_at + FRESH_S)

    def forget(self, source: WorkerRef) -> None:
        """It is no more; nothing where another life of it is known."""
        if self.find(source) is not None:
            del self._entries[source.id]

    def listed(self, sources: Set[WorkerRef], now: float) -> None:
        """These are there now; who has not been for a while is forgotten, or would be measured for ever."""
        for entry in list(self._entries.values()):
            if entry.report.source in sources:
                entry.met_at = now
            elif now - entry.met_at >= GONE_S:
                self.forget(entry.report.source)

    def due(self, chosen: Iterable[WorkerRef], now: float) -> list[WorkerRef]:
        """Those of the chosen that were never measured, and those that are to be measured again."""
        new = [source for source in chosen if self.find(source) is None]
        again = (entry for entry in self._entries.values() if entry.due_at is not None and now >= entry.due_at)
        return [*new, *(entry.report.source for entry in again)]

    def since(self, number: int) -> list[LinkReport]:
        """Those that came after the report of this number, oldest first; 0: all."""
        return [entry.report for entry in self._entries.values() if entry.number > number]


def _gist(report: LinkReport) -> tuple[str, bool]:
    return report.link_type, bool(report.problem)
