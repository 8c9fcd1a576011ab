"""Buffer the updates that each consumer is still to receive about the hand-offs that it follows.

Nothing is buffered for a consumer without a stream: when it follows again, the engine repeats every announcement.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from tandem.core.ids import WorkerRef
from tandem.engine.effects import SendAnnouncement, SendHandoffEnded


@dataclass(slots=True)
class PendingUpdate:
    """Content of one message. `renewed_sequence`: renewals up to this message of the consumer were applied; 0: no new
    ones."""

    announcements: list[SendAnnouncement] = field(default_factory=list)
    ended: list[SendHandoffEnded] = field(default_factory=list)
    renewed_sequence: int = 0

    def __bool__(self) -> bool:
        return bool(self.announcements or self.ended or self.renewed_sequence)


class ConsumerStream:
    """One StreamHandoff stream. `is_over`: the consumer has left, or a newer stream replaced this one. `failure`: the
    error by which a message of the consumer failed."""

    def __init__(self, consumer: WorkerRef) -> None:
        self.consumer = consumer
        self.wake = asyncio.Event()
        self.is_over = False
        self.failure: BaseException | None = None
        self._pending = PendingUpdate()

    def send(self, effect: SendAnnouncement | SendHandoffEnded) -> None:
        if isinstance(effect, SendAnnouncement):
            self._pending.announcements.append(effect)
        else:
            self._pending.ended.append(effect)
        self.wake.set()

    def answer(self, sequence: int) -> None:
        """Confirm that all messages up to `sequence` were applied; their effects were buffered before."""
        self._pending.renewed_sequence = sequence
        self.wake.set()

    def take(self) -> PendingUpdate:
        update, self._pending = self._pending, PendingUpdate()
        return update

    def fail(self, error: BaseException) -> None:
        self.failure = error
        self.end()

    def end(self) -> None:
        self.is_over = True
        self.wake.set()


class ConsumerStreams:
    """Own the newest stream of each consumer. All calls on the event loop."""

    def __init__(self) -> None:
        self._streams: dict[WorkerRef, ConsumerStream] = {}

    def __repr__(self) -> str:
        return f"<consumers {[str(consumer) for consumer in self._streams]}>"

    def __len__(self) -> int:
        return len(self._streams)

    def attach(self, consumer: WorkerRef) -> ConsumerStream:
        """Open a stream in place of any older one of the consumer."""
        old = self._streams.pop(consumer, None)
        if old is not None:
            old.end()
        stream = self._streams[consumer] = ConsumerStream(consumer)
        return stream

    def detach(self, stream: ConsumerStream) -> None:
        if self._streams.get(stream.consumer) is stream:
            del self._streams[stream.consumer]

    def send(self, effect: SendAnnouncement | SendHandoffEnded) -> None:
        """Buffer an effect for its consumer; dropped when the consumer has no stream."""
        stream = self._streams.get(effect.consumer)
        if stream is not None:
            stream.send(effect)

    def close(self) -> None:
        for stream in self._streams.values():
            stream.end()
