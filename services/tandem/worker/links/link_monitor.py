"""Decide when the links to other workers are probed, and report the results.

A source (a worker that this one may read from) is probed when it is chosen among the registered workers, when its first
transfers look slow, and again after errors. At most NUM_PEERS sources of each zone are chosen, by a hash of the two
workers' names. For other sources the throughput of their first transfers is reported; if it is below the required
bandwidth, or a link type is required, the link is probed too, because a transfer may be slow only because of other
traffic. For the same reason a link counts as too slow only after two slow probes in a row, and a late answer alone does
not make this worker refuse a source.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Sequence, Set
from dataclasses import dataclass, replace

from tandem.core.clock import Clock
from tandem.core.config import TransferConfig
from tandem.core.errors import ErrorKind, TandemError
from tandem.core.ids import WorkerId, WorkerRef
from tandem.core.link import LinkReport
from tandem.routing.link_policy import evaluate, peers_to_probe, unmeasured
from tandem.stores.redis_client import StoreUnavailable
from tandem.stores.worker_registry import WorkerRecord
from tandem.worker.kv.handshake import SourceGone
from tandem.worker.kv.transfer_client import TransferClient
from tandem.worker.links.link_probe import LinkProbe
from tandem.worker.model.worker_info import WorkerInfo

BEAT_S = 0.5
"""Seconds between two rounds of the monitor."""
LIST_S = 10.0
"""Longest time in seconds between two reads of the registry; shorter at first, because workers start together."""
MIN_SAMPLE_BYTES = 16 << 20
"""Bytes of first transfers from which the throughput of a link is computed."""
AGAIN_S = 0.5
"""Seconds until a link that was too slow is probed once more, since the disturbance may be over by then."""
MAX_WAITING = 64
"""Probes that may be open at once; they run one after the other."""

FRESH_S = 5.0
"""Seconds for which a report is returned instead of starting a new probe."""
RETRY_S = 15.0
"""First delay in seconds before a link with a problem, or without a measurement, is probed again; doubles each time."""
MAX_RETRY_S = 600.0
"""Upper bound, in seconds, of the delay that begins with `RETRY_S`."""
GONE_S = 60.0
"""Seconds after which a source that is no longer registered is forgotten; longer than a registry takes to be
refilled."""
MAX_SOURCES = 4096
"""Reports kept; beyond that the oldest is dropped."""

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Entry:
    """A report with its schedule. `num_problems`: reports in a row with a problem or without a measurement. `due_at`:
    time of the next probe; None: none is scheduled until an event requires one. `met_at`: time when the source was last
    found in the registry, or was first reported."""

    report: LinkReport
    number: int
    measured_at: float
    num_problems: int
    due_at: float | None
    met_at: float


class LinkReports:
    """Keep the newest link report of each source (a worker that this one may read from), and the time at which to probe
    the source again.

    Reports are numbered in order of arrival from 1; `number` is the number of the newest report. Only the newest
    incarnation of a source is kept. Times are seconds of the caller's clock.
    """

    def __init__(self) -> None:
        self._entries: dict[WorkerId, _Entry] = {}
        self.number = 0

    def __repr__(self) -> str:
        return f"<links to {len(self._entries)} sources, {self.number} reports>"

    def put(self, report: LinkReport, now: float) -> bool:
        """Store a report, and return whether it says something new about its source.

        The result is True for the first report of the source's incarnation, and for a report that differs from the one
        before it in the link type or in having a problem. A report of an older incarnation is dropped, and the result
        is False. A report with a problem, or without a measurement, schedules another probe after a delay, which
        doubles with each such report in a row.
        """
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
        """Return the newest report of a source; None if there is no report of this incarnation of the source."""
        entry = self._entries.get(source.id)
        return entry.report if entry is not None and entry.report.source == source else None

    def fresh(self, source: WorkerRef, now: float) -> LinkReport | None:
        """Return the newest report of a source if it was stored less than `FRESH_S` seconds ago, else None."""
        report = self.find(source)
        return report if report is not None and now - self._entries[source.id].measured_at < FRESH_S else None

    def suspect(self, source: WorkerRef, now: float) -> None:
        """Schedule a probe of a source because a read from it has failed. Does nothing if a probe of the source is
        scheduled already, or if there is no report of it."""
        entry = self._entries.get(source.id)
        if entry is not None and entry.report.source == source and entry.due_at is None:
            entry.due_at = max(now, entry.measured_at + FRESH_S)

    def forget(self, source: WorkerRef) -> None:
        """Drop the report of a source that no longer exists, and with it the source's next probe. Does nothing if the
        report is of another incarnation of the source."""
        if self.find(source) is not None:
            del self._entries[source.id]

    def listed(self, sources: Set[WorkerRef], now: float) -> None:
        """Record that `sources` are registered at the time `now`. Drop the reports of sources that have not been
        registered for `GONE_S` seconds, so that they are not probed any more, and those of sources that are registered
        with another incarnation, which is smaller where the clock of their host was set back."""
        lives = {source.id: source.incarnation for source in sources}
        for entry in list(self._entries.values()):
            source = entry.report.source
            if source in sources:
                entry.met_at = now
            elif lives.get(source.id, source.incarnation) != source.incarnation or now - entry.met_at >= GONE_S:
                self.forget(source)

    def due(self, chosen: Iterable[WorkerRef], now: float) -> list[WorkerRef]:
        """Return the sources to probe at the time `now`: the sources in `chosen` that have no report, and all sources
        whose scheduled probe is due."""
        new = [source for source in chosen if self.find(source) is None]
        again = (entry for entry in self._entries.values() if entry.due_at is not None and now >= entry.due_at)
        return [*new, *(entry.report.source for entry in again)]

    def since(self, number: int) -> list[LinkReport]:
        """Return the reports with a number above `number`, oldest first; 0 returns all that are kept."""
        return [entry.report for entry in self._entries.values() if entry.number > number]


def _gist(report: LinkReport) -> tuple[str, bool]:
    return report.link_type, bool(report.problem)


class LinkMonitor:
    """Probe the links to other workers when a probe is due, and keep the results in `reports`. All calls must be on the
    event loop.

    `me`: this worker. `required`: the bandwidth and link type that links must have. `probe`: measures one link.
    `reads`: knows the throughput of ordinary transfers. `on_change`: called after each new report.
    """

    def __init__(
        self,
        me: WorkerInfo,
        required: TransferConfig,
        probe: LinkProbe,
        reads: TransferClient,
        clock: Clock,
        on_change: Callable[[], None],
    ) -> None:
        self.reports = LinkReports()
        self._me = me
        self._required = required
        self._probe = probe
        self._reads = reads
        self._clock = clock
        self._on_change = on_change
        self._chosen: Sequence[WorkerRef] = ()
        self._running: dict[tuple[WorkerRef, int], asyncio.Task[LinkReport]] = {}

    def __repr__(self) -> str:
        return f"<link monitor of {self._me.me.id}: {self.reports}, {len(self._running)} probes running>"

    async def run(self, list_workers: Callable[[], Awaitable[Sequence[WorkerRecord]]] | None) -> None:
        """Probe links until cancelled. `list_workers`: returns the registered workers, among which the sources to probe
        are chosen, and may raise StoreUnavailable. If it is None, no source is chosen: the throughput of transfers is
        still reported, and a link whose transfers look slow, or over which a read has failed, is still probed."""
        list_at, pause_s = self._clock.now(), BEAT_S
        while True:
            now = self._clock.now()
            if list_workers is not None and now >= list_at:
                list_at, pause_s = now + pause_s, min(LIST_S, 2 * pause_s)
                await self._choose(list_workers)
            for source in self.reports.due(self._chosen, now) + self._evaluate_transfers():
                await self._measure_quietly(source)
            await asyncio.sleep(BEAT_S)

    def cancel(self) -> None:
        """Cancel the running probes and return without waiting.

        A cancelled probe ends as soon as all reads that it has started have ended. If they do not end by themselves,
        they end together with the transfer thread.
        """
        for task in self._running.values():
            task.cancel()

    async def close(self) -> None:
        """Cancel all probes and wait until they have ended. Must be called after the transfer thread has ended, because
        a probe waits for its reads."""
        self.cancel()
        await asyncio.gather(*self._running.values(), return_exceptions=True)

    async def measure(self, source: WorkerRef, num_bytes: int = 0) -> LinkReport:
        """Probe the link to a source and return the report. `num_bytes`: bytes to read. If it is 0, enough bytes for a
        meaningful result are read, or a measurement that is less than `FRESH_S` seconds old is returned without a new
        probe.

        Raises TandemError when the source is this worker itself, is gone or cannot be read, or when too many probes are
        open. A probe that was started is finished even if its callers are cancelled.
        """
        if source.id == self._me.me.id:
            raise TandemError(ErrorKind.INVALID_REQUEST, f"{source} is this worker itself", param="source")
        fresh = None if num_bytes else self.reports.fresh(source, self._clock.now())
        if fresh is not None and fresh.num_bytes:
            return fresh
        task = self._running.get((source, num_bytes))
        if task is None:
            if len(self._running) >= MAX_WAITING:
                raise TandemError(ErrorKind.OVERLOADED, f"{MAX_WAITING} link probes are open already")
            task = asyncio.create_task(self._measure(source, num_bytes), name=f"measure {source}")
            self._running[source, num_bytes] = task
            task.add_done_callback(lambda done: self._on_done(source, num_bytes, done))
        return await asyncio.shield(task)

    # ---- inside

    async def _measure(self, source: WorkerRef, num_bytes: int) -> LinkReport:
        try:
            report, ends = await self._probe.measure(source, num_bytes)
            report = evaluate(report, self._required, same_machine=ends.same_machine, is_cuda=ends.is_cuda)
            if report.refused and report.gbps < self._required.min_gbps:
                await asyncio.sleep(AGAIN_S)
                report, ends = await self._probe.measure(source, num_bytes)
                report = evaluate(report, self._required, same_machine=ends.same_machine, is_cuda=ends.is_cuda)
        except SourceGone as gone:
            # If the source is chosen, the failed probe is reported and retried with backoff.
            if source in self._chosen:
                self._put(unmeasured(source, str(gone), self._required))
            else:
                self.reports.forget(source)
            raise TandemError(ErrorKind.WORKER_LOST, str(gone)) from gone
        except TandemError as error:
            self._put(self._unmeasured(source, error))
            raise
        self._put(report)
        return report

    def _unmeasured(self, source: WorkerRef, error: TandemError) -> LinkReport:
        """Build the report of a failed probe. After a timeout the source is refused only if it was before, because a
        late answer is no evidence against its link."""
        report, before = unmeasured(source, error.message, self._required), self.reports.find(source)
        if error.kind in (ErrorKind.DEADLINE, ErrorKind.OVERLOADED):
            return replace(report, refused=before is not None and before.refused)
        return report

    def _on_done(self, source: WorkerRef, num_bytes: int, task: asyncio.Task[LinkReport]) -> None:
        del self._running[source, num_bytes]
        if not task.cancelled() and (error := task.exception()) is not None and not isinstance(error, TandemError):
            _log.error("the measurement of the link to worker %s failed because of a defect", source, exc_info=error)

    async def _measure_quietly(self, source: WorkerRef) -> None:
        try:
            await self.measure(source)
        except TandemError as error:
            _log.info("the link to worker %s could not be measured: %s", source, error.message)
        except Exception as defect:
            # `_on_done` has logged the defect; serving does not depend on a probe.
            self._put(unmeasured(source, repr(defect), self._required))

    def _put(self, report: LinkReport) -> None:
        if self.reports.put(report, self._clock.now()):
            level = logging.WARNING if report.problem else logging.INFO
            problem = f", but {report.problem}" if report.problem else ""
            message = "the link to worker %s is %s with %.3g GB/s%s"
            _log.log(level, message, report.source, report.link_type, report.gbps, problem)
        self._on_change()

    async def _choose(self, list_workers: Callable[[], Awaitable[Sequence[WorkerRecord]]]) -> None:
        """Choose the sources to probe among the workers that may prefill for this one. An unreachable registry changes
        nothing."""
        try:
            records = await list_workers()
        except StoreUnavailable:
            return
        producers = [
            (record.worker, record.topology.zone)
            for record in records
            if record.fingerprint == self._me.fingerprint
            and record.effective_role != "decode"
            and record.worker.id != self._me.me.id
        ]
        self._chosen = peers_to_probe(self._me.me.id, producers)
        self.reports.listed({record.worker for record in records}, self._clock.now())

    def _evaluate_transfers(self) -> list[WorkerRef]:
        """Report the throughput of transfers from sources without a report. Returns the sources to probe."""
        suspects: list[WorkerRef] = []
        for source, (num_bytes, seconds) in self._reads.take_throughput(MIN_SAMPLE_BYTES).items():
            if self.reports.find(source) is not None:
                continue
            evidence = "its first transfers"
            report = LinkReport(
                source=source, link_type="unknown", evidence=evidence, num_bytes=num_bytes, seconds=seconds
            )
            if self._required.require != "any" or report.gbps < self._required.min_gbps:
                suspects.append(source)
            else:
                self._put(report)
        return suspects
