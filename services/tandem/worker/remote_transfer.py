"""Both ends of a rank's mover that runs in another process, over any channel of bytes; never opens one.

The leader of the ranks has a `RemoteTransfer`, the other process a `TransferServer`. The channel must keep the order in
each direction, and must not wait: whoever owns it calls `lost` when it breaks.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable

from google.protobuf.message import DecodeError

from tandem.core.errors import TandemError
from tandem.engine.transfer_messages import Command, Event, TransferStopped
from tandem.transfer.interfaces import OpenRankTransfer
from tandem.wire.gen import mover_pb2 as pb
from tandem.wire.transfer_codec import decode_command, decode_event, encode_command, encode_event

Send = Callable[[bytes], None]

_log = logging.getLogger(__name__)


class RemoteTransfer:
    """A `RankTransfer`. The function `send` may call `lost` but never raises; `received` comes from one thread."""

    def __init__(self, send: Send, on_event: Callable[[Event], None]) -> None:
        self._send = send
        self._on_event = on_event
        self._is_open = True
        self._has_ended = threading.Event()
        self._lock = threading.RLock()

    def __repr__(self) -> str:
        return f"RemoteMover({'ended' if self._has_ended.is_set() else 'alive'})"

    def start(self) -> None:
        """It was started where it runs."""

    def send(self, command: Command) -> None:
        """Raises RuntimeError once it was halted, or has ended: then nothing would ever answer."""
        with self._lock:
            if not self._is_open:
                raise RuntimeError("the transfer thread of another rank has stopped")
            self._send(encode_command(command).SerializeToString())

    def halt(self) -> None:
        with self._lock:
            if self._is_open:
                self._is_open = False
                self._send(encode_command(None).SerializeToString())

    def join(self, timeout_s: float) -> bool:
        return self._has_ended.wait(timeout_s)

    def received(self, data: bytes) -> None:
        """An event came. After the last one nothing is heard any more."""
        try:
            event = decode_event(pb.MoverEvent.FromString(data))
        except (DecodeError, TandemError) as error:
            self.lost(f"another rank is not understood: {error}")
            return
        if isinstance(event, TransferStopped):
            self._end(event)
        elif not self._has_ended.is_set():
            self._on_event(event)

    def lost(self, reason: str) -> None:
        """The channel is broken, so nothing more will come: what the rank still owes is in doubt."""
        self._end(TransferStopped(reason))

    def _end(self, event: TransferStopped) -> None:
        with self._lock:
            self._is_open = False
            if self._has_ended.is_set():
                return
            self._has_ended.set()
        self._on_event(event)


class TransferServer:
    """The mover of this process's rank, driven by its leader. Each event goes to `send`, which never raises, on the
    mover's thread."""

    def __init__(self, open_mover: OpenRankTransfer, send: Send) -> None:
        self._send = send
        self._mover = open_mover(self._tell)

    def __repr__(self) -> str:
        return f"MoverService({self._mover!r})"

    def start(self) -> None:
        self._mover.start()

    def handle(self, data: bytes) -> None:
        """Carry out a command. One that cannot be understood ends the mover: its leader waits for an answer."""
        try:
            command = decode_command(pb.MoverCommand.FromString(data))
        except (DecodeError, TandemError) as error:
            _log.error("the leader of the ranks is not understood: %s", error)
            command = None
        if command is None:
            self._mover.halt()
            return
        # One that has stopped has said so, or is about to.
        with contextlib.suppress(RuntimeError):
            self._mover.send(command)

    def stop(self, timeout_s: float) -> bool:
        """Let open reads end, then end: the leader is gone. False when a thread hangs."""
        self._mover.halt()
        return self._mover.join(timeout_s)

    def _tell(self, event: Event) -> None:
        self._send(encode_event(event).SerializeToString())
