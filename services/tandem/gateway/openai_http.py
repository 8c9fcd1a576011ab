"""OpenAI's HTTP endpoints as a translator over one dispatch; never decides where or whether a request runs."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from concurrent.futures import Executor
from contextlib import aclosing
from typing import Any, cast

import msgspec

from tandem.core.clock import wall_ns
from tandem.core.errors import ErrorKind, TandemError
from tandem.core.request import Request
from tandem.gateway.asgi import Exchange, Header, header_value
from tandem.gateway.completion import Completion, Delta, Ending
from tandem.gateway.openai_request import Ask, chat_ask, completion_ask, conversation, request, single_prompt
from tandem.gateway.openai_response import ChatForm, Form, Heading, TextForm
from tandem.gateway.openai_schema import ChatBody, CompletionBody, parse
from tandem.gateway.ports import Dispatch, ServedModel
from tandem.gateway.sse import EventStream

MODELS_PREFIX = "/v1/models/"
_INLINE_CHARS = 2000
"""Text up to this length is tokenized at once: about a millisecond, less than what a thread costs under load."""


class OpenAIRoutes:
    """`encoders` tokenizes long prompts, so that one of them does not stop everybody's streams."""

    __slots__ = ("_dispatch", "_encoders", "_max_body")

    def __init__(self, dispatch: Dispatch, max_body: int, encoders: Executor) -> None:
        self._dispatch = dispatch
        self._max_body = max_body
        self._encoders = encoders

    async def models(self, exchange: Exchange) -> None:
        data = [_model_card(model) for model in self._dispatch.models()]
        await exchange.send_json(200, msgspec.json.encode({"object": "list", "data": data}))

    async def model(self, exchange: Exchange) -> None:
        """A model's name may hold slashes, so it is all of the path after the prefix."""
        name = str(exchange.scope["path"]).removeprefix(MODELS_PREFIX)
        await exchange.send_json(200, msgspec.json.encode(_model_card(self._served(name))))

    async def chat(self, exchange: Exchange) -> None:
        body = parse(await exchange.read_body(self._max_body), ChatBody)
        served, ask = self._served(body.model), chat_ask(body)
        messages = conversation(body.messages)

        def encode() -> tuple[int, ...]:
            return served.text.encode_chat(messages, body.chat_template_kwargs)

        async def answer() -> None:
            prompt = await self._encode(encode, sum(len(message["content"]) for message in messages))
            job = request(ask, served, prompt, "chatcmpl-")
            await self._answer(exchange, ask, served, job, ChatForm(_heading(ask, served, job), stream=ask.stream))

        await exchange.run_until_disconnect(answer())

    async def completions(self, exchange: Exchange) -> None:
        body = parse(await exchange.read_body(self._max_body), CompletionBody)
        served, ask = self._served(body.model), completion_ask(body)
        given = single_prompt(body.prompt, served.text.vocab_size)

        async def answer() -> None:
            if isinstance(given, str):
                prompt = await self._encode(lambda: served.text.encode_text(given), len(given))
            else:
                prompt = given
            job = request(ask, served, prompt, "cmpl-")
            await self._answer(exchange, ask, served, job, TextForm(_heading(ask, served, job)))

        await exchange.run_until_disconnect(answer())

    def _served(self, name: str) -> ServedModel:
        models = self._dispatch.models()
        for model in models:
            if model.name == name:
                return model
        if not models:
            reason = self._dispatch.ready() or "no model is served yet"
            raise TandemError(ErrorKind.NO_WORKER, reason, retry_after_s=1.0)
        raise TandemError(ErrorKind.MODEL_NOT_FOUND, f"the model {name!r} does not exist", param="model")

    async def _encode(self, encode: Callable[[], tuple[int, ...]], num_chars: int) -> tuple[int, ...]:
        if num_chars <= _INLINE_CHARS:
            return encode()
        return await asyncio.get_running_loop().run_in_executor(self._encoders, encode)

    async def _answer(self, exchange: Exchange, ask: Ask, served: ServedModel, job: Request, form: Form) -> None:
        stream = await self._dispatch.open(job)
        async with Completion(job, stream, served.text.detokenizer(ask.stops)) as completion:
            # Asynchronous generators have aclose, which AsyncIterator, the better promise, does not show.
            source = cast(AsyncGenerator[Delta | Ending], completion.events())
            async with aclosing(source) as events:
                # Nothing is sent before the first token is here: what fails until then gets its proper status.
                first = await anext(events)
                if ask.stream:
                    await _stream(exchange, form, completion, first, events)
                else:
                    await _collect(exchange, form, completion, first, events)


async def _stream(
    exchange: Exchange,
    form: Form,
    completion: Completion,
    first: Delta | Ending,
    events: AsyncGenerator[Delta | Ending],
) -> None:
    sse = EventStream(exchange)
    await sse.open([_path_header(completion)])
    opening = form.opening()
    event = first
    while isinstance(event, Delta):
        chunk = form.chunk(event)
        if opening or chunk:
            await sse.send(*opening, *([chunk] if chunk else []))
        opening = []
        event = await anext(events)
    await sse.close(*opening, *form.closing(event, completion.path))


async def _collect(
    exchange: Exchange,
    form: Form,
    completion: Completion,
    first: Delta | Ending,
    events: AsyncGenerator[Delta | Ending],
) -> None:
    deltas = []
    header = _path_header(completion)
    event = first
    while isinstance(event, Delta):
        deltas.append(event)
        event = await anext(events)
    await exchange.send_json(200, form.body(deltas, event, completion.path), [header])


def _path_header(completion: Completion) -> Header:
    return (b"x-tandem-path", header_value(completion.path))


def _heading(ask: Ask, served: ServedModel, job: Request) -> Heading:
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
