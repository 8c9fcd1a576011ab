"""Drive the transfers of all ranks of a worker as one: send each command to the ranks and merge their events.

The merge itself is `rank_merge.RankEventMerger`, which this module calls under a lock.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Sequence

from tandem.engine.transfer_messages import Command, Event
from tandem.transfer.interface import KVTransfer, OpenKVTransfer
from tandem.transfer.rank_merge import RankEventMerger


class MultiRankTransfer(KVTransfer):
    """A `KVTransfer` over all ranks of a worker.

    `open_ranks[r]` opens the transfer of rank r, in this process or another one. `on_event` must not block and must
    not raise; it is called on the ranks' threads and on the threads that call `send`, one call at a time and in order.
    When one rank stops, the others are halted.
    """

    def __init__(self, open_ranks: Sequence[OpenKVTransfer], on_event: Callable[[Event], None]) -> None:
        self._merger = RankEventMerger(len(open_ranks))
        self._on_event = on_event
        self._is_open = True
        self._is_dispatching = False
        self._lock = threading.RLock()
        self._ranks: list[KVTransfer] = []
        with self._lock:
            self._ranks.extend(open_rank(self._listener(rank)) for rank, open_rank in enumerate(open_ranks))

    def __repr__(self) -> str:
        return f"MultiRankTransfer({self._merger!r})"

    def start(self) -> None:
        for transfer in self._ranks:
            transfer.start()

    def send(self, command: Command) -> None:
        """Queue a command for the ranks. Raises RuntimeError once a rank has stopped, when no event would answer."""
        with self._lock:
            if not self._is_open:
                raise RuntimeError("the transfer thread has stopped")
            self._merger.submit(command)
            self._dispatch()

    def halt(self) -> None:
        with self._lock:
            self._is_open = False
            for transfer in self._ranks:
                transfer.halt()

    def join(self, timeout_s: float) -> bool:
        """Wait for the end of all ranks, up to `timeout_s` for each. Returns False when one is still running."""
        have_ended = [transfer.join(timeout_s) for transfer in self._ranks]
        return all(have_ended)

    def _listener(self, rank: int) -> Callable[[Event], None]:
        def on_event(event: Event) -> None:
            with self._lock:
                self._merger.on_event(rank, event)
                self._dispatch()

        return on_event

    def _dispatch(self) -> None:
        """Send the commands and publish the events that the merger has produced.

        A rank may answer inside `send`: the outer call of this method then handles the answer.
        """
        if self._is_dispatching:
            return
        self._is_dispatching = True
        merger = self._merger
        try:
            while merger.commands or merger.events:
                if merger.commands:
                    rank, command = merger.commands.popleft()
                    # A rank that accepts no more commands reports TransferStopped, which answers them all.
                    with contextlib.suppress(RuntimeError):
                        self._ranks[rank].send(command)
                else:
                    self._on_event(merger.events.popleft())
        finally:
            self._is_dispatching = False
        if merger.is_over and self._is_open:
            self.halt()
