"""One mover of several ranks' movers: hands commands on and joins their answers; decides nothing, see the joint."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Sequence

from tandem.engine.transfer_messages import Command, Event
from tandem.transfer.interfaces import KVTransfer, OpenMover, RankTransfer
from tandem.transfer.rank_merge import RankEventMerger


class MultiRankTransfer(KVTransfer):
    """What a `Mover` promises, for all ranks of a worker at once.

    `open_movers[r]` opens the mover of rank r, here or in another process. `on_event` must not block and must not
    raise; it is called on the ranks' threads and on those that send, one at a time and in order. When one rank stops,
    the others are halted.
    """

    def __init__(self, open_movers: Sequence[OpenMover], on_event: Callable[[Event], None]) -> None:
        self._joint = RankEventMerger(len(open_movers))
        self._on_event = on_event
        self._is_open = True
        self._is_working = False
        self._lock = threading.RLock()
        self._movers: list[RankTransfer] = []
        with self._lock:
            self._movers.extend(open_mover(self._listener(rank)) for rank, open_mover in enumerate(open_movers))

    def __repr__(self) -> str:
        return f"JoinedMover({self._joint!r})"

    def start(self) -> None:
        for mover in self._movers:
            mover.start()

    def send(self, command: Command) -> None:
        """Raises RuntimeError once the mover was stopped, or one of its ranks has: then nothing would ever answer."""
        with self._lock:
            if not self._is_open:
                raise RuntimeError("the transfer thread has stopped")
            self._joint.ask(command)
            self._work()

    def halt(self) -> None:
        with self._lock:
            self._is_open = False
            for mover in self._movers:
                mover.halt()

    def join(self, timeout_s: float) -> bool:
        """Wait for the end of all ranks, that long for each."""
        have_ended = [mover.join(timeout_s) for mover in self._movers]
        return all(have_ended)

    def _listener(self, rank: int) -> Callable[[Event], None]:
        def hear(event: Event) -> None:
            with self._lock:
                self._joint.heard(rank, event)
                self._work()

        return hear

    def _work(self) -> None:
        """Carry out what follows. A rank may answer inside `send`: then whoever is carrying out goes on with that."""
        if self._is_working:
            return
        self._is_working = True
        joint = self._joint
        try:
            while joint.commands or joint.events:
                if joint.commands:
                    rank, command = joint.commands.popleft()
                    # A rank that takes no more commands says MoverStopped, which answers for it.
                    with contextlib.suppress(RuntimeError):
                        self._movers[rank].send(command)
                else:
                    self._on_event(joint.events.popleft())
        finally:
            self._is_working = False
        if joint.is_over and self._is_open:
            self.halt()
