"""Turn the engine's reads into orders to the transfer thread, and the transfer's events into engine commands."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Set
from concurrent.futures import Future
from dataclasses import replace

from tandem.core.ids import WorkerRef
from tandem.engine.effects import Effect, StartRead, TearDownProducer
from tandem.engine.engine import Engine
from tandem.engine.transfer_messages import (
    Connected,
    ConnectFailed,
    Event,
    PeerDrained,
    PeerLost,
    ReadDone,
    ReadFailed,
    SelfTestDone,
    TransferStopped,
    TransportPeer,
)
from tandem.transfer.interface import KVTransfer, PeerError
from tandem.worker.engine.driver import Command
from tandem.worker.kv.probe_reads import ProbeReads
from tandem.worker.kv.read_stats import ReadStats

_log = logging.getLogger(__name__)

_GONE = "it is gone, and no read of it is open"


class TransferClient:
    """Own the connections to sources and the open reads of one worker.

    Called by the engine's thread (reads), the event loop (connections, probe reads) and the transfer thread (events).
    `read_stats` measures the engine's reads; `probe_reads` are those that the engine does not know.

    `post` runs a command on the engine's thread. `on_peer_lost` is called with a lost source before the engine is, so
    that the streams to the source are reset before the engine reacts. `on_self_test` receives None or an error.
    """

    def __init__(
        self,
        post: Callable[[Command], None],
        on_peer_lost: Callable[[WorkerRef], None],
        on_self_test: Callable[[str | None], None],
        on_stopped: Callable[[str | None], None],
        *,
        digests: bool,
    ) -> None:
        self._post = post
        self._on_peer_lost = on_peer_lost
        self._on_self_test = on_self_test
        self._on_stopped = on_stopped
        self._digests = digests
        self._transfer: KVTransfer | None = None
        self._lock = threading.Lock()
        self._peers: dict[WorkerRef, TransportPeer] = {}
        self._lingering: set[WorkerRef] = set()
        self._leaving: set[WorkerRef] = set()
        self._connecting: dict[WorkerRef, list[Future[None]]] = {}
        self.probe_reads = ProbeReads()
        self.read_stats = ReadStats()

    def __repr__(self) -> str:
        return f"TransferClient({len(self._peers)} peers, {len(self._lingering)} lingering)"

    def attach(self, transfer: KVTransfer) -> None:
        """Set the transfer whose events come here; before anything else."""
        self._transfer = transfer

    def connect(self, peer: TransportPeer) -> Future[None]:
        """Make a source readable. The future raises PeerError when that fails."""
        future: Future[None] = Future()
        future.set_running_or_notify_cancel()
        with self._lock:
            if peer.worker in self._lingering:
                future.set_exception(PeerError(f"a read of {peer.worker} is not proven to have ended"))
                return future
            self._leaving.discard(peer.worker)
            self._connecting.setdefault(peer.worker, []).append(future)
        try:
            self._attached.connect(peer)
        except RuntimeError as error:
            self._answer(peer.worker, PeerError(str(error)))
        return future

    def canonical_peer(self, peer: TransportPeer) -> TransportPeer:
        """Return the connected peer if it differs only in the spelling of its address, else `peer`: connecting the same
        peer under another address would abort its open reads."""
        with self._lock:
            others = [known for known in self._peers.values() if known.life == peer.life]
        return next((known for known in others if replace(peer, worker=known.worker) == known), peer)

    def start_read(self, read: StartRead) -> None:
        """Start a read of a connected source; otherwise report the read as failed, with nothing to drain."""
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
        self.read_stats.begin(read.read, read.source)
        try:
            self._attached.read(read if self._digests else replace(read, is_checked=False))
        except RuntimeError as error:
            self.read_stats.end(read.read)
            self._refuse(read, str(error))

    def try_read(self, trial: StartRead) -> Future[ReadDone]:
        """Start a read that the engine does not know, under an id of its own. The future raises PeerError when the read
        fails."""
        read, future = self.probe_reads.begin(trial)
        with self._lock:
            is_connected = trial.source in self._peers
        try:
            if not is_connected:
                raise RuntimeError(f"{trial.source} is not connected")
            self._attached.read(read)
        except RuntimeError as error:
            self.probe_reads.refuse(read, str(error))
        return future

    def tear_down(self, teardown: TearDownProducer) -> None:
        """Tear down the connection to a source. One that is not connected was reported to the engine before."""
        self._tear_down(teardown.source, "a read does not end")

    def disconnect_when_idle(self, source: WorkerRef) -> None:
        """Disconnect a source that is gone, once no read of it is open; `connect` cancels this.

        Until then its memory stays mapped here, and GPU memory that is mapped cannot be freed.
        """
        with self._lock:
            if source not in self._peers:
                return
            self._leaving.add(source)
        self._leave(source)

    def keep(self, sources: Set[WorkerRef]) -> None:
        """Disconnect all sources but these, which are compared by id and incarnation."""
        lives = {(source.id, source.incarnation) for source in sources}
        with self._lock:
            others = [source for source, peer in self._peers.items() if peer.life not in lives]
        for source in others:
            self.disconnect_when_idle(source)

    def on_event(self, event: Event) -> None:
        """Handle an event of the transfer, on the transfer thread."""
        match event:
            case ReadDone() | ReadFailed():
                if not self.probe_reads.end(event):
                    self._end_read(event)
            case Connected(peer):
                with self._lock:
                    self._peers[peer.worker] = peer
                self._answer(peer.worker, None)
            case ConnectFailed(peer, reason):
                self._answer(peer.worker, PeerError(reason))
            case PeerLost(peer, proven, reason):
                level = logging.INFO if reason == _GONE and proven else logging.WARNING
                _log.log(level, "lost %s%s: %s", peer.worker, "" if proven else " (reads may go on)", reason)
                self._lose(peer, reason, proven)
            case PeerDrained(peer):
                with self._lock:
                    self._lingering.discard(peer.worker)
                self.probe_reads.drained(peer.worker)
                self._report_peer_lost(peer.worker, "its last read has ended", proven=True)
            case SelfTestDone(error):
                self._on_self_test(error)
            case TransferStopped(error):
                self._stop(error)

    @property
    def _attached(self) -> KVTransfer:
        assert self._transfer is not None, "no transfer was attached"
        return self._transfer

    def _refuse(self, read: StartRead, reason: str) -> None:
        id = read.read
        self._post(lambda engine, now: engine.read_failed(id, reason, drained=True, now=now))

    def _end_read(self, event: ReadDone | ReadFailed) -> None:
        match event:
            case ReadDone(id, num_bytes, seconds):
                self._leave(self.read_stats.end(id, num_bytes, seconds))
                self._post(lambda engine, now: engine.read_done(id, now))
            case ReadFailed():
                self._leave(self.read_stats.end(event.id))
                self._post(lambda engine, now: _fail(engine, event, now))

    def _leave(self, source: WorkerRef) -> None:
        """Tear a source down if `disconnect_when_idle` was called and no read of it is open."""
        if self.read_stats.is_open(source) or self.probe_reads.is_open(source):
            return
        with self._lock:
            if source not in self._leaving:
                return
            self._leaving.discard(source)
        self._tear_down(source, _GONE)

    def _tear_down(self, source: WorkerRef, reason: str) -> None:
        with self._lock:
            peer = self._peers.get(source)
        if peer is None:
            return
        try:
            self._attached.teardown(peer, reason)
        except RuntimeError as error:
            _log.warning("%s cannot be torn down: %s", source, error)

    def _answer(self, source: WorkerRef, error: PeerError | None) -> None:
        with self._lock:
            waiting = self._connecting.pop(source, [])
        for future in waiting:
            if error is None:
                future.set_result(None)
            else:
                future.set_exception(error)

    def _lose(self, peer: TransportPeer, reason: str, proven: bool) -> None:
        with self._lock:
            self._peers.pop(peer.worker, None)
            self._leaving.discard(peer.worker)
            if not proven:
                self._lingering.add(peer.worker)
        self._on_peer_lost(peer.worker)
        self._report_peer_lost(peer.worker, reason, proven=proven)

    def _report_peer_lost(self, source: WorkerRef, reason: str, *, proven: bool) -> None:
        def report(engine: Engine, now: float) -> list[Effect]:
            return engine.peer_lost(source, reason, proven=proven, now=now)

        self._post(report)

    def _stop(self, error: str | None) -> None:
        with self._lock:
            self._peers.clear()
            waiting = list(self._connecting)
        for source in waiting:
            self._answer(source, PeerError(error or "the transfer thread has stopped"))
        self._on_stopped(error)


def _fail(engine: Engine, failed: ReadFailed, now: float) -> list[Effect]:
    """Report a failed read to the engine. Logged as a warning only if a job waited for the read: the blocks of an
    abandoned read are reused by its source and may fail the digest check."""
    effects = engine.read_failed(failed.id, failed.reason, drained=failed.drained, now=now)
    level = logging.WARNING if effects else logging.INFO
    _log.log(level, "read %d failed (%s): %s", failed.id, failed.kind.value, failed.reason)
    return effects
