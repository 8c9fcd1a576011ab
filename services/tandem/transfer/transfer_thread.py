"""The one thread of a worker that talks to its transport, and its helper for digests; decides nothing, see the carrier.

The helper computes the digests of what arrived while the first thread reads on: a shared-memory read copies inside
the call that posts it, and a digest costs a fifth to a third of that copy.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from enum import Enum, auto

from tandem.core.clock import Clock
from tandem.engine.transfer_messages import Command, Event, ReadRequest
from tandem.transfer.core_affinity import CoreAvoidance
from tandem.transfer.digest_checks import Digest
from tandem.transfer.interfaces import KVTransfer
from tandem.transfer.transfer_engine import TransferEngine
from tandem.transfer.transport import Transport

MAX_POST_BYTES = 8 << 20
"""Of one post: a shared-memory read blocks inside it for as long as a copy of these bytes."""
BUSY_POLL_S = 0.0005
IDLE_POLL_S = 0.02
DRAIN_TURNS = 2000
"""About a second for open reads to end before the transport is closed under them. UCX aborts a peer that is just
answering a read over TCP when its reader goes away (measured: 9 of 10 stopped peers, 2 of 10 running ones)."""

_log = logging.getLogger(__name__)


class _Signal(Enum):
    WAKE = auto()
    STOP = auto()


class TransferThread(KVTransfer):
    """Commands from any thread, in order; events to `on_event`, on the mover's thread, in order.

    `on_event` must not block and must not raise. The transport is used by this thread alone from `start` on, `digest`
    by this one and its helper at once. MoverStopped is the last event.
    """

    def __init__(
        self,
        transport: Transport,
        digest: Digest,
        on_event: Callable[[Event], None],
        clock: Clock,
        max_post_bytes: int = MAX_POST_BYTES,
    ) -> None:
        self._carrier = TransferEngine(transport, digest, clock, max_post_bytes, is_helped=True)
        self._enter_thread = transport.enter_thread
        self._on_event = on_event
        self._inbox: queue.SimpleQueue[Command | _Signal] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._is_open = True
        self._thread = threading.Thread(target=self._run, name="tandem-mover", daemon=True)
        self._helper = threading.Thread(target=self._help, name="tandem-digests", daemon=True)
        self._aside = CoreAvoidance()

    def __repr__(self) -> str:
        return f"Mover({'alive' if self.is_alive else 'ended'}, {self._carrier!r})"

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def start(self) -> None:
        self._thread.start()

    def send(self, command: Command) -> None:
        """Raises RuntimeError once the mover was stopped or has failed: then nothing would ever answer."""
        with self._lock:
            if not self._is_open:
                raise RuntimeError("the transfer thread has stopped")
            self._inbox.put(command)

    def halt(self) -> None:
        """Let open reads end, close the transport, and end the thread, started or not. Returns at once."""
        with self._lock:
            if self._is_open:
                self._is_open = False
                self._inbox.put(_Signal.STOP)
            if self._thread.ident is None:
                self._thread.start()

    def join(self, timeout_s: float) -> bool:
        """Wait for the thread's end. False when it hangs."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _help(self) -> None:
        self._carrier.checks.help(on_done=lambda: self._inbox.put(_Signal.WAKE))

    def _run(self) -> None:
        error: str | None = None
        self._helper.start()
        try:
            self._enter_thread()
            while self._accept_commands():
                self._emit(self._carrier.turn())
            self._drain()
        except Exception as failure:
            _log.exception("the transfer thread failed")
            error = f"{type(failure).__name__}: {failure}"
        self._finish(error)

    def _drain(self) -> None:
        self._carrier.cancel_all("the transfer thread was stopped")
        beat = threading.Event()
        for _ in range(DRAIN_TURNS):
            self._emit(self._carrier.turn())
            if self._carrier.is_drained:
                return
            beat.wait(BUSY_POLL_S)

    def _finish(self, error: str | None) -> None:
        """Nothing enters the inbox after this took the lock, so every order in it is answered."""
        self._carrier.checks.close()
        self._helper.join()
        with self._lock:
            self._is_open = False
        while not self._inbox.empty():
            command = self._inbox.get()
            if isinstance(command, ReadRequest):
                self._carrier.accept(command)
        self._emit(self._carrier.close(error))

    def _accept_commands(self) -> bool:
        """Take all that has come, waiting until the next poll is due. False when the last has been taken."""
        timeout = BUSY_POLL_S if self._carrier.is_busy else IDLE_POLL_S
        try:
            command = self._inbox.get(timeout=0 if self._carrier.has_ready_work else timeout)
            while command is not _Signal.STOP:
                if not isinstance(command, _Signal):
                    self._accept(command)
                command = self._inbox.get_nowait()
        except queue.Empty:
            return True
        return False

    def _accept(self, command: Command) -> None:
        if isinstance(command, ReadRequest) and self._helper.native_id is not None:
            self._aside.keep(self._helper.native_id)
        self._carrier.accept(command)

    def _emit(self, events: list[Event]) -> None:
        for event in events:
            self._on_event(event)
