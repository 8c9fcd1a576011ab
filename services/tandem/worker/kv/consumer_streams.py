"""What each consumer is still to be told of the hand-offs that it follows here; never decides about a lease.

Nothing is kept for a consumer without a stream: when it follows again, the engine repeats every announcement.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from tandem.core.ids import WorkerRef
from tandem.engine.effects import SendAnnouncement, SendHandoffEnded


@dataclass(slots=True)
class PendingUpdate:
    """One message. `renewed_sequence`: renewals up to this one have been applied; 0 for none new."""

    announcements: list[SendAnnouncement] = field(default_factory=list)
    ended: list[SendHandoffEnded] = field(default_factory=list)
    renewed_sequence: int = 0

    def __bool__(self) -> bool:
        return bool(self.announcements or self.ended or self.renewed_sequence)


class ConsumerStream:
    """One StreamHandoff stream. `is_over`: a newer one of the same consumer took its place, or its consumer left.
    `failure`: why what the consumer said could not be done."""

    def __init__(self, consumer: WorkerRef) -> None:
        self.consumer = consumer
        self.wake = asyncio.Event()
        self.is_over = False
        self.failure: BaseException | None = None
        self._told = PendingUpdate()

    def tell(self, effect: SendAnnouncement | SendHandoffEnded) -> None:
        if isinstance(effect, SendAnnouncement):
            self._told.announcements.append(effect)
        else:
            self._told.ended.append(effect)
        self.wake.set()

    def answer(self, sequence: int) -> None:
        """Everything the consumer said up to this message is done, and the effects of it were told before."""
        self._told.renewed_sequence = sequence
        self.wake.set()

    def take(self) -> PendingUpdate:
        told, self._told = self._told, PendingUpdate()
        return told

    def fail(self, error: BaseException) -> None:
        self.failure = error
        self.end()

    def end(self) -> None:
        self.is_over = True
        self.wake.set()


class ConsumerStreams:
    """The newest stream of each consumer. All calls on the event loop."""

    def __init__(self) -> None:
        self._streams: dict[WorkerRef, ConsumerStream] = {}

    def __repr__(self) -> str:
        return f"<consumers {[str(consumer) for consumer in self._streams]}>"

    def __len__(self) -> int:
        return len(self._streams)

    def attach(self, consumer: WorkerRef) -> ConsumerStream:
        """Open a stream in place of any older one."""
        old = self._streams.pop(consumer, None)
        if old is not None:
            old.end()
        stream = self._streams[consumer] = ConsumerStream(consumer)
        return stream

    def detach(self, stream: ConsumerStream) -> None:
        if self._streams.get(stream.consumer) is stream:
            del self._streams[stream.consumer]

    def tell(self, effect: SendAnnouncement | SendHandoffEnded) -> None:
        """Dropped when its consumer has no stream."""
        stream = self._streams.get(effect.consumer)
        if stream is not None:
            stream.tell(effect)

    def close(self) -> None:
        for stream in self._streams.values():
            stream.end()
