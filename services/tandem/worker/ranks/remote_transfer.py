"""Drive the KV transfer of a rank in another process, over any channel.

The first rank has a `RemoteTransfer`; the other process executes its commands with `carry_out`. The channel must keep
the order in each direction and must not block; its owner calls `lost` when the channel breaks.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable

from tandem.engine.rank_messages import StopTransfer
from tandem.engine.transfer_messages import Command, Event, TransferStopped
from tandem.transfer.interface import KVTransfer


class RemoteTransfer(KVTransfer):
    """Drive the KV transfer of one rank, which runs in another process, over a channel to that process.

    `send`: puts a command on the channel; it may call `lost` but must not raise. `on_event`: receives the transfer's
    events. `received` must be called by one thread only.
    """

    def __init__(self, send: Callable[[Command | StopTransfer], None], on_event: Callable[[Event], None]) -> None:
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
        """Send a command to the other process. Raises RuntimeError after `halt` or the end of the transfer, because no
        event would report the result."""
        with self._lock:
            if not self._is_open:
                raise RuntimeError("the transfer thread of another rank has stopped")
            self._send(command)

    def halt(self) -> None:
        with self._lock:
            if self._is_open:
                self._is_open = False
                self._send(StopTransfer())

    def join(self, timeout_s: float) -> bool:
        return self._has_ended.wait(timeout_s)

    def received(self, event: Event) -> None:
        """Pass an event that the other process has sent to `on_event`. Events after TransferStopped are dropped."""
        if isinstance(event, TransferStopped):
            self._end(event)
        elif not self._has_ended.is_set():
            self._on_event(event)

    def lost(self, reason: str) -> None:
        """Report to `on_event` that the transfer has ended (TransferStopped with `reason`), because the channel to its
        process is broken.

        Whether open commands were carried out is unknown. Does nothing if the end of the transfer was reported before.
        """
        self._end(TransferStopped(reason))

    def _end(self, event: TransferStopped) -> None:
        with self._lock:
            self._is_open = False
            if self._has_ended.is_set():
                return
            self._has_ended.set()
        self._on_event(event)


def carry_out(transfer: KVTransfer, command: Command | StopTransfer) -> None:
    """Pass `command`, which the first rank's `RemoteTransfer` has sent, to `transfer`, the KV transfer of this
    process's rank. Does not raise when the transfer has stopped."""
    if isinstance(command, StopTransfer):
        transfer.halt()
        return
    # RuntimeError: the transfer has stopped, and its last event reports that.
    with contextlib.suppress(RuntimeError):
        transfer.send(command)
