"""Turn the engine's reads into commands for the worker's KV transfer, and the transfer's events into engine
commands."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Set
from concurrent.futures import Future
from dataclasses import replace
from itertools import count
from typing import NamedTuple

from tandem.core.ids import WorkerRef
from tandem.engine.effects import Effect, StartRead, TearDownPeer
from tandem.engine.engine import Engine
from tandem.engine.transfer_messages import Command as TransferCommand
from tandem.engine.transfer_messages import (
    Connected,
    ConnectFailed,
    ConnectPeer,
    Event,
    PeerDrained,
    PeerLost,
    ReadDone,
    ReadFailed,
    SelfTest,
    SelfTestDone,
    TransferStopped,
    TransportPeer,
)
from tandem.transfer.interface import KVTransfer, PeerError
from tandem.worker.engine.driver import Command

_log = logging.getLogger(__name__)

_GONE = "it is gone, and no read of it is open"
_FIRST_PROBE_ID = 1 << 62
"""First id of the reads that the engine does not know; above all ids of the engine, so that both kinds go through one
transfer."""


SELF_TEST_S = 10.0
"""Seconds after which a self-test without an answer has failed."""
MIN_SAMPLE_BYTES = 1 << 20
"""Smallest read that counts for the throughput of its source, in bytes; smaller ones measure the fixed cost of a read,
not the link."""
_MAX_SOURCES = 4096
"""Sources whose throughput is kept; beyond that the oldest is dropped."""


class SourceThroughput(NamedTuple):
    """Hold how much was read from a source: the bytes, and the sum of the reads' durations in seconds. A time in which
    two reads overlap counts twice."""

    num_bytes: int = 0
    seconds: float = 0.0


class _OpenRead(NamedTuple):
    """Source of an open read. `result`: future that completes with the end of a probe read; None for a read of the
    engine."""

    source: WorkerRef
    result: Future[ReadDone] | None


class TransferClient:
    """Own the KV transfer of one worker, its connections to sources (workers that it reads from) and its open reads.

    `open_transfer(on_event)` opens the transfer, which passes its events to `on_event`. `post` queues a command for the
    engine's thread. `report` is called on the transfer thread when a source was lost, and when the transfer has ended.
    It is called before the engine learns of a lost source, so that the streams to the source are reset before the
    engine reacts. `digests`: whether reads are checked against the source's digests. `problem`: None after a self-test
    that has succeeded, else what is wrong.

    Called by the engine's thread (reads), the event loop (connections, probe reads) and the transfer thread (events).
    All probe reads write to the same blocks, and a failed one may go on writing until the transport has ended all reads
    from its source (`undrained_probe`).
    """

    def __init__(
        self,
        open_transfer: Callable[[Callable[[Event], None]], KVTransfer],
        post: Callable[[Command], None],
        report: Callable[[PeerLost | TransferStopped], None],
        *,
        digests: bool,
    ) -> None:
        self._post = post
        self._report = report
        self._digests = digests
        self._lock = threading.Lock()
        self._peers: dict[WorkerRef, TransportPeer] = {}
        self._lingering: set[WorkerRef] = set()
        self._leaving: set[WorkerRef] = set()
        self._connecting: dict[WorkerRef, list[Future[None]]] = {}
        self._reads: dict[int, _OpenRead] = {}
        self._undrained_probes: set[WorkerRef] = set()
        self._probe_ids = count(_FIRST_PROBE_ID)
        self._throughput: dict[WorkerRef, SourceThroughput] = {}
        self._self_test: Future[None] | None = None
        self.problem: str | None = "the transport has not been tested yet"
        self.transfer = open_transfer(self.on_event)

    def __repr__(self) -> str:
        return f"TransferClient({len(self._peers)} peers, {len(self._lingering)} lingering)"

    async def test(self) -> str | None:
        """Read a few bytes of this worker's own memory through the transfer, and return the new value of `problem`:
        None if the bytes have arrived intact, else what is wrong.

        Must be called on the event loop, one call at a time.
        """
        answer: Future[None] = Future()
        answer.set_running_or_notify_cancel()
        self._self_test = answer
        problem = self._send(SelfTest())
        if problem is not None:
            self.problem = problem
            return problem
        try:
            async with asyncio.timeout(SELF_TEST_S):
                await asyncio.wrap_future(answer)
        except TimeoutError:
            self.problem = f"the transfer thread has not answered for {SELF_TEST_S:g} s"
        return self.problem

    def connect(self, peer: TransportPeer) -> Future[None]:
        """Begin to connect to the source that `peer` describes, so that it can be read, and return without waiting. The
        future completes once the source is connected, and raises PeerError when that fails."""
        future: Future[None] = Future()
        future.set_running_or_notify_cancel()
        with self._lock:
            if peer.worker in self._lingering:
                future.set_exception(PeerError(f"a read of {peer.worker} is not proven to have ended"))
                return future
            self._leaving.discard(peer.worker)
            self._connecting.setdefault(peer.worker, []).append(future)
        problem = self._send(ConnectPeer(peer))
        if problem is not None:
            self._answer(peer.worker, PeerError(problem))
        return future

    def canonical_peer(self, peer: TransportPeer) -> TransportPeer:
        """Return the description under which the worker of `peer` is connected already, or `peer` itself if it is not
        connected.

        The two descriptions may differ in the spelling of the worker's address. Connecting the worker again under
        another spelling would abort the open reads from it.
        """
        with self._lock:
            others = [known for known in self._peers.values() if known.life == peer.life]
        return next((known for known in others if replace(peer, worker=known.worker) == known), peer)

    def start_read(self, read: StartRead) -> None:
        """Start a read of the engine and return without waiting; the end of the read is reported to the engine.

        If the source is not connected or has offered no digests although they are required, the read is reported as
        failed, and nothing writes to its local blocks.
        """
        with self._lock:
            peer = self._peers.get(read.source)
        if peer is None:
            self._refuse(read, f"{read.source} is not connected")
            return
        heads = peer.layout.group.heads
        if self._digests and any(len(offered.heads) != heads for offered in read.offered):
            required = f"handoff.digests requires one for each of {heads} KV heads here"
            self._refuse(read, f"{read.source} offers blocks without digests: {required}")
            return
        problem = self._start(read if self._digests else replace(read, is_checked=False), None)
        if problem is not None:
            self._refuse(read, problem)

    def try_read(self, trial: StartRead) -> Future[ReadDone]:
        """Start a read for a link probe, of which the engine does not know, and return without waiting. `trial`: the
        read to start; its id is replaced by a new one. The future completes only when the read has ended, and raises
        PeerError when the read has failed or cannot be started."""
        result: Future[ReadDone] = Future()
        result.set_running_or_notify_cancel()
        with self._lock:
            is_connected = trial.source in self._peers
        problem: str | None = f"{trial.source} is not connected"
        if is_connected:
            problem = self._start(replace(trial, read=next(self._probe_ids)), result)
        if problem is not None:
            result.set_exception(PeerError(problem))
        return result

    def undrained_probe(self) -> WorkerRef | None:
        """Return a source from which a failed probe read may still write to local memory; None if there is none."""
        with self._lock:
            return next(iter(self._undrained_probes), None)

    def take_throughput(self, num_bytes: int) -> dict[WorkerRef, SourceThroughput]:
        """Return, by source, the throughput of the engine's reads since the source was last returned, and begin to
        count anew.

        Sources from which fewer than `num_bytes` bytes were read are left out, and their counts are kept. Reads of
        fewer than `MIN_SAMPLE_BYTES` bytes do not count.
        """
        with self._lock:
            taken = {source: found for source, found in self._throughput.items() if found.num_bytes >= num_bytes}
            for source in taken:
                del self._throughput[source]
        return taken

    def tear_down(self, source: WorkerRef, reason: str) -> None:
        """Begin to tear down the connection to a source with all its reads, and return without waiting. `reason`: the
        reason for reports and logs. Does nothing when the source is not connected, because its loss was reported to the
        engine before."""
        with self._lock:
            is_connected = source in self._peers
        problem = self._send(TearDownPeer(source, reason)) if is_connected else None
        if problem is not None:
            _log.warning("the KV connection to worker %s cannot be closed: %s", source, problem)

    def disconnect_when_idle(self, source: WorkerRef) -> None:
        """Disconnect a source that is gone as soon as no read of it is open, and return without waiting. A later
        `connect` cancels this.

        Until the source is disconnected, its memory stays mapped here, and GPU memory that is mapped cannot be freed.
        """
        with self._lock:
            if source not in self._peers:
                return
            self._leaving.add(source)
        self._leave(source)

    def keep(self, sources: Set[WorkerRef]) -> None:
        """Disconnect all connected sources except `sources`, each as soon as no read of it is open. Sources are
        compared by id and incarnation."""
        lives = {(source.id, source.incarnation) for source in sources}
        with self._lock:
            others = [source for source, peer in self._peers.items() if peer.life not in lives]
        for source in others:
            self.disconnect_when_idle(source)

    def on_event(self, event: Event) -> None:
        """Handle an event of the transfer: update connections and open reads, and report to the engine or to the caller
        that waits. Called on the transfer thread."""
        match event:
            case ReadDone() | ReadFailed():
                self._end_read(event)
            case Connected(peer):
                with self._lock:
                    self._peers[peer.worker] = peer
                self._answer(peer.worker, None)
            case ConnectFailed(peer, reason):
                self._answer(peer.worker, PeerError(reason))
            case PeerLost(peer, proven, reason):
                level = logging.INFO if reason == _GONE and proven else logging.WARNING
                still = "" if proven else ", and reads from it may still write"
                _log.log(level, "the KV connection to worker %s is closed%s: %s", peer.worker, still, reason)
                self._lose(event)
            case PeerDrained(peer):
                with self._lock:
                    self._lingering.discard(peer.worker)
                    self._undrained_probes.discard(peer.worker)
                self._report_peer_lost(peer.worker, "its last read has ended", proven=True)
            case SelfTestDone(error):
                self.problem = None if error is None else f"the transport's self-test failed: {error}"
                if self._self_test is not None and not self._self_test.done():
                    self._self_test.set_result(None)
            case TransferStopped():
                self._stop(event)

    def _send(self, command: TransferCommand) -> str | None:
        """Send a command to the transfer. Returns None if it was sent, else the reason why no event will answer it."""
        try:
            self.transfer.send(command)
        except RuntimeError as error:
            return str(error)
        return None

    def _start(self, read: StartRead, result: Future[ReadDone] | None) -> str | None:
        """Send a read to the transfer and record it as open. Returns None, or why it was not started."""
        with self._lock:
            self._reads[read.read] = _OpenRead(read.source, result)
        problem = self._send(read)
        if problem is not None:
            with self._lock:
                del self._reads[read.read]
        return problem

    def _refuse(self, read: StartRead, reason: str) -> None:
        id = read.read
        self._post(lambda engine, now: engine.read_failed(id, reason, drained=True, now=now))

    def _end_read(self, event: ReadDone | ReadFailed) -> None:
        with self._lock:
            source, result = self._reads.pop(event.id)
            if result is not None and isinstance(event, ReadFailed) and not event.drained:
                self._undrained_probes.add(source)
            if result is None and isinstance(event, ReadDone) and event.num_bytes >= MIN_SAMPLE_BYTES:
                before = self._throughput.get(source, SourceThroughput())
                self._throughput[source] = SourceThroughput(
                    before.num_bytes + event.num_bytes, before.seconds + event.seconds
                )
                if len(self._throughput) > _MAX_SOURCES:
                    del self._throughput[next(iter(self._throughput))]
        self._leave(source)
        match event:
            case ReadDone(id):
                if result is None:
                    self._post(lambda engine, now: engine.read_done(id, now))
                else:
                    result.set_result(event)
            case ReadFailed():
                if result is None:
                    self._post(lambda engine, now: _fail(engine, event, now))
                else:
                    result.set_exception(PeerError(event.reason))

    def _leave(self, source: WorkerRef) -> None:
        """Tear a source down if `disconnect_when_idle` was called and no read of it is open."""
        with self._lock:
            if source not in self._leaving or any(read.source == source for read in self._reads.values()):
                return
            self._leaving.discard(source)
        self.tear_down(source, _GONE)

    def _answer(self, source: WorkerRef, error: PeerError | None) -> None:
        with self._lock:
            waiting = self._connecting.pop(source, [])
        for future in waiting:
            if error is None:
                future.set_result(None)
            else:
                future.set_exception(error)

    def _lose(self, event: PeerLost) -> None:
        source = event.peer.worker
        with self._lock:
            self._peers.pop(source, None)
            self._leaving.discard(source)
            if event.proven:
                # Where a rank drained before the others lost the source, no PeerDrained follows.
                self._undrained_probes.discard(source)
            else:
                self._lingering.add(source)
        self._report(event)
        self._report_peer_lost(source, event.reason, proven=event.proven)

    def _report_peer_lost(self, source: WorkerRef, reason: str, *, proven: bool) -> None:
        self._post(lambda engine, now: engine.peer_lost(source, reason, proven=proven, now=now))

    def _stop(self, event: TransferStopped) -> None:
        with self._lock:
            self._peers.clear()
            waiting = list(self._connecting)
        for source in waiting:
            self._answer(source, PeerError(event.error or "the transfer thread has stopped"))
        self._report(event)


def _fail(engine: Engine, failed: ReadFailed, now: float) -> list[Effect]:
    """Report a failed read to the engine. Logged as a warning only if a job waited for the read: the blocks of an
    abandoned read are reused by its source and may fail the digest check."""
    effects = engine.read_failed(failed.id, failed.reason, drained=failed.drained, now=now)
    level = logging.WARNING if effects else logging.INFO
    _log.log(level, "the KV read %d failed (%s): %s", failed.id, failed.kind.value, failed.reason)
    return effects
