"""Own the other ranks of a worker, each a process of its own, on behalf of the first rank.

If one rank ends, reports a failure, or sends an invalid message, the whole group counts as lost, since the state of the
remaining ranks is unknown. The end of a process closes its connection, so no call waits for a rank that has ended. TCP
notices the failure of another machine within `transfer.connection_server.SILENT_S` seconds.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
from collections.abc import Callable, Mapping
from typing import Protocol

from tandem.core.errors import ErrorKind, TandemError
from tandem.core.ids import WorkerRef
from tandem.engine.rank_messages import (
    AgentCommand,
    GroupCommand,
    Loaded,
    RankCommand,
    RankEvent,
    RankFailed,
    RankReady,
    RankRefused,
    RankRegistered,
    RanksLost,
    StartJoining,
    StartTransfer,
    StopTransfer,
    StoreEntry,
)
from tandem.engine.transfer_messages import Command, Event, TransportPeer
from tandem.wire.rank_codec import RANK_COMMANDS, RANK_EVENTS
from tandem.worker.ranks.rank_channel import RankChannel
from tandem.worker.ranks.rank_listener import Listen

START_S = 120.0
"""Seconds for a process to start, import its libraries and report."""
POLL_S = 0.1
"""Seconds between two checks whether a starting process has ended."""
END_S = 2.0
"""Seconds for a rank to end after its channel was closed; a rank that hangs is killed."""

_log = logging.getLogger(__name__)


class RankProcess(Protocol):
    """Interface of an object that controls the process of one rank. The process ends by itself when the channel to it
    is closed."""

    def ended(self) -> str | None:
        """Return None while the process runs, else a text with the cause of its end."""
        ...

    def stop(self, timeout_s: float) -> None:
        """Wait for the process to end, and kill it after `timeout_s` seconds. Does not raise."""
        ...


Launch = Callable[[str, int], RankProcess]
"""Signature of a launcher: `launch(address, rank)` starts the process of that rank, which connects to the address of
the group's listener."""
OnEntry = Callable[[str, bytes], None]
"""Function that receives an entry, key and value, of the store through which ranks find each other."""


class RankGroup:
    """Start the ranks 1 to `size - 1` of a worker, send them the first rank's commands, and report when one of them is
    lost.

    `send_command` must be called by one thread only; the other methods may be called by any thread.
    """

    def __init__(
        self,
        listen: Listen,
        size: int,
        launch: Launch,
        send_timeout_s: float,
        *,
        on_entry: OnEntry,
        settings: Mapping[str, str],
        start_s: float = START_S,
    ) -> None:
        """Start the ranks with `launch`, wait until all are ready, and let them join the process group. Raises
        TandemError when a rank does not start or has other settings; all ranks have ended then.

        `listen`: opens the listener to which the ranks connect. `size`: number of ranks with the first.
        `send_timeout_s`: seconds that a send waits for a rank that does not read. `on_entry`: receives the store
        entries that other ranks publish, on one thread per rank. `settings`: settings by key that must have the same
        values on every rank. `start_s`: seconds for all ranks to start.
        """
        self._size = size
        self._send_timeout_s = send_timeout_s
        self._on_entry = on_entry
        self._settings = settings
        self._weights: dict[int, str] = {}
        self._peers: dict[int, TransportPeer] = {}
        self._changed = threading.Condition()
        self._lost: TandemError | None = None
        self._is_closed = False
        self._watchers: list[Callable[[str], None]] = []
        self._on_transfer_event: Callable[[int, Event], None] | None = None
        self._channels: dict[int, RankChannel] = {}
        self._processes: list[RankProcess] = []
        self._listener = listen(self._serve)
        try:
            for rank in range(1, size):
                self._processes.append(launch(self._listener.address, rank))
            self._gather(start_s)
            self._listener.stop_accepting()
        except BaseException:
            self.close()
            raise
        self._send_to_all(StartJoining())

    def __repr__(self) -> str:
        return f"<rank group of {len(self._channels)}: {self._lost or ('closed' if self._is_closed else 'well')}>"

    def wait_loaded(self) -> None:
        """Wait without a time limit until every rank has loaded its part of the model. Raises TandemError when a rank
        fails or ends."""
        self._wait_until(lambda: len(self._weights) == len(self._channels))

    def require_weights(self, digest: str) -> None:
        """Check that the other ranks have loaded the same model files as the first rank. `digest`: digest of the first
        rank's files. If a rank has reported another digest, sends it a refusal and raises TandemError. A rank that has
        reported no digest is not checked."""
        for rank, weights in self._weights.items():
            if weights not in ("", digest):
                message = f"rank {rank} has loaded another model than the first rank: compare the files of model.id"
                self._refuse(self._channels[rank], message)
                raise TandemError(ErrorKind.INVALID_REQUEST, message, param="model.id")

    def publish(self, key: str, value: bytes) -> None:
        """Send an entry of the first rank's key-value store to all other ranks. Does not raise: the loss of a rank is
        reported to the functions passed to `watch`."""
        self._send_to_all(StoreEntry(key, value))

    def reason(self, wait_s: float) -> TandemError | None:
        """Return the error for which a rank was lost. If no rank is lost yet, waits up to `wait_s` seconds for that;
        returns None if still no rank is lost then."""
        with self._changed:
            self._changed.wait_for(lambda: self._lost is not None, wait_s)
            return self._lost

    def watch(self, on_lost: Callable[[str], None]) -> None:
        """Call `on_lost` once, on any thread, as soon as a rank of the group is lost. Its argument is the reason as
        text.

        If a rank is lost already, `on_lost` is called before this method returns.
        """
        with self._changed:
            self._watchers.append(on_lost)
            lost = self._lost
        if lost is not None:
            on_lost(lost.message)

    def send_command(self, command: RankCommand) -> None:
        """Send a command of the first rank to all other ranks, which execute commands in the order sent. Does not wait
        for the execution. Raises RanksLost when a rank is lost."""
        if self._lost is not None:
            raise RanksLost(self._lost.message)
        data = RANK_COMMANDS.encode(command)
        for rank in self._channels:
            self._send(rank, data)

    @property
    def ranks(self) -> range:
        """Return the range of the numbers of all ranks but the first, from 1."""
        return range(1, len(self._channels) + 1)

    def open_transfers(self, worker: WorkerRef) -> list[TransportPeer]:
        """Open the KV transfer of every rank but the first, and return the descriptions by which other workers read
        these ranks, in rank order.

        `worker`: the worker to which the ranks belong. May be called once. Raises TandemError when a rank fails.
        """
        self._send_to_all(StartTransfer(worker))
        self._wait_until(lambda: len(self._peers) == len(self._channels))
        return [self._peers[rank] for rank in self.ranks]

    def on_transfer_event(self, handler: Callable[[int, Event], None]) -> None:
        """Set the function that receives the events of the ranks' KV transfers. `handler(rank, event)` is called for
        the events of each rank in their order, on a thread of that rank."""
        self._on_transfer_event = handler

    def send_to_transfer(self, rank: int, command: Command | StopTransfer) -> None:
        """Send a command to the KV transfer of one rank. Does not raise: the loss of the rank is reported to the
        functions passed to `watch`."""
        with contextlib.suppress(RanksLost):
            self._send(rank, RANK_COMMANDS.encode(command))

    def close(self) -> None:
        """End the ranks and wait until they have ended; a rank that does not end in time is killed. A second call does
        nothing. Does not raise."""
        with self._changed:
            if self._is_closed:
                return
            self._is_closed = True
        for channel in self._channels.values():
            channel.close()
        self._listener.close()
        for process in self._processes:
            process.stop(END_S)

    # ---- inside

    def _gather(self, start_s: float) -> None:
        for _ in range(int(start_s / POLL_S)):
            if self._wait_until(lambda: len(self._channels) == self._size - 1, POLL_S):
                return
            for rank, process in enumerate(self._processes, 1):
                if rank not in self._channels and (reason := process.ended()) is not None:
                    raise TandemError(
                        ErrorKind.INTERNAL,
                        f"tensor-parallel rank {rank} did not start: {reason}; the worker's log says more",
                    )
        missing = sorted(set(range(1, self._size)) - self._channels.keys())
        raise TandemError(ErrorKind.INTERNAL, f"tensor-parallel ranks {missing} did not start within {start_s:g} s")

    def _wait_until(self, is_done: Callable[[], bool], timeout_s: float | None = None) -> bool:
        """Wait until `is_done()` is true, and return True; return False if it is not after `timeout_s` seconds. Raises
        TandemError when a rank is lost."""
        with self._changed:
            self._changed.wait_for(lambda: self._lost is not None or is_done(), timeout_s)
            if self._lost is not None:
                raise self._lost
            return is_done()

    def _serve(self, connection: socket.socket) -> None:
        """Receive the messages of one rank, on a thread of its own, until the rank is lost or closed."""
        channel = RankChannel(connection, self._send_timeout_s)
        try:
            rank = self._admit(channel)
            if rank is not None:
                self._listen(rank, channel)
        finally:
            channel.close()

    def _admit(self, channel: RankChannel) -> int | None:
        """Receive the first message of a connection, and return the rank if the message is a RankReady that fits this
        group. Any other message ends the group, since not all ranks can start then. Returns None in that case, and when
        the connection has ended."""
        try:
            message = channel.receive()
            if message is None:
                return None
            event = RANK_EVENTS.decode(message)
        except ValueError as error:
            self._lose(TandemError(ErrorKind.INTERNAL, f"a rank's first message is invalid: {error}"))
            return None
        with self._changed:
            if self._lost is not None or self._is_closed:
                return None
            problem = self._problem_of(event)
            if problem is None and isinstance(event, RankReady):
                self._channels[event.rank] = channel
                self._changed.notify_all()
                return event.rank
        assert problem is not None
        self._refuse(channel, problem)
        self._lose(TandemError(ErrorKind.INVALID_REQUEST, problem))
        return None

    def _problem_of(self, event: RankEvent) -> str | None:
        """Return why a rank whose first message is `event` does not belong to this group; None if it does."""
        if not isinstance(event, RankReady):
            return f"a rank's first message is {type(event).__name__}"
        if not 0 < event.rank < self._size:
            return f"rank {event.rank} is none of this worker's {self._size} ranks: compare engine.tensor_parallel"
        if event.rank in self._channels:
            return f"two processes claim to be rank {event.rank}: each machine needs its own engine.node_rank"
        names = self._settings.keys() | event.settings.keys()
        different = sorted(name for name in names if event.settings.get(name) != self._settings.get(name))
        if different:
            ours, theirs = (
                ", ".join(f"{name}={side.get(name, '')}" for name in different)
                for side in (self._settings, event.settings)
            )
            return f"rank {event.rank} has other settings than the first rank: {theirs} instead of {ours}"
        return None

    def _listen(self, rank: int, channel: RankChannel) -> None:
        error = TandemError(ErrorKind.WORKER_LOST, f"tensor-parallel rank {rank} is gone: its connection has ended")
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
                self._weights[rank] = event.weights
                self._changed.notify_all()
        elif isinstance(event, StoreEntry):
            self._on_entry(event.key, event.value)
            for other in self.ranks:
                if other != rank:
                    with contextlib.suppress(RanksLost):
                        self._send(other, RANK_COMMANDS.encode(event))
        elif isinstance(event, RankRegistered):
            with self._changed:
                self._peers[rank] = event.peer
                self._changed.notify_all()
        elif isinstance(event, Event) and self._on_transfer_event is not None:
            self._on_transfer_event(rank, event)
        else:
            raise ValueError(f"unexpected {type(event).__name__}")

    def _send_to_all(self, command: AgentCommand | GroupCommand) -> None:
        """Send a command to every rank. Does not raise: a lost rank is reported by other means."""
        data = RANK_COMMANDS.encode(command)
        for rank in self._channels:
            with contextlib.suppress(RanksLost):
                self._send(rank, data)

    def _refuse(self, channel: RankChannel, problem: str) -> None:
        with contextlib.suppress(OSError):
            channel.send(RANK_COMMANDS.encode(RankRefused(problem)))

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
        _log.error("the worker stops, because its ranks are not complete: %s", error.message)
        for on_lost in watchers:
            on_lost(error.message)
