"""Serve OpenAI's HTTP endpoints, and vLLM's /tokenize and /detokenize, by translating them to the CompletionService."""

from __future__ import annotations

import msgspec

from tandem.core.clock import wall_ns
from tandem.gateway.context.interfaces import Authenticator, ServedModel
from tandem.gateway.context.request_context import (
    EXPLAIN_HEADER,
    LANE_HEADER,
    SESSION_HEADER,
    TIMEOUT_HEADER,
    TIMING_HEADER,
    TRACEPARENT_HEADER,
    TRACESTATE_HEADER,
    RequestContext,
    is_flag_set,
    lane_of,
    timeout_of,
)
from tandem.gateway.http.exchange import Exchange
from tandem.gateway.http.openai_response import ChatFormatter, ChunkHeader, CompletionFormatter
from tandem.gateway.http.openai_schema import DetokenizeReply, ModelCard, ModelList, TokenizeReply
from tandem.gateway.http.responses import send_completion
from tandem.gateway.openai.request_schema import ChatBody, CompletionBody, DetokenizeBody, TokenizeBody, parse
from tandem.gateway.serving.completions import CompletionService
from tandem.gateway.tenants.authenticator import api_key_from_headers

MODELS_PREFIX = "/v1/models/"


class OpenAIRoutes:
    """One handler per endpoint. `heartbeat_s`: seconds between the heartbeats that a stream sends before its first
    token. `max_body`: largest body in bytes."""

    __slots__ = ("_answers", "_authenticator", "_heartbeat_s", "_max_body")

    def __init__(
        self, answers: CompletionService, authenticator: Authenticator, max_body: int, heartbeat_s: float
    ) -> None:
        self._answers = answers
        self._authenticator = authenticator
        self._max_body = max_body
        self._heartbeat_s = heartbeat_s

    async def models(self, exchange: Exchange) -> None:
        models = self._answers.models(self._caller(exchange).tenant)
        cards = [_model_card(model, name) for model in models for name in model.names]
        await exchange.send_json(200, msgspec.json.encode(ModelList(cards)))

    async def model(self, exchange: Exchange) -> None:
        """Send the card of one model, whose name is all of the path after the prefix, as names may contain slashes."""
        tenant = self._caller(exchange).tenant
        name = str(exchange.scope["path"]).removeprefix(MODELS_PREFIX)
        await exchange.send_json(200, msgspec.json.encode(_model_card(self._answers.find(name, tenant), name)))

    async def chat(self, exchange: Exchange) -> None:
        caller = self._caller(exchange)
        body = parse(await exchange.read_body(self._max_body), ChatBody)

        async def answer() -> None:
            async with await self._answers.chat(body, caller) as given:
                await send_completion(exchange, given, ChatFormatter(ChunkHeader.of(given, _now())), self._heartbeat_s)

        await exchange.run_until_disconnect(answer())

    async def completions(self, exchange: Exchange) -> None:
        caller = self._caller(exchange)
        body = parse(await exchange.read_body(self._max_body), CompletionBody)

        async def answer() -> None:
            async with await self._answers.complete(body, caller) as given:
                await send_completion(
                    exchange, given, CompletionFormatter(ChunkHeader.of(given, _now())), self._heartbeat_s
                )

        await exchange.run_until_disconnect(answer())

    async def tokenize(self, exchange: Exchange) -> None:
        tenant = self._caller(exchange).tenant
        body = parse(await exchange.read_body(self._max_body), TokenizeBody)
        served, ids = await self._answers.tokenize(body, tenant)
        texts = await self._answers.token_strings(served, ids) if body.return_token_strs else None
        reply = TokenizeReply(len(ids), served.max_model_len, list(ids), texts)
        await exchange.send_json(200, msgspec.json.encode(reply))

    async def detokenize(self, exchange: Exchange) -> None:
        tenant = self._caller(exchange).tenant
        body = parse(await exchange.read_body(self._max_body), DetokenizeBody)
        reply = DetokenizeReply(await self._answers.detokenize(body, tenant))
        await exchange.send_json(200, msgspec.json.encode(reply))

    def _caller(self, exchange: Exchange) -> RequestContext:
        """Authenticate the caller and read its headers. This comes before the body is read, so that a client without a
        valid key costs nothing."""
        received_at = self._answers.now()
        key = api_key_from_headers(_text(exchange, "authorization"), _text(exchange, "x-api-key"))
        tenant = self._authenticator.identify(key)
        return RequestContext(
            request_id=exchange.request_id,
            received_at=received_at,
            tenant=tenant,
            lane=lane_of(_text(exchange, LANE_HEADER)),
            timeout_s=timeout_of(_text(exchange, TIMEOUT_HEADER)),
            session=_text(exchange, SESSION_HEADER) or "",
            wants_explanation=is_flag_set(EXPLAIN_HEADER, _text(exchange, EXPLAIN_HEADER)),
            wants_timing=is_flag_set(TIMING_HEADER, _text(exchange, TIMING_HEADER)),
            traceparent=_text(exchange, TRACEPARENT_HEADER) or "",
            tracestate=_text(exchange, TRACESTATE_HEADER) or "",
        )


def _text(exchange: Exchange, header: str) -> str | None:
    given = exchange.header(header.encode())
    return None if given is None else given.decode("latin-1")


def _now() -> int:
    """Return the time in seconds since the epoch."""
    return wall_ns() // 10**9


def _model_card(model: ServedModel, name: str) -> ModelCard:
    return ModelCard(id=name, created=model.created, root=model.name, max_model_len=model.max_model_len)
