"""Run a rank's transfer engine on the one thread that uses its transport, beside a helper thread for digests.

The helper computes the digests of received blocks while the transfer thread goes on reading: a shared-memory read
copies inside the call that posts it, and a digest costs a fifth to a third of that copy. All decisions are those of
`transfer_engine.TransferEngine`.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from enum import Enum, auto

from tandem.core.clock import Clock
from tandem.engine.effects import StartRead
from tandem.engine.transfer_messages import Command, Event
from tandem.transfer.core_affinity import CoreAvoidance
from tandem.transfer.interface import KVTransfer, Transport
from tandem.transfer.transfer_engine import Digest, TransferEngine

MAX_POST_BYTES = 8 << 20
"""Most bytes of one post: a shared-memory read blocks the thread for as long as a copy of these bytes takes."""
BUSY_POLL_S = 0.0005
IDLE_POLL_S = 0.02
DRAIN_TURNS = 2000
"""Most calls of `TransferEngine.turn`, about a second of them, to wait for open reads before the transport is closed.

UCX aborts a peer process that is answering a read over TCP when its reader goes away (measured: 9 of 10 stopped peers,
2 of 10 running ones).
"""

_log = logging.getLogger(__name__)


class _Signal(Enum):
    WAKE = auto()
    STOP = auto()


class TransferThread(KVTransfer):
    """Run the transfer of one rank on a thread of its own. The thread carries out commands in order, which any thread
    may send.

    `transport`: moves the bytes; from `start` on only this thread uses it. `digest`: computes the digests of local
    blocks; this thread and its helper thread call it concurrently. `on_event`: receives the events in order, on this
    thread; it must not block or raise. TransferStopped is the last event. `max_post_bytes`: most bytes that one post to
    the transport reads.
    """

    def __init__(
        self,
        transport: Transport,
        digest: Digest,
        on_event: Callable[[Event], None],
        clock: Clock,
        max_post_bytes: int = MAX_POST_BYTES,
    ) -> None:
        self._engine = TransferEngine(transport, digest, clock, max_post_bytes)
        self._enter_thread = transport.enter_thread
        self._on_event = on_event
        self._inbox: queue.SimpleQueue[Command | _Signal] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._is_open = True
        self._thread = threading.Thread(target=self._run, name="tandem-transfer", daemon=True)
        self._helper = threading.Thread(target=self._help, name="tandem-digests", daemon=True)
        self._core_avoidance = CoreAvoidance()

    def __repr__(self) -> str:
        return f"TransferThread({'alive' if self._thread.is_alive() else 'ended'}, {self._engine!r})"

    def start(self) -> None:
        self._thread.start()

    def send(self, command: Command) -> None:
        """Queue a command and return without waiting. Raises RuntimeError after a halt or failure, because no event
        would report the result."""
        with self._lock:
            if not self._is_open:
                raise RuntimeError("the transfer thread has stopped")
            self._inbox.put(command)

    def halt(self) -> None:
        """Begin to stop, and return without waiting: open reads end, then the transport is closed and the thread ends.

        Also works before `start`; a second call does nothing.
        """
        with self._lock:
            if self._is_open:
                self._is_open = False
                self._inbox.put(_Signal.STOP)
            if self._thread.ident is None:
                self._thread.start()

    def join(self, timeout_s: float) -> bool:
        """Wait until the thread has ended. Returns False when it is still running after `timeout_s` seconds."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _help(self) -> None:
        self._engine.checks.help(on_done=lambda: self._inbox.put(_Signal.WAKE))

    def _run(self) -> None:
        error: str | None = None
        try:
            self._helper.start()
            self._enter_thread()
            while self._accept_commands():
                self._emit(self._engine.turn())
            self._drain()
        except Exception as failure:
            _log.exception("the transfer thread failed, so that this worker moves no KV any more")
            error = f"{type(failure).__name__}: {failure}"
        self._finish(error)

    def _drain(self) -> None:
        self._engine.cancel_all("the transfer thread was stopped")
        beat = threading.Event()
        for _ in range(DRAIN_TURNS):
            self._emit(self._engine.turn())
            if self._engine.is_drained:
                return
            beat.wait(BUSY_POLL_S)

    def _finish(self, error: str | None) -> None:
        """Close the engine and answer every read request.

        No command enters the inbox after this method has taken the lock, so no request is left unanswered.
        """
        self._engine.checks.close()
        if self._helper.ident is not None:
            self._helper.join()
        with self._lock:
            self._is_open = False
        while not self._inbox.empty():
            command = self._inbox.get()
            if isinstance(command, StartRead):
                self._engine.accept(command)
        self._emit(self._engine.close(error))

    def _accept_commands(self) -> bool:
        """Accept all queued commands, or wait for one until the next poll is due. Returns False after the stop."""
        timeout = BUSY_POLL_S if self._engine.is_busy else IDLE_POLL_S
        try:
            command = self._inbox.get(timeout=0 if self._engine.has_ready_work else timeout)
            while command is not _Signal.STOP:
                if not isinstance(command, _Signal):
                    self._accept(command)
                command = self._inbox.get_nowait()
        except queue.Empty:
            return True
        return False

    def _accept(self, command: Command) -> None:
        if isinstance(command, StartRead) and self._helper.native_id is not None:
            self._core_avoidance.keep(self._helper.native_id)
        self._engine.accept(command)

    def _emit(self, events: list[Event]) -> None:
        for event in events:
            self._on_event(event)
