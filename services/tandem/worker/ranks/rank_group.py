"""The other ranks of this worker, each a process of its own, as the first one has them; never computes.

A rank that ends, says that it fails, or says what it should not, is lost, and with it all of them: those that are left
cannot know what it has done. Nobody waits for a rank that is gone: its socket ends with it.
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
from tandem.engine.ports import TransportPeer
from tandem.engine.rank_messages import (
    Loaded,
    MoverBytes,
    OpenMover,
    RankCommand,
    RankFailed,
    RankReady,
    RankRegistered,
    RanksLost,
)
from tandem.wire.rank_codec import decode_event, encode_command
from tandem.worker.ranks.rank_channel import RankChannel, listen

START_S = 120.0
"""For a process to begin, import what it needs and say so."""
LOOK_S = 0.1
END_S = 2.0
"""A rank ends at once when its line does; one that stands still, or hangs in its device, is killed."""

_log = logging.getLogger(__name__)


class RankProcess(Protocol):
    """Where one rank runs. It ends by itself when its socket does."""

    def ended(self) -> str | None:
        """None while it runs, else how it ended."""
        ...

    def stop(self, timeout_s: float) -> None:
        """Wait until it has ended, and kill it when that takes longer. Never raises."""
        ...


Launch = Callable[[Path, int], RankProcess]
"""`launch(directory, rank)` starts a process that connects to the socket in the directory."""


class RankGroup:
    """Ranks 1 to `size - 1`. `send_command` is called by one thread, everything else by any."""

    def __init__(self, directory: Path, size: int, launch: Launch, send_timeout_s: float) -> None:
        """Start them, and wait until each is about to meet the others. Raises TandemError, with nothing left."""
        self.directory = directory
        self.num_blocks: list[int] = []
        self._peers: dict[int, TransportPeer] = {}
        self._changed = threading.Condition()
        self._lost: TandemError | None = None
        self._is_closed = False
        self._watchers: list[Callable[[str], None]] = []
        self._on_mover: Callable[[int, bytes], None] | None = None
        self._lines: dict[int, RankChannel] = {}
        self._processes: list[RankProcess] = []
        try:
            with contextlib.closing(listen(directory, size - 1)) as listener:
                for rank in range(1, size):
                    self._processes.append(launch(directory, rank))
                self._gather(listener, size, send_timeout_s)
        except BaseException:
            self.close()
            raise
        for rank, line in self._lines.items():
            threading.Thread(target=self._listen, args=(rank, line), name=f"tandem-rank-{rank}", daemon=True).start()

    def __repr__(self) -> str:
        return f"<rank group of {len(self._lines)}: {self._lost or ('closed' if self._is_closed else 'well')}>"

    def wait_loaded(self) -> None:
        """Until every rank has its part of the model, however long that takes. Raises TandemError when one fails."""
        with self._changed:
            self._changed.wait_for(lambda: self._lost is not None or len(self.num_blocks) == len(self._lines))
            if self._lost is not None:
                raise self._lost

    def reason(self, wait_s: float) -> TandemError | None:
        """Which rank was lost and why, waiting so long for that to be known."""
        with self._changed:
            self._changed.wait_for(lambda: self._lost is not None, wait_s)
            return self._lost

    def watch(self, on_lost: Callable[[str], None]) -> None:
        """Called once with the reason when a rank is lost, at once when one is; on any thread."""
        with self._changed:
            self._watchers.append(on_lost)
            lost = self._lost
        if lost is not None:
            on_lost(lost.message)

    def send_command(self, command: RankCommand) -> None:
        """A `runtime.parallel.leader.Tell`. Raises RanksLost."""
        if self._lost is not None:
            raise RanksLost(self._lost.message)
        data = encode_command(command)
        for rank in self._lines:
            self._send(rank, data)

    @property
    def ranks(self) -> range:
        """All but the first."""
        return range(1, len(self._lines) + 1)

    def open_movers(self, worker: WorkerRef) -> list[TransportPeer]:
        """Have every rank open its transfer agent, once; yields how each is read, in order. Raises TandemError."""
        data = encode_command(OpenMover(worker))
        for rank in self._lines:
            with contextlib.suppress(RanksLost):  # raised below, for all
                self._send(rank, data)
        with self._changed:
            self._changed.wait_for(lambda: self._lost is not None or len(self._peers) == len(self._lines))
            if self._lost is not None:
                raise self._lost
            return [self._peers[rank] for rank in self.ranks]

    def on_mover(self, on_mover: Callable[[int, bytes], None]) -> None:
        """`on_mover(rank, data)` takes what ranks' transfer agents say, in order of each, on a thread of each."""
        self._on_mover = on_mover

    def send_to_transfer(self, rank: int, data: bytes) -> None:
        """To one rank's transfer agent. Of one that is lost `watch` tells."""
        with contextlib.suppress(RanksLost):
            self._send(rank, encode_command(MoverBytes(data)))

    def close(self) -> None:
        """End them and wait for it; nothing happens the second time. Never raises."""
        with self._changed:
            if self._is_closed:
                return
            self._is_closed = True
        for line in self._lines.values():
            line.close()
        # Nobody listens any more: a process that has not connected yet ends when it tries.
        shutil.rmtree(self.directory, ignore_errors=True)
        for process in self._processes:
            process.stop(END_S)

    # ---- inside

    def _gather(self, listener: socket.socket, size: int, send_timeout_s: float) -> None:
        listener.settimeout(LOOK_S)
        for _ in range(int(START_S / LOOK_S)):
            with contextlib.suppress(TimeoutError):
                self._accept(RankChannel(listener.accept()[0], send_timeout_s), size)
            if len(self._lines) == size - 1:
                return
            for rank, process in enumerate(self._processes, 1):
                if rank not in self._lines and (how := process.ended()) is not None:
                    raise TandemError(ErrorKind.INTERNAL, f"rank {rank} did not start: {how}")
        missing = sorted(set(range(1, size)) - self._lines.keys())
        raise TandemError(ErrorKind.INTERNAL, f"ranks {missing} did not start within {START_S:g} s")

    def _accept(self, line: RankChannel, size: int) -> None:
        """A rank says first which it is; that it is the right one is for the directory to see to."""
        message = line.receive()
        event = None if message is None else decode_event(message)
        if not isinstance(event, RankReady) or event.rank in self._lines or not 0 < event.rank < size:
            line.close()
            raise TandemError(ErrorKind.INTERNAL, f"a rank's first word is {event}")
        self._lines[event.rank] = line

    def _listen(self, rank: int, line: RankChannel) -> None:
        """On the rank's own thread, until it is lost or closed."""
        error = TandemError(ErrorKind.WORKER_LOST, f"rank {rank} is gone")
        try:
            while (message := line.receive()) is not None:
                event = decode_event(message)
                if isinstance(event, RankFailed):
                    error = TandemError(event.kind, f"rank {rank}: {event.message}")
                    break
                self._take(rank, event)
        except Exception as failure:
            _log.exception("rank %d is not understood", rank)
            error = TandemError(ErrorKind.INTERNAL, f"rank {rank} is not understood: {failure}")
        self._lose(error)

    def _take(self, rank: int, event: RankReady | Loaded | RankRegistered | MoverBytes) -> None:
        if isinstance(event, Loaded):
            with self._changed:
                self.num_blocks.append(event.num_blocks)
                self._changed.notify_all()
        elif isinstance(event, RankRegistered):
            with self._changed:
                self._peers[rank] = event.peer
                self._changed.notify_all()
        elif isinstance(event, MoverBytes) and self._on_mover is not None:
            self._on_mover(rank, event.data)
        else:
            raise ValueError(f"{type(event).__name__} is not expected")

    def _send(self, rank: int, data: bytes) -> None:
        """Raises RanksLost. A rank that takes nothing is lost, since what it was told last may be half told. Why one is
        gone its own thread knows."""
        try:
            self._lines[rank].send(data)
        except OSError as error:
            lost = f"rank {rank} cannot be told: {error}"
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
        _log.error("%s", error.message)
        for on_lost in watchers:
            on_lost(error.message)
