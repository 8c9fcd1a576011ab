"""OpenAI's HTTP endpoints as a translator over one dispatch; never decides where or whether a request runs."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

import msgspec

from tandem.core.clock import wall_ns
from tandem.gateway.answers import Answer, Answers
from tandem.gateway.asgi import Exchange, Header, header_value
from tandem.gateway.caller import Caller
from tandem.gateway.completion import Delta, Ending, Part
from tandem.gateway.doorkeeper import shown_key
from tandem.gateway.openai_response import ChatForm, Form, Heading, TextForm
from tandem.gateway.openai_schema import ChatBody, CompletionBody, parse
from tandem.gateway.ports import Dispatch, Doorkeeper, ServedModel
from tandem.gateway.sse import EventStream

MODELS_PREFIX = "/v1/models/"


class OpenAIRoutes:
    """One handler per endpoint."""

    __slots__ = ("_answers", "_dispatch", "_doorkeeper", "_max_body")

    def __init__(self, dispatch: Dispatch, answers: Answers, doorkeeper: Doorkeeper, max_body: int) -> None:
        self._dispatch = dispatch
        self._answers = answers
        self._doorkeeper = doorkeeper
        self._max_body = max_body

    async def models(self, exchange: Exchange) -> None:
        data = [_model_card(model) for model in self._answers.models(self._caller(exchange).tenant)]
        await exchange.send_json(200, msgspec.json.encode({"object": "list", "data": data}))

    async def model(self, exchange: Exchange) -> None:
        """A model's name may hold slashes, so it is all of the path after the prefix."""
        name = str(exchange.scope["path"]).removeprefix(MODELS_PREFIX)
        tenant = self._caller(exchange).tenant
        await exchange.send_json(200, msgspec.json.encode(_model_card(self._answers.find(name, tenant))))

    async def chat(self, exchange: Exchange) -> None:
        caller = self._caller(exchange)
        body = parse(await exchange.read_body(self._max_body), ChatBody)

        async def answer() -> None:
            async with await self._answers.chat(body, caller) as given:
                await _send(exchange, given, ChatForm(_heading(given), stream=given.ask.stream))

        await exchange.run_until_disconnect(answer())

    async def completions(self, exchange: Exchange) -> None:
        caller = self._caller(exchange)
        body = parse(await exchange.read_body(self._max_body), CompletionBody)

        async def answer() -> None:
            async with await self._answers.complete(body, caller) as given:
                await _send(exchange, given, TextForm(_heading(given)))

        await exchange.run_until_disconnect(answer())

    def _caller(self, exchange: Exchange) -> Caller:
        """Who asks; before its body is read, so that a stranger costs nothing."""
        authorization, x_api_key = (
            (exchange.header(name) or b"").decode("latin-1") for name in (b"authorization", b"x-api-key")
        )
        tenant = self._doorkeeper.identify(shown_key(authorization, x_api_key))
        return Caller(request_id=exchange.request_id, tenant=tenant)


async def _send(exchange: Exchange, answer: Answer, form: Form) -> None:
    async with aclosing(answer.parts()) as parts:
        # Nothing is sent before the first token is here: what fails until then gets its proper status.
        first = await anext(parts)
        if answer.ask.stream:
            await _stream(exchange, form, answer, first, parts)
        else:
            await _collect(exchange, form, answer, first, parts)


async def _stream(
    exchange: Exchange, form: Form, answer: Answer, first: Part, parts: AsyncGenerator[Part, None]
) -> None:
    sse = EventStream(exchange)
    await sse.open([_path_header(answer)])
    opening = form.opening()
    part = first
    while not isinstance(part, Ending):
        chunk = form.chunk(part) if isinstance(part, Delta) else None
        if opening or chunk:
            await sse.send(*opening, *([chunk] if chunk else []))
        opening = []
        part = await anext(parts)
    await sse.close(*opening, *form.closing(part, answer.path))


async def _collect(
    exchange: Exchange, form: Form, answer: Answer, first: Part, parts: AsyncGenerator[Part, None]
) -> None:
    deltas: list[Delta] = []
    header = _path_header(answer)
    part = first
    while not isinstance(part, Ending):
        deltas += [part] if isinstance(part, Delta) else []
        part = await anext(parts)
    await exchange.send_json(200, form.body(deltas, part, answer.path), [header])


def _path_header(answer: Answer) -> Header:
    return (b"x-tandem-path", header_value(answer.path))


def _heading(answer: Answer) -> Heading:
    ask, served, job = answer.ask, answer.served, answer.job
    return Heading(
        id=job.id,
        created=wall_ns() // 10**9,
        model=served.name,
        num_prompt_tokens=len(job.prompt_tokens),
        include_usage=ask.include_usage,
        with_logprobs=ask.logprobs is not None,
        with_token_ids=bool(ask.body.return_token_ids),
        text=served.text,
    )


def _model_card(model: ServedModel) -> dict[str, Any]:
    return {
        "id": model.name,
        "object": "model",
        "created": model.created,
        "owned_by": "tandem",
        "max_model_len": model.max_model_len,
    }
