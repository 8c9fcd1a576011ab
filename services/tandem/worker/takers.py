"""What each taker is still to be told of the hand-offs that it follows here; never decides about a lease.

Nothing is kept for a taker without a stream: when it follows again, the engine repeats every announcement.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from tandem.core.ids import WorkerRef
from tandem.engine.effects import Announce, EndHandoff


@dataclass(slots=True)
class Told:
    """One message. `renewed_sequence`: renewals up to this one have been applied; 0 for none new."""

    announcements: list[Announce] = field(default_factory=list)
    ended: list[EndHandoff] = field(default_factory=list)
    renewed_sequence: int = 0

    def __bool__(self) -> bool:
        return bool(self.announcements or self.ended or self.renewed_sequence)


class TakerStream:
    """One Follow stream. `is_over`: a newer one of the same taker took its place, or its taker left. `failure`: why
    what the taker said could not be done."""

    def __init__(self, taker: WorkerRef) -> None:
        self.taker = taker
        self.wake = asyncio.Event()
        self.is_over = False
        self.failure: BaseException | None = None
        self._told = Told()

    def tell(self, effect: Announce | EndHandoff) -> None:
        if isinstance(effect, Announce):
            self._told.announcements.append(effect)
        else:
            self._told.ended.append(effect)
        self.wake.set()

    def answer(self, sequence: int) -> None:
        """Everything the taker said up to this message is done, and the effects of it were told before."""
        self._told.renewed_sequence = sequence
        self.wake.set()

    def take(self) -> Told:
        told, self._told = self._told, Told()
        return told

    def fail(self, error: BaseException) -> None:
        self.failure = error
        self.end()

    def end(self) -> None:
        self.is_over = True
        self.wake.set()


class Takers:
    """The newest stream of each taker. All calls on the event loop."""

    def __init__(self) -> None:
        self._streams: dict[WorkerRef, TakerStream] = {}

    def __repr__(self) -> str:
        return f"<takers {[str(taker) for taker in self._streams]}>"

    def __len__(self) -> int:
        return len(self._streams)

    def attach(self, taker: WorkerRef) -> TakerStream:
        """Open a stream in place of any older one."""
        old = self._streams.pop(taker, None)
        if old is not None:
            old.end()
        stream = self._streams[taker] = TakerStream(taker)
        return stream

    def detach(self, stream: TakerStream) -> None:
        if self._streams.get(stream.taker) is stream:
            del self._streams[stream.taker]

    def tell(self, effect: Announce | EndHandoff) -> None:
        """Dropped when its taker has no stream."""
        stream = self._streams.get(effect.taker)
        if stream is not None:
            stream.tell(effect)

    def close(self) -> None:
        for stream in self._streams.values():
            stream.end()
