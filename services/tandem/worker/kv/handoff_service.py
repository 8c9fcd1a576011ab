"""Serve StreamHandoff to consumers: decode their requests to engine commands, and encode updates to messages."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable

import grpc
import grpc.aio

from tandem.core.errors import TandemError
from tandem.core.ids import WorkerRef
from tandem.engine.effects import Effect, SendAnnouncement, SendHandoffEnded
from tandem.engine.engine import Engine
from tandem.wire.gen import kv_pb2
from tandem.wire.kv_codec import (
    decode_handoff_key,
    decode_prefix_request,
    decode_worker,
    encode_announcement,
    encode_handoff_key,
)
from tandem.worker.engine.driver import EngineDriver

MAX_UNANSWERED = 256
"""Most messages of one consumer that may wait for the engine; further ones are not read from the stream until then."""

_Context = grpc.aio.ServicerContext[kv_pb2.StreamHandoffRequest, kv_pb2.StreamHandoffUpdate]


class ConsumerStream:
    """Hold the state of one StreamHandoff stream of `consumer`, with the next message that will be sent on it
    (`pending`).

    `wake`: set when there may be something to send. `is_over`: the consumer has ended the stream, or a newer stream
    replaced this one. `failure`: the error that a message of the consumer caused, or None. `pending.renewed_sequence`:
    number of the consumer's newest message that the engine has applied since the last update was sent; 0 when it has
    applied none. All effects of that message are in `pending` or were sent before.
    """

    def __init__(self, consumer: WorkerRef) -> None:
        self.consumer = consumer
        self.wake = asyncio.Event()
        self.is_over = False
        self.failure: BaseException | None = None
        self.pending = kv_pb2.StreamHandoffUpdate()

    def end(self, failure: BaseException | None = None) -> None:
        self.failure = self.failure or failure
        self.is_over = True
        self.wake.set()


class HandoffService:
    """Serve StreamHandoff as a producer: pass the requests of consumers to the engine, and send announcements of KV
    blocks to the consumers.

    Each consumer has one stream, the newest. All calls must be on the event loop. `fingerprint`: hexadecimal
    fingerprint of this worker's model and KV format, which a consumer must share. `lease_s`: duration of a lease in
    seconds, and also how long a consumer may take to read a message.

    Nothing is kept for a consumer without a stream. When the consumer opens a new stream and requests its hand-offs
    again, the engine repeats every announcement.
    """

    def __init__(self, driver: EngineDriver, fingerprint: str, lease_s: float) -> None:
        self._driver = driver
        self._fingerprint = fingerprint
        self._lease_s = lease_s
        self._streams: dict[WorkerRef, ConsumerStream] = {}

    def __repr__(self) -> str:
        return f"<consumers {[str(consumer) for consumer in self._streams]}>"

    def send(self, effect: SendAnnouncement | SendHandoffEnded) -> None:
        """Add an announcement, or the end of a hand-off, to the next message for the consumer `effect.consumer`. The
        effect is dropped when that consumer has no stream."""
        stream = self._streams.get(effect.consumer)
        if stream is None:
            return
        if isinstance(effect, SendAnnouncement):
            stream.pending.announcements.append(encode_announcement(effect.message))
        else:
            key = encode_handoff_key(effect.key)
            stream.pending.ended.append(kv_pb2.HandoffEnded(key=key, kind=effect.kind.value, message=effect.message))
        stream.wake.set()

    def close(self) -> None:
        """End the stream of each consumer after the message that is pending for the consumer was sent."""
        for stream in self._streams.values():
            stream.end()

    async def serve(self, requests: AsyncIterator[kv_pb2.StreamHandoffRequest], context: _Context) -> None:
        """Serve the stream of one consumer until the consumer ends it, opens another one, or does not read a message
        within the lease time. `requests`: the messages of the consumer. `context`: the gRPC call, on which updates are
        sent.

        Aborts the call with FAILED_PRECONDITION when the fingerprints differ. Raises TandemError when a message of the
        consumer is malformed or the engine has ended.
        """
        first = await anext(requests, None)
        if first is None:
            return
        if first.fingerprint != self._fingerprint:
            reason = "consumer and producer serve different models or KV formats"
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, reason)
        consumer = decode_worker(first.consumer)
        older = self._streams.get(consumer)
        if older is not None:
            older.end()
        stream = self._streams[consumer] = ConsumerStream(consumer)
        receiver = asyncio.create_task(self._receive(first, requests, stream), name=f"follow of {consumer}")
        try:
            await self._send_updates(stream, context)
        finally:
            receiver.cancel()
            (outcome,) = await asyncio.gather(receiver, return_exceptions=True)
            if self._streams.get(consumer) is stream:
                del self._streams[consumer]
        outcome = stream.failure or outcome
        if isinstance(outcome, TandemError):
            raise outcome

    async def _receive(
        self,
        first: kv_pb2.StreamHandoffRequest,
        requests: AsyncIterator[kv_pb2.StreamHandoffRequest],
        stream: ConsumerStream,
    ) -> None:
        """Receive the consumer's messages and pass each to the engine without waiting for the answer to the one before.

        The engine runs commands between two steps, so waiting for each answer would cost one step per message.
        """
        unanswered: deque[asyncio.Future[None]] = deque()
        try:
            unanswered.append(self._apply(first, stream))
            async for message in requests:
                unanswered.append(self._apply(message, stream))
                if len(unanswered) > MAX_UNANSWERED:
                    await asyncio.wait([unanswered.popleft()])
            await asyncio.wait(unanswered)
        finally:
            stream.end()

    def _apply(self, message: kv_pb2.StreamHandoffRequest, stream: ConsumerStream) -> asyncio.Future[None]:
        """Post a message's commands to the engine, and return a future that completes once they are applied. The
        updates that they cause are in `stream.pending` before that."""

        def settle(done: asyncio.Future[None]) -> None:
            error = None if done.cancelled() else done.exception()
            if error is not None:
                stream.end(error)
                return
            stream.pending.renewed_sequence = message.sequence
            stream.wake.set()

        done = asyncio.wrap_future(self._driver.call(_command(message, stream.consumer)))
        done.add_done_callback(settle)
        return done

    async def _send_updates(self, stream: ConsumerStream, context: _Context) -> None:
        """Send updates until the stream is over, or the consumer does not read one within the lease time; its leases
        have expired then."""
        while True:
            stream.wake.clear()
            update, stream.pending = stream.pending, kv_pb2.StreamHandoffUpdate()
            if update.ListFields():
                update.lease_ms = int(self._lease_s * 1e3)
                try:
                    async with asyncio.timeout(self._lease_s):
                        await context.write(update)
                except TimeoutError:
                    return
            if stream.is_over:
                return
            await stream.wake.wait()


def _command(
    message: kv_pb2.StreamHandoffRequest, consumer: WorkerRef
) -> Callable[[Engine, float], tuple[None, list[Effect]]]:
    """Decode a message to one engine command. Raises TandemError for a malformed message, with nothing of it
    applied."""
    follow = [(decode_handoff_key(key), None) for key in message.follow]
    fetch = [decode_prefix_request(request) for request in message.prefix_request]
    renew = [decode_handoff_key(key) for key in message.renew]
    take = [(decode_handoff_key(request.key), request.num_output_tokens) for request in message.take]
    release = [(decode_handoff_key(key), False) for key in message.release]
    taken = [(decode_handoff_key(key), True) for key in message.taken]

    def apply(engine: Engine, now: float) -> tuple[None, list[Effect]]:
        effects: list[Effect] = []
        for key, prefix_request in [*follow, *fetch]:
            effects += engine.follow(key, consumer, now, prefix_request)
        effects += engine.renew(renew, consumer, now)
        for key, num_output_tokens in take:
            effects += engine.request_remainder(key, num_output_tokens, now)
        for key, is_taken in release + taken:
            effects += engine.release(key, now, is_taken=is_taken, consumer=consumer)
        return None, effects

    return apply
