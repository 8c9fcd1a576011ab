"""Own the other ranks of a worker, each a process of its own, on behalf of the first rank.

If one rank ends, reports a failure, or sends an invalid message, the whole group counts as lost, since the state of the
remaining ranks is unknown. The end of a process closes its socket, so no call waits for a rank that has ended.
"""

from __future__ import annotations

import contextlib
import logging
import shutil
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from tandem.core.errors import ErrorKind, TandemError
from tandem.core.ids import WorkerRef
from tandem.engine.rank_messages import (
    Loaded,
    RankCommand,
    RankEvent,
    RankFailed,
    RankReady,
    RankRegistered,
    RanksLost,
    StartTransfer,
    StopTransfer,
)
from tandem.engine.transfer_messages import Command, Event, TransportPeer
from tandem.wire.rank_codec import RANK_COMMANDS, RANK_EVENTS
from tandem.worker.ranks.rank_channel import RankChannel, listen

START_S = 120.0
"""Seconds for a process to start, import its libraries and report."""
POLL_S = 0.1
"""Seconds between two checks whether a starting process has ended."""
END_S = 2.0
"""Seconds for a rank to end after its channel was closed; a rank that hangs is killed."""

_log = logging.getLogger(__name__)


class RankProcess(Protocol):
    """The process of one rank; it ends by itself when its channel is closed."""

    def ended(self) -> str | None:
        """Return None while the process runs, else a text with the cause of its end."""
        ...

    def stop(self, timeout_s: float) -> None:
        """Wait for the process to end, and kill it after `timeout_s` seconds. Does not raise."""
        ...


Launch = Callable[[Path, int], RankProcess]
"""Signature of a launcher: `launch(directory, rank)` starts the process of that rank, which connects to the socket in
the directory."""


class RankGroup:
    """Start the ranks 1 to `size - 1` of a worker, send them the first rank's commands, and report when one of them is
    lost.

    `send_command` is called by one thread, everything else by any. `num_blocks`: KV blocks of each rank that has loaded
    its part of the model.
    """

    def __init__(self, directory: Path, size: int, launch: Launch, send_timeout_s: float) -> None:
        """Start the ranks with `launch`, and wait until each is about to join the process group. Raises TandemError
        when one does not start, after all have ended.

        `directory`: where the ranks' socket is created; the group removes the directory when it is closed.
        `send_timeout_s`: seconds that a send waits for a rank that does not read.
        """
        self.directory = directory
        self.num_blocks: list[int] = []
        self._peers: dict[int, TransportPeer] = {}
        self._changed = threading.Condition()
        self._lost: TandemError | None = None
        self._is_closed = False
        self._watchers: list[Callable[[str], None]] = []
        self._on_transfer_event: Callable[[int, Event], None] | None = None
        self._channels: dict[int, RankChannel] = {}
        self._processes: list[RankProcess] = []
        try:
            with contextlib.closing(listen(directory, size - 1)) as listener:
                for rank in range(1, size):
                    self._processes.append(launch(directory, rank))
                self._gather(listener, size, send_timeout_s)
        except BaseException:
            self.close()
            raise
        for rank, channel in self._channels.items():
            threading.Thread(target=self._listen, args=(rank, channel), name=f"tandem-rank-{rank}", daemon=True).start()

    def __repr__(self) -> str:
        return f"<rank group of {len(self._channels)}: {self._lost or ('closed' if self._is_closed else 'well')}>"

    def wait_loaded(self) -> None:
        """Wait without a time limit until every rank has loaded its part of the model. Raises TandemError when a rank
        fails or ends."""
        with self._changed:
            self._changed.wait_for(lambda: self._lost is not None or len(self.num_blocks) == len(self._channels))
            if self._lost is not None:
                raise self._lost

    def reason(self, wait_s: float) -> TandemError | None:
        """Return the error for which a rank was lost; None if no rank was lost.

        Waits up to `wait_s` seconds for an error.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._lost is not None, wait_s)
            return self._lost

    def watch(self, on_lost: Callable[[str], None]) -> None:
        """Call `on_lost` once with the reason as soon as any rank of the group is lost, on any thread.

        If a rank is lost already, it is called immediately.
        """
        with self._changed:
            self._watchers.append(on_lost)
            lost = self._lost
        if lost is not None:
            on_lost(lost.message)

    def send_command(self, command: RankCommand) -> None:
        """Send a command to every rank, as `runtime.ranks.leader.SendCommand`. Raises RanksLost when a rank is lost."""
        if self._lost is not None:
            raise RanksLost(self._lost.message)
        data = RANK_COMMANDS.encode(command)
        for rank in self._channels:
            self._send(rank, data)

    @property
    def ranks(self) -> range:
        """Return the numbers of all ranks but the first."""
        return range(1, len(self._channels) + 1)

    def open_transfers(self, worker: WorkerRef) -> list[TransportPeer]:
        """Open the KV transfer of every rank, and return the descriptions by which other workers read the ranks, in
        rank order.

        `worker`: this worker. May be called once. Raises TandemError when a rank fails.
        """
        data = RANK_COMMANDS.encode(StartTransfer(worker))
        for rank in self._channels:
            with contextlib.suppress(RanksLost):  # raised below, for all
                self._send(rank, data)
        with self._changed:
            self._changed.wait_for(lambda: self._lost is not None or len(self._peers) == len(self._channels))
            if self._lost is not None:
                raise self._lost
            return [self._peers[rank] for rank in self.ranks]

    def on_transfer_event(self, handler: Callable[[int, Event], None]) -> None:
        """Set the function that receives the events of the ranks' KV transfers: `handler(rank, event)` is called in
        order per rank, on one thread per rank."""
        self._on_transfer_event = handler

    def send_to_transfer(self, rank: int, command: Command | StopTransfer) -> None:
        """Send a command to the KV transfer of one rank. Does not raise: the loss of the rank is reported to the
        functions passed to `watch`."""
        with contextlib.suppress(RanksLost):
            self._send(rank, RANK_COMMANDS.encode(command))

    def close(self) -> None:
        """End the ranks and wait for their ends, killing those that do not end in time; a second call does nothing.
        Does not raise."""
        with self._changed:
            if self._is_closed:
                return
            self._is_closed = True
        for channel in self._channels.values():
            channel.close()
        # The socket is gone, so a process that has not connected yet fails to and ends.
        shutil.rmtree(self.directory, ignore_errors=True)
        for process in self._processes:
            process.stop(END_S)

    # ---- inside

    def _gather(self, listener: socket.socket, size: int, send_timeout_s: float) -> None:
        listener.settimeout(POLL_S)
        for _ in range(int(START_S / POLL_S)):
            with contextlib.suppress(TimeoutError):
                self._accept(RankChannel(listener.accept()[0], send_timeout_s), size)
            if len(self._channels) == size - 1:
                return
            for rank, process in enumerate(self._processes, 1):
                if rank not in self._channels and (reason := process.ended()) is not None:
                    raise TandemError(
                        ErrorKind.INTERNAL,
                        f"tensor-parallel rank {rank} did not start: {reason}; the worker's log says more",
                    )
        missing = sorted(set(range(1, size)) - self._channels.keys())
        raise TandemError(ErrorKind.INTERNAL, f"tensor-parallel ranks {missing} did not start within {START_S:g} s")

    def _accept(self, channel: RankChannel, size: int) -> None:
        """Accept a connection whose first message is RankReady. The directory's permissions authenticate the
        process."""
        message = channel.receive()
        event = None if message is None else RANK_EVENTS.decode(message)
        if not isinstance(event, RankReady) or event.rank in self._channels or not 0 < event.rank < size:
            channel.close()
            raise TandemError(ErrorKind.INTERNAL, f"a rank's first message is {event}")
        self._channels[event.rank] = channel

    def _listen(self, rank: int, channel: RankChannel) -> None:
        """Receive the messages of one rank, on a thread of its own, until the rank is lost or closed."""
        error = TandemError(ErrorKind.WORKER_LOST, f"tensor-parallel rank {rank} is gone: its process has ended")
        try:
            while (message := channel.receive()) is not None:
                event = RANK_EVENTS.decode(message)
                if isinstance(event, RankFailed):
                    error = TandemError(event.kind, f"rank {rank}: {event.message}")
                    break
                self._take(rank, event)
        except Exception as failure:
            _log.exception("rank %d sent an invalid message", rank)
            error = TandemError(ErrorKind.INTERNAL, f"rank {rank} sent an invalid message: {failure}")
        self._lose(error)

    def _take(self, rank: int, event: RankEvent) -> None:
        if isinstance(event, Loaded):
            with self._changed:
                self.num_blocks.append(event.num_blocks)
                self._changed.notify_all()
        elif isinstance(event, RankRegistered):
            with self._changed:
                self._peers[rank] = event.peer
                self._changed.notify_all()
        elif isinstance(event, Event) and self._on_transfer_event is not None:
            self._on_transfer_event(rank, event)
        else:
            raise ValueError(f"unexpected {type(event).__name__}")

    def _send(self, rank: int, data: bytes) -> None:
        """Send bytes to one rank. Raises RanksLost.

        A rank that does not read in time is lost, since part of the message may have been sent. For a closed connection
        the rank's own thread reports the reason.
        """
        try:
            self._channels[rank].send(data)
        except OSError as error:
            lost = f"cannot send to rank {rank}: {error}"
            if not isinstance(error, ConnectionError):
                self._lose(TandemError(ErrorKind.WORKER_LOST, lost))
            raise RanksLost(lost) from error

    def _lose(self, error: TandemError) -> None:
        with self._changed:
            if self._lost is not None or self._is_closed:
                return
            self._lost = error
            watchers = tuple(self._watchers)
            self._changed.notify_all()
        _log.error("the worker stops, because it lost a rank: %s", error.message)
        for on_lost in watchers:
            on_lost(error.message)
