"""The producer's end of StreamHandoff streams: what consumers say to engine commands, what they are told to messages;
never decides about a lease."""

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
"""Messages of one consumer that may wait for the engine; what it says beyond that waits in the stream."""

_Context = grpc.aio.ServicerContext[kv_pb2.StreamHandoffRequest, kv_pb2.StreamHandoffUpdate]


class HandoffService:
    """One conversation per consumer. `lease_s`: how long a lease holds; also how long a message may wait to be
    taken."""

    def __init__(self, driver: EngineDriver, consumers: ConsumerStreams, fingerprint: str, lease_s: float) -> None:
        self._driver = driver
        self._consumers = consumers
        self._fingerprint = fingerprint
        self._lease_s = lease_s

    async def serve(self, requests: AsyncIterator[kv_pb2.StreamHandoffRequest], context: _Context) -> None:
        """Until the consumer leaves, opens another stream, or does not take what it is told."""
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
        listening = asyncio.create_task(self._listen(first, requests, stream), name=f"follow of {stream.consumer}")
        try:
            await self._speak(stream, context)
        finally:
            listening.cancel()
            (outcome,) = await asyncio.gather(listening, return_exceptions=True)
            self._consumers.detach(stream)
        outcome = stream.failure or outcome
        if isinstance(outcome, TandemError):
            await context.abort(status_of(outcome), outcome.message)

    async def _listen(
        self,
        first: kv_pb2.StreamHandoffRequest,
        requests: AsyncIterator[kv_pb2.StreamHandoffRequest],
        stream: ConsumerStream,
    ) -> None:
        """The engine takes commands between two steps, so messages enter as they come: one that waited for the answer
        to the one before it would wait for a step each."""
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
        """The answer to a message follows whatever its commands had to tell."""

        def settle(done: asyncio.Future[None]) -> None:
            error = None if done.cancelled() else done.exception()
            if error is None:
                stream.answer(message.sequence)
            else:
                stream.fail(error)

        done = asyncio.wrap_future(self._driver.call(_command(message, stream.consumer)))
        done.add_done_callback(settle)
        return done

    async def _speak(self, stream: ConsumerStream, context: _Context) -> None:
        while True:
            stream.wake.clear()
            told = stream.take()
            if told and not await self._write(context, told):
                return
            if stream.is_over:
                return
            await stream.wake.wait()

    async def _write(self, context: _Context, told: PendingUpdate) -> bool:
        """False when the consumer does not take it: its leases have lapsed by then."""
        try:
            async with asyncio.timeout(self._lease_s):
                await context.write(self._update(told))
        except TimeoutError:
            return False
        return True

    def _update(self, told: PendingUpdate) -> kv_pb2.StreamHandoffUpdate:
        return kv_pb2.StreamHandoffUpdate(
            announcements=[encode_announcement(effect.message) for effect in told.announcements],
            ended=[
                kv_pb2.HandoffEnded(key=encode_handoff_key(end.key), kind=end.kind.value, message=end.message)
                for end in told.ended
            ],
            renewed_sequence=told.renewed_sequence,
            lease_ms=int(self._lease_s * 1e3),
        )


def _command(
    message: kv_pb2.StreamHandoffRequest, consumer: WorkerRef
) -> Callable[[Engine, float], tuple[None, list[Effect]]]:
    """Raises TandemError when the message is malformed; then nothing of it is done."""
    follow = [decode_handoff_key(key) for key in message.follow]
    prefix_request = [decode_prefix_request(asked) for asked in message.prefix_request]
    renew = [decode_handoff_key(key) for key in message.renew]
    take = [(decode_handoff_key(asked.key), asked.num_output_tokens) for asked in message.take]
    release = [decode_handoff_key(key) for key in message.release]
    taken = [decode_handoff_key(key) for key in message.taken]

    def apply(engine: Engine, now: float) -> tuple[None, list[Effect]]:
        effects: list[Effect] = []
        for key in follow:
            effects += engine.follow(key, consumer, now)
        for key, wanted in prefix_request:
            effects += engine.follow(key, consumer, now, wanted)
        effects += engine.renew(renew, consumer, now)
        for key, num_output_tokens in take:
            engine.request_remainder(key, num_output_tokens)
        for key in release:
            effects += engine.release(key, now)
        for key in taken:
            effects += engine.release(key, now, is_taken=True)
        return None, effects

    return apply
