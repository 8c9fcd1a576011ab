"""Serve StreamHandoff to consumers: decode their requests to engine commands, and encode updates to messages."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable

import grpc
import grpc.aio

from tandem.core.errors import TandemError
from tandem.core.ids import WorkerRef
from tandem.engine.effects import Effect
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
from tandem.worker.grpc_status import status_of
from tandem.worker.kv.consumer_streams import ConsumerStream, ConsumerStreams, PendingUpdate

MAX_UNANSWERED = 256
"""Messages of one consumer that may wait for the engine; further ones stay in the stream."""

_Context = grpc.aio.ServicerContext[kv_pb2.StreamHandoffRequest, kv_pb2.StreamHandoffUpdate]


class HandoffService:
    """Serve one stream per consumer. `lease_s` is the duration of a lease, and also how long a write may wait for the
    consumer."""

    def __init__(self, driver: EngineDriver, consumers: ConsumerStreams, fingerprint: str, lease_s: float) -> None:
        self._driver = driver
        self._consumers = consumers
        self._fingerprint = fingerprint
        self._lease_s = lease_s

    async def serve(self, requests: AsyncIterator[kv_pb2.StreamHandoffRequest], context: _Context) -> None:
        """Serve a stream until the consumer ends it, opens another one, or does not read its updates in time."""
        first = await anext(requests, None)
        if first is None:
            return
        if first.fingerprint != self._fingerprint:
            reason = "consumer and producer serve different models or KV formats"
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, reason)
        try:
            stream = self._consumers.attach(decode_worker(first.consumer))
        except TandemError as error:
            await context.abort(status_of(error), error.message)
        receiver = asyncio.create_task(self._receive(first, requests, stream), name=f"follow of {stream.consumer}")
        try:
            await self._send_updates(stream, context)
        finally:
            receiver.cancel()
            (outcome,) = await asyncio.gather(receiver, return_exceptions=True)
            self._consumers.detach(stream)
        outcome = stream.failure or outcome
        if isinstance(outcome, TandemError):
            await context.abort(status_of(outcome), outcome.message)

    async def _receive(
        self,
        first: kv_pb2.StreamHandoffRequest,
        requests: AsyncIterator[kv_pb2.StreamHandoffRequest],
        stream: ConsumerStream,
    ) -> None:
        """Receive the consumer's messages and apply them without waiting for each other's effects.

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
        """Post a message's commands to the engine. The answer follows the updates that the commands cause."""

        def settle(done: asyncio.Future[None]) -> None:
            error = None if done.cancelled() else done.exception()
            if error is None:
                stream.answer(message.sequence)
            else:
                stream.fail(error)

        done = asyncio.wrap_future(self._driver.call(_command(message, stream.consumer)))
        done.add_done_callback(settle)
        return done

    async def _send_updates(self, stream: ConsumerStream, context: _Context) -> None:
        while True:
            stream.wake.clear()
            update = stream.take()
            if update and not await self._write(context, update):
                return
            if stream.is_over:
                return
            await stream.wake.wait()

    async def _write(self, context: _Context, update: PendingUpdate) -> bool:
        """Write an update. Returns False when the consumer does not read it within the lease time; its leases have
        expired then."""
        try:
            async with asyncio.timeout(self._lease_s):
                await context.write(self._update(update))
        except TimeoutError:
            return False
        return True

    def _update(self, update: PendingUpdate) -> kv_pb2.StreamHandoffUpdate:
        return kv_pb2.StreamHandoffUpdate(
            announcements=[encode_announcement(effect.message) for effect in update.announcements],
            ended=[
                kv_pb2.HandoffEnded(key=encode_handoff_key(end.key), kind=end.kind.value, message=end.message)
                for end in update.ended
            ],
            renewed_sequence=update.renewed_sequence,
            lease_ms=int(self._lease_s * 1e3),
        )


def _command(
    message: kv_pb2.StreamHandoffRequest, consumer: WorkerRef
) -> Callable[[Engine, float], tuple[None, list[Effect]]]:
    """Decode a message to one engine command. Raises TandemError for a malformed message, with nothing of it
    applied."""
    follow = [decode_handoff_key(key) for key in message.follow]
    prefix_requests = [decode_prefix_request(request) for request in message.prefix_request]
    renew = [decode_handoff_key(key) for key in message.renew]
    take = [(decode_handoff_key(request.key), request.num_output_tokens) for request in message.take]
    release = [decode_handoff_key(key) for key in message.release]
    taken = [decode_handoff_key(key) for key in message.taken]

    def apply(engine: Engine, now: float) -> tuple[None, list[Effect]]:
        effects: list[Effect] = []
        for key in follow:
            effects += engine.follow(key, consumer, now)
        for key, prefix_request in prefix_requests:
            effects += engine.follow(key, consumer, now, prefix_request)
        effects += engine.renew(renew, consumer, now)
        for key, num_output_tokens in take:
            engine.request_remainder(key, num_output_tokens)
        for key in release:
            effects += engine.release(key, now)
        for key in taken:
            effects += engine.release(key, now, is_taken=True)
        return None, effects

    return apply
