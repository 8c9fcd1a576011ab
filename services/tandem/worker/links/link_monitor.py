"""Decide when the links to other workers are probed, and report the results.

A source is probed when it is chosen from the registry, when its first transfers are suspicious, and again after errors.
At most NUM_PEERS sources of each zone are probed without a cause, in registry order. For other sources the throughput
of their first transfers is reported; if it is below the required bandwidth, or a link type is required, the link is
probed too, because a transfer may be slow only because of other traffic. For the same reason a link counts as too slow
only after two slow probes in a row, and a source is not refused because its answer was late.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace

from tandem.core.clock import Clock
from tandem.core.config import Config, TransferConfig
from tandem.core.errors import ErrorKind, TandemError
from tandem.core.ids import WorkerRef
from tandem.core.link import LinkReport
from tandem.routing.link_policy import evaluate, peers_to_probe, unmeasured
from tandem.stores.worker_record import WorkerRecord
from tandem.stores.worker_registry import RegistryUnavailable
from tandem.transfer.nic_counters import read_counters
from tandem.wire.peer_auth import PeerAuth
from tandem.worker.kv.handshake import SourceGone
from tandem.worker.kv.read_stats import ReadStats
from tandem.worker.kv.transfer_client import TransferClient
from tandem.worker.links.link_probe import LinkProbe, ProbeContext
from tandem.worker.links.link_reports import LinkReports
from tandem.worker.model.worker_info import WorkerInfo
from tandem.worker.model.worker_model import WorkerModel

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

_log = logging.getLogger(__name__)


class LinkMonitor:
    """Own the link reports of one worker and the running probes. All calls on the event loop.

    `required` has the required bandwidth and link type; `on_change` is called when there is a new report.
    """

    def __init__(
        self,
        me: WorkerRef,
        fingerprint: str,
        required: TransferConfig,
        probe: LinkProbe,
        read_stats: ReadStats,
        clock: Clock,
        on_change: Callable[[], None],
    ) -> None:
        self.reports = LinkReports()
        self._me = me
        self._fingerprint = fingerprint
        self._required = required
        self._probe = probe
        self._read_stats = read_stats
        self._clock = clock
        self._on_change = on_change
        self._chosen: Sequence[WorkerRef] = ()
        self._running: dict[tuple[WorkerRef, int], asyncio.Task[LinkReport]] = {}

    def __repr__(self) -> str:
        return f"<link monitor of {self._me.id}: {self.reports}, {len(self._running)} probes running>"

    async def run(self, list_workers: Callable[[], Awaitable[Sequence[WorkerRecord]]] | None) -> None:
        """Probe links until cancelled. `list_workers` may raise RegistryUnavailable; None means that no source is
        chosen, while the throughput of transfers is still reported."""
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
        """Cancel the running probes; they end with their open reads, at the latest with the transfer thread."""
        for task in self._running.values():
            task.cancel()

    async def close(self) -> None:
        """Cancel all probes and wait for their end, after the transfer thread has ended."""
        self.cancel()
        await asyncio.gather(*self._running.values(), return_exceptions=True)

    async def measure(self, source: WorkerRef, num_bytes: int = 0) -> LinkReport:
        """Probe the link to a source and return the report. Raises TandemError.

        For `num_bytes` 0 enough bytes for a meaningful result are read, and a recent report is returned instead of a
        new probe. A probe that was started is finished even if its callers leave.
        """
        if source.id == self._me.id:
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

    def suspect(self, source: WorkerRef) -> None:
        """Schedule a new probe of a source, because a read has failed."""
        self.reports.suspect(source, self._clock.now())

    # ---- inside

    async def _measure(self, source: WorkerRef, num_bytes: int) -> LinkReport:
        try:
            report = await self._probe_and_evaluate(source, num_bytes)
            if report.refused and report.gbps < self._required.min_gbps:
                await asyncio.sleep(AGAIN_S)
                report = await self._probe_and_evaluate(source, num_bytes)
        except SourceGone as gone:
            self._gone(source, str(gone))
            raise TandemError(ErrorKind.WORKER_LOST, str(gone)) from gone
        except TandemError as error:
            self._put(self._unmeasured(source, error))
            raise
        self._put(report)
        return report

    async def _probe_and_evaluate(self, source: WorkerRef, num_bytes: int) -> LinkReport:
        report, ends = await self._probe.measure(source, num_bytes)
        return evaluate(report, self._required, same_machine=ends.same_machine, is_cuda=ends.is_cuda)

    def _unmeasured(self, source: WorkerRef, error: TandemError) -> LinkReport:
        """Build the report of a failed probe. After a timeout the source is refused only if it was before, because a
        late answer is no evidence against its link."""
        report, before = unmeasured(source, error.message, self._required), self.reports.find(source)
        if error.kind in (ErrorKind.DEADLINE, ErrorKind.OVERLOADED):
            return replace(report, refused=before is not None and before.refused)
        return report

    def _gone(self, source: WorkerRef, reason: str) -> None:
        """Record that a source no longer exists. If it is chosen, the failed probe is reported and retried with
        backoff; otherwise its report is dropped."""
        if source in self._chosen:
            self._put(unmeasured(source, reason, self._required))
        else:
            self.reports.forget(source)

    def _on_done(self, source: WorkerRef, num_bytes: int, task: asyncio.Task[LinkReport]) -> None:
        del self._running[source, num_bytes]
        if not task.cancelled() and (error := task.exception()) is not None and not isinstance(error, TandemError):
            _log.error("the link to %s cannot be probed", source, exc_info=error)

    async def _measure_quietly(self, source: WorkerRef) -> None:
        try:
            await self.measure(source)
        except TandemError as error:
            _log.info("the link to %s is not measured: %s", source, error.message)
        except Exception as defect:
            # `_on_done` has logged the defect; serving does not depend on a probe.
            self._put(unmeasured(source, repr(defect), self._required))

    def _put(self, report: LinkReport) -> None:
        if self.reports.put(report, self._clock.now()):
            level = logging.WARNING if report.problem else logging.INFO
            problem = f", but {report.problem}" if report.problem else ""
            _log.log(level, "link to %s: %s, %.3g GB/s%s", report.source, report.link_type, report.gbps, problem)
        self._on_change()

    async def _choose(self, list_workers: Callable[[], Awaitable[Sequence[WorkerRecord]]]) -> None:
        """Choose the sources to probe among the workers that may prefill for this one. An unreachable registry changes
        nothing."""
        try:
            records = await list_workers()
        except RegistryUnavailable:
            return
        producers = [
            (record.worker, record.topology.zone)
            for record in records
            if record.fingerprint == self._fingerprint
            and record.effective_role != "decode"
            and record.worker.id != self._me.id
        ]
        self._chosen = peers_to_probe(self._me.id, producers)
        self.reports.listed({record.worker for record in records}, self._clock.now())

    def _evaluate_transfers(self) -> list[WorkerRef]:
        """Report the throughput of transfers from sources without a report. Returns the sources to probe."""
        suspects: list[WorkerRef] = []
        for source, (num_bytes, seconds) in self._read_stats.take(MIN_SAMPLE_BYTES).items():
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


def compose_link_monitor(
    config: Config,
    model: WorkerModel,
    identity: WorkerInfo,
    trust: PeerAuth,
    reads: TransferClient,
    clock: Clock,
    on_change: Callable[[], None],
) -> LinkMonitor:
    """Create the link monitor of a worker whose reads are started by `reads`."""
    context = ProbeContext(
        me=identity,
        pool=model.pool,
        digests=model.trial_digests if config.handoff.digests else None,
        trust=trust,
        clock=clock,
        reads=reads,
        patience_s=config.handoff.drain_timeout_s,
        counters=read_counters,
    )
    probe = LinkProbe(context)
    return LinkMonitor(identity.me, identity.fingerprint, config.transfer, probe, reads.read_stats, clock, on_change)
