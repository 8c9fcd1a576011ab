"""Has the ways measured by which a worker reads others, and knows what became of it; never reads a byte itself.

Peers are measured when they meet, others when their first transfers ask for it, and all of them again on error.
At most NUM_PEERS of each zone are measured without a cause, as the registry lists them. Of others the first transfers
tell how fast they are; one that was slower than promised, or whose way has to be of a kind, is measured too, because
other traffic slows a transfer down as well. For the same reason a way is too slow only once it was so twice in a row,
and is not refused because an answer was late.
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
LIST_S = 10.0
"""Between two looks at the registry, at most: in the beginning they are shorter, because workers start together."""
TELLING_BYTES = 16 << 20
"""So much of first transfers says how fast a way is."""
AGAIN_S = 0.5
"""Until a way that was too slow is measured once more: whatever was in its way may be over."""
MAX_WAITING = 64
"""Measurements that may be asked for at once; they take turns."""

_log = logging.getLogger(__name__)


class LinkMonitor:
    """All calls on the event loop. `tell`: the book has something new."""

    def __init__(
        self,
        me: WorkerRef,
        fingerprint: str,
        promised: TransferConfig,
        yardstick: LinkProbe,
        traffic: ReadStats,
        clock: Clock,
        tell: Callable[[], None],
    ) -> None:
        self.book = LinkReports()
        self._me = me
        self._fingerprint = fingerprint
        self._promised = promised
        self._yardstick = yardstick
        self._traffic = traffic
        self._clock = clock
        self._tell = tell
        self._chosen: Sequence[WorkerRef] = ()
        self._running: dict[tuple[WorkerRef, int], asyncio.Task[LinkReport]] = {}

    def __repr__(self) -> str:
        return f"<attestor of {self._me.id}: {self.book}, {len(self._running)} measured now>"

    async def run(self, list_workers: Callable[[], Awaitable[Sequence[WorkerRecord]]] | None) -> None:
        """Until cancelled. `list_workers` may raise RegistryUnavailable. Without it nobody is chosen; what transfers
        tell is taken all the same."""
        list_at, pause_s = self._clock.now(), BEAT_S
        while True:
            now = self._clock.now()
            if list_workers is not None and now >= list_at:
                list_at, pause_s = now + pause_s, min(LIST_S, 2 * pause_s)
                await self._choose(list_workers)
            for source in self.book.due(self._chosen, now) + self._judge_transfers():
                await self._measure_quietly(source)
            await asyncio.sleep(BEAT_S)

    def cancel(self) -> None:
        """End what is being measured, as soon as its reads do: at the latest with the transfer thread."""
        for task in self._running.values():
            task.cancel()

    async def close(self) -> None:
        """End everything, once the transfer thread has ended."""
        self.cancel()
        await asyncio.gather(*self._running.values(), return_exceptions=True)

    async def measure(self, source: WorkerRef, num_bytes: int = 0) -> LinkReport:
        """A report from now, or from a moment ago where `num_bytes` is 0: as many as tell something. It is finished
        whether or not somebody still waits for it. Raises TandemError."""
        if source.id == self._me.id:
            raise TandemError(ErrorKind.INVALID_REQUEST, f"{source} is this very worker", param="source")
        fresh = None if num_bytes else self.book.fresh(source, self._clock.now())
        if fresh is not None and fresh.num_bytes:
            return fresh
        task = self._running.get((source, num_bytes))
        if task is None:
            if len(self._running) >= MAX_WAITING:
                raise TandemError(ErrorKind.OVERLOADED, f"{MAX_WAITING} measurements wait for their turn")
            task = asyncio.create_task(self._measure(source, num_bytes), name=f"measure {source}")
            self._running[source, num_bytes] = task
            task.add_done_callback(lambda done: self._over(source, num_bytes, done))
        return await asyncio.shield(task)

    def doubt(self, source: WorkerRef) -> None:
        """A read of a source has failed."""
        self.book.doubt(source, self._clock.now())

    # ---- inside

    async def _measure(self, source: WorkerRef, num_bytes: int) -> LinkReport:
        try:
            report = await self._judge(source, num_bytes)
            if report.refused and report.gbps < self._promised.min_gbps:
                await asyncio.sleep(AGAIN_S)
                report = await self._judge(source, num_bytes)
        except SourceGone as gone:
            self._gone(source, str(gone))
            raise TandemError(ErrorKind.WORKER_LOST, str(gone)) from gone
        except TandemError as error:
            self._put(self._unmeasured(source, error))
            raise
        self._put(report)
        return report

    async def _judge(self, source: WorkerRef, num_bytes: int) -> LinkReport:
        report, ends = await self._yardstick.measure(source, num_bytes)
        return evaluate(report, self._promised, same_machine=ends.same_machine, is_cuda=ends.is_cuda)

    def _unmeasured(self, source: WorkerRef, error: TandemError) -> LinkReport:
        """Who is late is refused only if it was before: nothing is known against its way."""
        report, before = unmeasured(source, error.message, self._promised), self.book.find(source)
        if error.kind in (ErrorKind.DEADLINE, ErrorKind.OVERLOADED):
            return replace(report, refused=before is not None and before.refused)
        return report

    def _gone(self, source: WorkerRef, reason: str) -> None:
        """Who is chosen all the same is asked again, ever more seldom; of others nobody wants to know any more."""
        if source in self._chosen:
            self._put(unmeasured(source, reason, self._promised))
        else:
            self.book.forget(source)

    def _over(self, source: WorkerRef, num_bytes: int, task: asyncio.Task[LinkReport]) -> None:
        del self._running[source, num_bytes]
        if not task.cancelled() and (error := task.exception()) is not None and not isinstance(error, TandemError):
            _log.error("the way to %s cannot be measured", source, exc_info=error)

    async def _measure_quietly(self, source: WorkerRef) -> None:
        try:
            await self.measure(source)
        except TandemError as error:
            _log.info("the way to %s is not known: %s", source, error.message)
        except Exception as defect:
            # It was logged where it came from; serving does not depend on it.
            self._put(unmeasured(source, repr(defect), self._promised))

    def _put(self, report: LinkReport) -> None:
        if self.book.put(report, self._clock.now()):
            level = logging.WARNING if report.problem else logging.INFO
            problem = f", but {report.problem}" if report.problem else ""
            _log.log(level, "%s is read by %s, %.3g GB/s%s", report.source, report.link_type, report.gbps, problem)
        self._tell()

    async def _choose(self, list_workers: Callable[[], Awaitable[Sequence[WorkerRecord]]]) -> None:
        """Of those that may prefill for this worker. A registry that cannot be reached changes nothing."""
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
        self.book.listed({record.worker for record in records}, self._clock.now())

    def _judge_transfers(self) -> list[WorkerRef]:
        """Take what transfers tell of sources without a report. Returns those that are to be measured."""
        suspects: list[WorkerRef] = []
        for source, (num_bytes, seconds) in self._traffic.take(TELLING_BYTES).items():
            if self.book.find(source) is not None:
                continue
            evidence = "its first transfers"
            report = LinkReport(
                source=source, link_type="unknown", evidence=evidence, num_bytes=num_bytes, seconds=seconds
            )
            if self._promised.require != "any" or report.gbps < self._promised.min_gbps:
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
    tell: Callable[[], None],
) -> LinkMonitor:
    """Of a worker whose reads are ordered at `reads`."""
    context = ProbeContext(
        fingerprint=identity.fingerprint,
        transport_kind=identity.transport_kind,
        machine=identity.machine,
        pool=model.pool,
        digests=model.trial_digests if config.handoff.digests else None,
        trust=trust,
        clock=clock,
        reads=reads,
        patience_s=config.handoff.drain_timeout_s,
        counters=read_counters,
    )
    yardstick = LinkProbe(context)
    return LinkMonitor(identity.me, identity.fingerprint, config.transfer, yardstick, reads.traffic, clock, tell)
