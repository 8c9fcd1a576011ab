"""Drive the KV transfer of a rank in another process, over any channel of bytes.

The first rank has a `RemoteTransfer`, the other process a `TransferServer`. The channel must keep the order in each
direction and must not block; its owner calls `lost` when the channel breaks.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable

from tandem.engine.transfer_messages import Command, Event, TransferStopped
from tandem.transfer.interface import KVTransfer, OpenKVTransfer
from tandem.wire.rank_codec import TRANSFER_COMMANDS, TRANSFER_EVENTS

Send = Callable[[bytes], None]

_log = logging.getLogger(__name__)


class RemoteTransfer(KVTransfer):
    """A `KVTransfer` of one rank that forwards commands to another process. `send` may call `lost` but must not raise;
    `received` is called by one thread."""

    def __init__(self, send: Send, on_event: Callable[[Event], None]) -> None:
        self._send = send
        self._on_event = on_event
        self._is_open = True
        self._has_ended = threading.Event()
        self._lock = threading.RLock()

    def __repr__(self) -> str:
        return f"RemoteTransfer({'ended' if self._has_ended.is_set() else 'alive'})"

    def start(self) -> None:
        """Do nothing: the other process starts its transfer thread."""

    def send(self, command: Command) -> None:
        """Forward a command. Raises RuntimeError after `halt` or the end, since no event would follow."""
        with self._lock:
            if not self._is_open:
                raise RuntimeError("the transfer thread of another rank has stopped")
            self._send(TRANSFER_COMMANDS.encode(command))

    def halt(self) -> None:
        with self._lock:
            if self._is_open:
                self._is_open = False
                self._send(TRANSFER_COMMANDS.encode(None))

    def join(self, timeout_s: float) -> bool:
        return self._has_ended.wait(timeout_s)

    def received(self, data: bytes) -> None:
        """Forward an event of the other process. Events after the last one are dropped."""
        try:
            event = TRANSFER_EVENTS.decode(data)
        except ValueError as error:
            self.lost(f"another rank sent an invalid message: {error}")
            return
        if isinstance(event, TransferStopped):
            self._end(event)
        elif not self._has_ended.is_set():
            self._on_event(event)

    def lost(self, reason: str) -> None:
        """End because the channel is broken: the outcome of open commands is unknown."""
        self._end(TransferStopped(reason))

    def _end(self, event: TransferStopped) -> None:
        with self._lock:
            self._is_open = False
            if self._has_ended.is_set():
                return
            self._has_ended.set()
        self._on_event(event)


class TransferServer:
    """Own the transfer of this process's rank, driven by the first rank. Each event goes to `send`, which must not
    raise, on the transfer thread."""

    def __init__(self, open_mover: OpenKVTransfer, send: Send) -> None:
        self._send = send
        self._transfer = open_mover(self._send_event)

    def __repr__(self) -> str:
        return f"TransferServer({self._transfer!r})"

    def start(self) -> None:
        self._transfer.start()

    def handle(self, data: bytes) -> None:
        """Execute a command. A malformed one stops the transfer, since the first rank would wait for its outcome for
        ever."""
        try:
            command = TRANSFER_COMMANDS.decode(data)
        except ValueError as error:
            _log.error("the first rank sent an invalid command: %s", error)
            command = None
        if command is None:
            self._transfer.halt()
            return
        # RuntimeError: the transfer has stopped, and its last event reports that.
        with contextlib.suppress(RuntimeError):
            self._transfer.send(command)

    def stop(self, timeout_s: float) -> bool:
        """Stop after the open reads, because the first rank has ended. Returns False when the thread hangs."""
        self._transfer.halt()
        return self._transfer.join(timeout_s)

    def _send_event(self, event: Event) -> None:
        self._send(TRANSFER_EVENTS.encode(event))
