"""Measure the link to another worker by reading its probe blocks (`kv.layout.KVRegion`) into this worker's own, over
and over.

Probe blocks belong to no block pool: the blocks that probes read have the same constant content in every worker, and
the blocks that probes write hold nothing else. The timed passes skip digests, so that they measure what the link
carries. The first pass also establishes connections. The first and the last pass are verified against digests; they
read different content into the same blocks, which proves that the data was read now.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from typing import NamedTuple

import grpc.aio

from tandem.core.clock import Clock
from tandem.core.config import HandoffConfig
from tandem.core.errors import ErrorKind, TandemError
from tandem.core.ids import BlockId, WorkerRef
from tandem.core.link import LinkReport
from tandem.engine.effects import StartRead
from tandem.engine.transfer_messages import ReadDone, TransportPeer
from tandem.kv.handoff import BlockDigest
from tandem.transfer.interface import PeerError
from tandem.transfer.link_detection import Counters, LinkEndpoints, detect_link_type, read_counters
from tandem.wire.peer_auth import PeerAuth, reason_of
from tandem.worker.kv.handshake import ANSWER_S, Source, open_source
from tandem.worker.kv.transfer_client import TransferClient
from tandem.worker.model.worker_info import WorkerInfo
from tandem.worker.model.worker_model import WorkerModel

ENOUGH_BYTES = 64 << 20
"""Bytes of a probe for which the caller names no number of bytes; it ends after these bytes or `ENOUGH_S`."""
ENOUGH_S = 0.2
"""Seconds of a probe for which the caller names no number of bytes; it ends after this time or `ENOUGH_BYTES`."""
MOST_BYTES = 64 << 30
"""Most bytes of a probe for which the caller names a number of bytes."""
MOST_S = 10.0
"""Most seconds per pass of a probe for which the caller names a number of bytes."""
TICK_S = 1e-6
"""Shortest duration of a read, in seconds, in case the clock is coarse."""
IDLE_S = 0.05
"""Seconds for which other traffic is counted before the timed passes."""
MAX_OPEN = 2
"""Most reads of a probe that are open at once. The transfer thread reads parts of them and of reads for requests in
turn."""
NUM_ALONE = 3
"""Reads of the pass that runs them one after the other. Each is timed by the transfer thread, which a busy event loop
does not delay."""


class LinkProbe:
    """Measure the link to one other worker at a time, by timed reads of that worker's probe blocks. All calls must be
    on the event loop.

    `digests`: for each of this worker's probe blocks, one digest per KV head of the model; None when reads are not
    verified. `patience_s`: seconds that a read may take; after that the connection to its source is torn down.
    """

    def __init__(
        self,
        me: WorkerInfo,
        model: WorkerModel,
        handoff: HandoffConfig,
        trust: PeerAuth,
        clock: Clock,
        reads: TransferClient,
    ) -> None:
        self.me = me
        self.pool = model.pool
        self.digests = model.trial_digests if handoff.digests else None
        self.trust = trust
        self.clock = clock
        self.reads = reads
        self.patience_s = handoff.drain_timeout_s
        self._turn = asyncio.Lock()

    async def measure(self, source: WorkerRef, num_bytes: int = 0) -> tuple[LinkReport, LinkEndpoints]:
        """Read about `num_bytes` bytes from the worker `source`, and return the report and the two ends of the link.
        With `num_bytes` 0 the probe reads as much as a meaningful result needs. If another probe is running, waits for
        its end first.

        Raises SourceGone when the source has ended, restarted or can never be read, and TandemError when the link could
        not be measured.
        """
        async with self._turn:
            try:
                return await self._measure(source, num_bytes)
            except grpc.aio.AioRpcError as error:
                is_late = error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
                kind = ErrorKind.DEADLINE if is_late else ErrorKind.WORKER_LOST
                raise TandemError(kind, f"{source}: {reason_of(error)}") from error
            except PeerError as error:
                raise TandemError(ErrorKind.KV_LOST, f"{source} cannot be read: {error}") from error
            except TimeoutError as error:
                raise TandemError(ErrorKind.DEADLINE, f"{source} does not answer or cannot be read in time") from error

    async def _measure(self, source: WorkerRef, num_bytes: int) -> tuple[LinkReport, LinkEndpoints]:
        if (other := self.reads.undrained_probe()) is not None:
            message = f"{source} is not measured: an abandoned read of {other} may still write to the same blocks"
            raise TandemError(ErrorKind.OVERLOADED, message)
        async with open_source(self.trust, source, self.me) as verified:
            peer = self.reads.canonical_peer(verified.peer)
        async with asyncio.timeout(ANSWER_S):
            await asyncio.wrap_future(self.reads.connect(peer))
        passes = _ProbePasses(self, peer, min(num_bytes, MOST_BYTES) or ENOUGH_BYTES)
        limit_s = MOST_S if num_bytes else ENOUGH_S
        await passes.run(0, 1, limit_s)
        idle = await self._count()
        await asyncio.sleep(IDLE_S)
        before = await self._count()
        together = await passes.run(1, passes.num_rounds, limit_s, checked=False)
        alone = await passes.run(1, NUM_ALONE, limit_s, checked=False, most_open=1)
        after = await self._count()
        await passes.run(1, 1, limit_s)
        ends, num_read = self._ends(verified), together.num_bytes + alone.num_bytes
        link_type, evidence = detect_link_type(num_read, idle, before, after, ends)
        seconds = num_read / max(together.bytes_per_s, alone.bytes_per_s)
        report = LinkReport(source=source, link_type=link_type, evidence=evidence, num_bytes=num_read, seconds=seconds)
        return report, ends

    async def _count(self) -> Counters:
        return await asyncio.to_thread(read_counters, self.clock.now())

    def _ends(self, source: Source) -> LinkEndpoints:
        me = self.me
        is_same = bool(me.machine) and source.machine == me.machine
        device = source.peer.ranks[0].region.device
        return LinkEndpoints(me.transport_kind, is_same, self.pool.region.device, device)


class _Run(NamedTuple):
    """Result of one pass. `bytes_per_s`: best throughput in bytes per second, that of the whole pass or of its fastest
    read. The latter is better where the event loop delayed the pass."""

    num_bytes: int
    bytes_per_s: float


class _ProbePasses:
    """Run the passes of one probe. Raises TandemError where either worker has no probe blocks."""

    def __init__(self, probe: LinkProbe, peer: TransportPeer, num_bytes: int) -> None:
        self._probe = probe
        self._peer = peer
        theirs, ours = peer.ranks[0].region, probe.pool.region
        num = min(theirs.num_probe_blocks, ours.num_probe_blocks)
        if num < 1:
            message = f"cannot measure {peer.worker}: it or this worker has no trial blocks and is of another version"
            raise TandemError(ErrorKind.UNSUPPORTED, message)
        block_bytes = peer.layout.block_bytes
        self._num_blocks = min(num, -(-num_bytes // block_bytes))
        self._num_sources = num
        self.num_rounds = -(-num_bytes // (self._num_blocks * block_bytes))

    async def run(
        self, shift: int, num_rounds: int, limit_s: float, *, checked: bool = True, most_open: int = MAX_OPEN
    ) -> _Run:
        """Read probe blocks `num_rounds` times, or until `limit_s` seconds are over, with at most `most_open` reads at
        once. `shift`: number of blocks by which the source's blocks are rotated; passes with different shifts write
        different content to the same local block. `checked`: whether to verify digests, if there are any.

        No read is open afterwards, also after an error, unless the transfer thread hangs.
        """
        reads, clock = self._probe.reads, self._probe.clock
        trial, started = self._trial(shift, checked=checked), clock.now()
        opened: deque[asyncio.Future[ReadDone]] = deque()
        num_bytes, bytes_per_s = 0, 0.0
        try:
            while num_rounds or opened:
                while num_rounds and len(opened) < most_open:
                    opened.append(asyncio.wrap_future(reads.try_read(trial)))
                    num_rounds -= 1
                try:
                    await self._wait(opened[0])
                except TimeoutError:
                    # The other orders hang too: do not wait for them in `finally`.
                    opened.clear()
                    raise
                done = opened.popleft().result()
                num_bytes += done.num_bytes
                bytes_per_s = max(bytes_per_s, done.num_bytes / max(done.seconds, TICK_S))
                if clock.now() - started >= limit_s:
                    num_rounds = 0
        finally:
            with contextlib.suppress(TimeoutError):
                for order in opened:
                    await self._wait(order)
                    order.exception()
        return _Run(num_bytes, max(bytes_per_s, num_bytes / max(clock.now() - started, TICK_S)))

    async def _wait(self, order: asyncio.Future[ReadDone]) -> None:
        """Wait until a read has ended; after `patience_s` seconds tear its peer down and wait as long again. Raises
        TimeoutError when the read does not end even then."""
        patience_s = self._probe.patience_s
        done, _ = await asyncio.wait([order], timeout=patience_s)
        if not done:
            self._probe.reads.tear_down(self._peer.worker, "a read does not end")
            done, _ = await asyncio.wait([order], timeout=patience_s)
        if not done:
            raise TimeoutError

    def _trial(self, shift: int, *, checked: bool) -> StartRead:
        theirs, ours = self._peer.ranks[0].region, self._probe.pool.region
        first_target = ours.num_blocks + ours.num_probe_blocks
        sources = tuple((place + shift) % self._num_sources for place in range(self._num_blocks))
        digests = self._probe.digests
        offered = tuple(
            BlockDigest(BlockId(theirs.num_blocks + source), () if digests is None else digests[source])
            for source in sources
        )
        local = tuple(BlockId(first_target + place) for place in range(self._num_blocks))
        return StartRead(0, self._peer.worker, sources, offered, local, checked and digests is not None)
