"""Serve the public gRPC API by translating its calls to the CompletionService."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AbstractContextManager, aclosing, asynccontextmanager, nullcontext
from typing import Any, TypeVar

import grpc.aio
from google.protobuf.message import Message

from tandem.core.clock import wall_ns
from tandem.core.errors import ErrorKind, TandemError
from tandem.gateway.context.interfaces import Authenticator
from tandem.gateway.context.request_context import RequestContext, read_context
from tandem.gateway.grpc.call import GrpcCall
from tandem.gateway.grpc.requests import body_of
from tandem.gateway.grpc.responses import GrpcChatFormatter, GrpcTextFormatter, ReplyFormatter
from tandem.gateway.http.exchange import report_defect
from tandem.gateway.openai.request_schema import ChatBody, CompletionBody, DetokenizeBody, TokenizeBody
from tandem.gateway.serving.completions import LARGE_BODY_BYTES, CompletionService, CompletionStream, Part
from tandem.gateway.tenants.authenticator import tenant_of
from tandem.obs.logs.log_context import in_request
from tandem.wire.gen import inference_pb2 as pb
from tandem.wire.gen.inference_pb2_grpc import InferenceServicer

SERVICE = pb.DESCRIPTOR.services_by_name["Inference"].full_name

MAX_HELD = 256
"""Largest number of parts of the output that one message of a stream combines."""

Context = grpc.aio.ServicerContext[Any, Any]
_Reply = TypeVar("_Reply", bound=pb.ChatReply | pb.CompleteReply)


class InferenceService(InferenceServicer):
    """Serve the RPCs of inference.proto's service `Inference`, one method each; an error ends the call with its status.
    The streaming methods are coroutines that call `write`, so that a cancellation ends them immediately.

    `max_calls`: largest number of concurrent calls; further ones are refused. `stalled_client_s`: a stream ends when
    its client reads nothing for this many seconds."""

    def __init__(
        self, answers: CompletionService, authenticator: Authenticator, max_calls: int, stalled_client_s: float
    ) -> None:
        self._answers = answers
        self._authenticator = authenticator
        self._max_calls = max_calls
        self._num_calls = 0
        self._stalled_client_s = stalled_client_s

    async def Chat(self, request: pb.ChatRequest, context: Context) -> pb.ChatReply:
        async with self._completion(request, context) as (call, answer):
            return await _whole(call, answer, GrpcChatFormatter(answer, _now_s()))

    async def StreamChat(self, request: pb.ChatRequest, context: Context) -> None:  # type: ignore[override]
        async with self._completion(request, context, stream=True) as (call, answer):
            await _stream(call, answer, GrpcChatFormatter(answer, _now_s()), self._stalled_client_s)

    async def Complete(self, request: pb.CompleteRequest, context: Context) -> pb.CompleteReply:
        async with self._completion(request, context) as (call, answer):
            return await _whole(call, answer, GrpcTextFormatter(answer, _now_s()))

    async def StreamComplete(self, request: pb.CompleteRequest, context: Context) -> None:  # type: ignore[override]
        async with self._completion(request, context, stream=True) as (call, answer):
            await _stream(call, answer, GrpcTextFormatter(answer, _now_s()), self._stalled_client_s)

    async def ListModels(self, request: pb.ListModelsRequest, context: Context) -> pb.ListModelsReply:
        async with self._call(context) as (_, caller):
            reply = pb.ListModelsReply()
            for model in self._answers.models(caller.tenant):
                for name in model.names:
                    card = reply.data.add(id=name, created=model.created, owned_by="tandem", root=model.name)
                    card.max_model_len = model.max_model_len
            return reply

    async def Tokenize(self, request: pb.TokenizeRequest, context: Context) -> pb.TokenizeReply:
        async with self._call(context) as (_, caller):
            with await self._turn(request, caller):
                body = body_of(request, TokenizeBody)
                served, ids = await self._answers.tokenize(body, caller.tenant)
            reply = pb.TokenizeReply(count=len(ids), max_model_len=served.max_model_len, tokens=ids)
            if body.return_token_strs:
                reply.token_strs.extend(await self._answers.token_strings(served, ids, caller.tenant))
            return reply

    async def Detokenize(self, request: pb.DetokenizeRequest, context: Context) -> pb.DetokenizeReply:
        async with self._call(context) as (_, caller):
            with await self._turn(request, caller):
                text = await self._answers.detokenize(body_of(request, DetokenizeBody), caller.tenant)
            return pb.DetokenizeReply(prompt=text)

    @asynccontextmanager
    async def _call(self, context: Context) -> AsyncIterator[tuple[GrpcCall, RequestContext]]:
        """Count a call and authenticate its caller, so that a client without a valid key costs nothing. An exception
        inside ends the call with its status."""
        call = GrpcCall(context)
        with in_request(call.request_id):
            try:
                caller = self._caller(call, context)
                self._num_calls += 1
                try:
                    yield call, caller
                finally:
                    self._num_calls -= 1
            except TandemError as error:
                await call.abort(error)
            except Exception:
                await call.abort(report_defect(call.request_id))

    def _caller(self, call: GrpcCall, context: Context) -> RequestContext:
        if self._num_calls >= self._max_calls:
            self._answers.crowded()
            message = f"{self._max_calls} gRPC calls are open (gateway.max_connections); retry later"
            raise TandemError(ErrorKind.OVERLOADED, message, retry_after_s=1.0, reason="connections")
        received_at = self._answers.now()
        return read_context(
            call.metadata,
            tenant_of(call.entries, self._authenticator),
            request_id=call.request_id,
            received_at=received_at,
            timeout_s=context.time_remaining(),
        )

    async def _turn(self, request: Message, caller: RequestContext) -> AbstractContextManager[None]:
        """Wait until a large message of the caller may be translated and tokenized, and return the tenant's turn, which
        lasts for the `with` block of the result. A small message does not wait."""
        num_bytes = request.ByteSize()
        if num_bytes <= LARGE_BODY_BYTES:
            return nullcontext()
        return await self._answers.begin_large(caller.tenant, num_bytes)

    @asynccontextmanager
    async def _completion(
        self, request: pb.ChatRequest | pb.CompleteRequest, context: Context, *, stream: bool = False
    ) -> AsyncIterator[tuple[GrpcCall, CompletionStream]]:
        async with self._call(context) as (call, caller):
            with await self._turn(request, caller):
                if isinstance(request, pb.ChatRequest):
                    answer = await self._answers.chat(body_of(request, ChatBody, stream=stream), caller)
                else:
                    answer = await self._answers.complete(body_of(request, CompletionBody, stream=stream), caller)
            async with answer:
                yield call, answer


async def _whole(call: GrpcCall, answer: CompletionStream, formatter: ReplyFormatter[_Reply]) -> _Reply:
    async with aclosing(answer.parts()) as parts:
        found = [part async for part in parts]
    await call.open(answer)
    reply = formatter.reply(found)
    if reply is None:
        raise TandemError(ErrorKind.INTERNAL, "the request ended without any output")
    return reply


async def _stream(
    call: GrpcCall, answer: CompletionStream, formatter: ReplyFormatter[_Reply], stalled_client_s: float
) -> None:
    """Write the output of a request as a stream of messages. Parts that are available together are sent in one message,
    because a message is most of the cost of a token. A client that does not read delays only its own stream."""
    held: list[Part] = []

    async def send() -> None:
        reply = formatter.reply(held)
        held.clear()
        if reply is not None:
            await call.open(answer)
            await call.write(reply, stalled_client_s)

    async with aclosing(answer.parts()) as parts:
        try:
            async for part in parts:
                held.append(part)
                if not answer.has_more or len(held) >= MAX_HELD:
                    await send()
        except TandemError:
            await send()
            raise
        await send()


def _now_s() -> int:
    return wall_ns() // 10**9
