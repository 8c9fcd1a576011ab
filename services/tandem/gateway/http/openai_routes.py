"""Serve OpenAI's HTTP endpoints, and vLLM's /tokenize and /detokenize, by translating them to the CompletionService."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import ExitStack
from typing import Any

from starlette.responses import Response

from tandem.core.clock import wall_ns
from tandem.core.errors import ErrorKind, TandemError
from tandem.gateway.context.interfaces import Authenticator, ServedModel
from tandem.gateway.context.request_context import TIMEOUT_HEADER, RequestContext, read_context, timeout_of
from tandem.gateway.http import openai_schema as reply
from tandem.gateway.http.exchange import Exchange, json_response
from tandem.gateway.http.openai_response import ChatFormatter, CompletionFormatter, ResponseFormatter
from tandem.gateway.http.responses import send_completion
from tandem.gateway.http.routes import OF_BODIES, OF_COMPLETIONS, OF_EVERY_REQUEST, Operation
from tandem.gateway.openai.request_schema import Body, ChatBody, CompletionBody, DetokenizeBody, TokenizeBody, parse
from tandem.gateway.serving.completions import LARGE_BODY_BYTES, CompletionService, CompletionStream
from tandem.gateway.tenants.authenticator import tenant_of

_OF_MODEL = (*OF_EVERY_REQUEST, ErrorKind.MODEL_NOT_FOUND, ErrorKind.NO_WORKER)
_OF_TOKENIZE = (*OF_BODIES, ErrorKind.UNSUPPORTED)
_COMPLETION = "Completion of one or several prompts"
_MODELS = "All models, one entry for each name or alias"
_TOKENIZE = "Token ids of a prompt or a conversation"
_DETOKENIZE = "Text of token ids"
LARGE_BODY_S, LARGE_BODY_RATED_BYTES = 20.0, 4 << 20
"""LARGE_BODY_S: longest time in seconds in which a large body of up to LARGE_BODY_RATED_BYTES bytes may arrive, which
is 1.7 Mbit/s; a larger body gets more time in proportion. The limit is needed because a client that sends slowly holds
its turn, for which others wait."""


class OpenAIRoutes:
    """Handle OpenAI's endpoints, /tokenize and /detokenize. Each handler authenticates the client, parses the body,
    calls `answers` and sends the result.

    `heartbeat_s`: seconds between the heartbeats that a stream sends before its first token. `max_body`: largest
    request body in bytes."""

    def __init__(
        self, answers: CompletionService, authenticator: Authenticator, max_body: int, heartbeat_s: float
    ) -> None:
        self._answers = answers
        self._authenticator = authenticator
        self._max_body = max_body
        self._heartbeat_s = heartbeat_s

    @Operation(
        "POST",
        "/v1/chat/completions",
        "Chat completion",
        body=ChatBody,
        reply=reply.ChatCompletion,
        chunk=reply.ChatChunk,
        errors=OF_COMPLETIONS,
    )
    async def chat(self, exchange: Exchange) -> None:
        await self._complete(exchange, ChatBody, self._answers.chat, ChatFormatter)

    @Operation(
        "POST",
        "/v1/completions",
        _COMPLETION,
        body=CompletionBody,
        reply=reply.TextCompletion,
        chunk=reply.TextChunk,
        errors=OF_COMPLETIONS,
    )
    async def completions(self, exchange: Exchange) -> None:
        await self._complete(exchange, CompletionBody, self._answers.complete, CompletionFormatter)

    @Operation("GET", "/v1/models", _MODELS, reply=reply.ModelList, errors=OF_EVERY_REQUEST)
    async def models(self, exchange: Exchange) -> Response:
        models = self._answers.models(self._caller(exchange).tenant)
        return json_response(reply.ModelList([_model_card(model, name) for model in models for name in model.names]))

    @Operation("GET", "/v1/models/{model:path}", "One model", reply=reply.ModelCard, errors=_OF_MODEL)
    async def model(self, exchange: Exchange) -> Response:
        """Send the card of one model, named by the whole path after `/v1/models/`, as names may contain slashes. Raises
        NOT_FOUND for an empty name, MODEL_NOT_FOUND for an unknown one, and NO_WORKER while no model is served."""
        tenant = self._caller(exchange).tenant
        name = exchange.path_params["model"]
        if not name:
            raise TandemError(ErrorKind.NOT_FOUND, f"unknown path {exchange.scope['path']}; /docs lists all paths")
        return json_response(_model_card(self._answers.find(name, tenant), name))

    @Operation("POST", "/tokenize", _TOKENIZE, body=TokenizeBody, reply=reply.TokenizeReply, errors=_OF_TOKENIZE)
    async def tokenize(self, exchange: Exchange) -> Response:
        with ExitStack() as turn:
            caller, body = await self._read(exchange, TokenizeBody, turn)
            served, ids = await self._answers.tokenize(body, caller.tenant)
        texts = await self._answers.token_strings(served, ids, caller.tenant) if body.return_token_strs else None
        return json_response(reply.TokenizeReply(len(ids), served.max_model_len, list(ids), texts))

    @Operation("POST", "/detokenize", _DETOKENIZE, body=DetokenizeBody, reply=reply.DetokenizeReply, errors=OF_BODIES)
    async def detokenize(self, exchange: Exchange) -> Response:
        with ExitStack() as turn:
            caller, body = await self._read(exchange, DetokenizeBody, turn)
            text = await self._answers.detokenize(body, caller.tenant)
        return json_response(reply.DetokenizeReply(text))

    async def _read(self, exchange: Exchange, kind: type[Body], turn: ExitStack) -> tuple[RequestContext, Body]:
        """Read and parse the body of a request, and return it with the context of its caller. The caller is
        authenticated first, so that a client without a valid key costs nothing. A large body is read in its tenant's
        turn, which is entered into `turn`. Raises REQUEST_TIMEOUT for a large body that has not arrived LARGE_BODY_S
        seconds after its turn began (later in proportion for a very large one), because other tenants wait for that
        turn."""
        caller = self._caller(exchange)

        async def begin_large(num_bytes: int) -> float:
            turn.enter_context(await self._answers.begin_large(caller.tenant, num_bytes))
            return LARGE_BODY_S * max(1.0, num_bytes / LARGE_BODY_RATED_BYTES)

        content = await exchange.read_body(self._max_body, LARGE_BODY_BYTES, begin_large)
        return caller, parse(content, kind)

    def _caller(self, exchange: Exchange) -> RequestContext:
        received_at = self._answers.now()
        tenant = tenant_of(exchange.header_items, self._authenticator)
        return read_context(
            exchange.fields,
            tenant,
            request_id=exchange.request_id,
            received_at=received_at,
            timeout_s=timeout_of(exchange.fields.get(TIMEOUT_HEADER)),
        )

    async def _complete(
        self,
        exchange: Exchange,
        kind: type[Body],
        admit: Callable[[Body, RequestContext], Awaitable[CompletionStream]],
        make_formatter: Callable[[CompletionStream, int], ResponseFormatter[Any]],
    ) -> None:
        """Read the body of a request, admit it by `admit`, and send its response until the client disconnects. A turn
        in which a large body was read ends once the request is admitted."""
        with ExitStack() as turn:
            caller, body = await self._read(exchange, kind, turn)

            async def answer() -> None:
                async with await admit(body, caller) as given:
                    turn.close()
                    formatter = make_formatter(given, wall_ns() // 10**9)
                    await send_completion(exchange, given, formatter, self._heartbeat_s)

            await exchange.run_until_disconnect(answer())


def _model_card(model: ServedModel, name: str) -> reply.ModelCard:
    return reply.ModelCard(id=name, created=model.created, root=model.name, max_model_len=model.max_model_len)
