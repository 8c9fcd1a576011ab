"""Test how the openai client reads our responses, streamed and whole."""

from __future__ import annotations

import asyncio
from typing import Any

import openai
import pytest

from tandem.core.errors import ErrorKind, TandemError
from tandem.core.events import FinishReason

Front = Any  # the fixtures' class lives in conftest
MESSAGES: list[Any] = [{"role": "user", "content": "What is the capital of France?"}]
TEXT = "Paris 你好 😀."


def test_a_chat(front: Front, client: openai.OpenAI) -> None:
    tokens = front.answer(TEXT)
    raw = client.chat.completions.with_raw_response.create(model="tiny", messages=MESSAGES)
    answer = raw.parse()
    assert raw.headers["x-tandem-path"] == "remote"
    assert answer.object == "chat.completion"
    assert answer.id == front.dispatch.requests[0].id
    assert answer.model == "tiny"
    assert answer.model_extra == {"tandem": {"path": "remote", "attempts": 1}}
    (choice,) = answer.choices
    assert (choice.message.role, choice.message.content, choice.finish_reason) == ("assistant", TEXT, "stop")
    assert choice.logprobs is None
    num_prompt, num_output = len(front.dispatch.requests[0].prompt_tokens), len(front.ids(TEXT)) + 1
    assert answer.usage is not None and answer.usage.prompt_tokens_details is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (num_prompt, num_output)
    assert answer.usage.total_tokens == num_prompt + num_output
    assert answer.usage.prompt_tokens_details.cached_tokens == 4
    assert tokens.closed.wait(20) and tokens.num_closes == 1


@pytest.mark.parametrize("include_usage", [False, True])
def test_a_streamed_chat(front: Front, client: openai.OpenAI, include_usage: bool) -> None:
    tokens = front.answer(TEXT, path="fallback;reason=kv_lost")
    options: Any = {"stream_options": {"include_usage": True}} if include_usage else {}
    with client.chat.completions.create(model="tiny", messages=MESSAGES, stream=True, **options) as stream:
        assert stream.response.headers["x-tandem-path"] == "fallback;reason=kv_lost"
        assert stream.response.headers["content-type"].startswith("text/event-stream")
        chunks = list(stream)
    assert {chunk.object for chunk in chunks} == {"chat.completion.chunk"}
    assert {chunk.id for chunk in chunks} == {front.dispatch.requests[0].id}
    assert chunks[0].choices[0].delta.role == "assistant"
    with_choice = [chunk for chunk in chunks if chunk.choices]
    assert "".join(chunk.choices[0].delta.content or "" for chunk in with_choice) == TEXT
    assert [chunk.choices[0].finish_reason for chunk in with_choice[-2:]] == [None, "stop"]
    assert len(chunks) - len(with_choice) == include_usage
    usage = chunks[-1].usage
    assert (usage is not None and usage.completion_tokens == len(front.ids(TEXT)) + 1) == include_usage
    assert all(chunk.usage is None for chunk in chunks[:-1])
    assert chunks[-1].model_extra == {"tandem": {"path": "fallback;reason=kv_lost", "attempts": 1}}
    assert tokens.closed.wait(20) and tokens.num_closes == 1


def test_a_chat_with_logprobs(front: Front, client: openai.OpenAI) -> None:
    front.answer(TEXT)
    options: dict[str, Any] = {"model": "tiny", "messages": MESSAGES, "logprobs": True, "top_logprobs": 2}
    answer = client.chat.completions.create(**options)
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None and logprobs.content is not None
    assert len(logprobs.content) == len(front.ids(TEXT))
    assert b"".join(bytes(entry.bytes or []) for entry in logprobs.content) == TEXT.encode()
    assert logprobs.content[0].logprob == -0.5
    assert [entry.logprob for entry in logprobs.content[0].top_logprobs] == [-0.5, -9999.0]
    assert front.dispatch.requests[0].sampling.logprobs == 2
    front.answer(TEXT)
    streamed = [
        entry
        for chunk in client.chat.completions.create(**options, stream=True)
        for entry in (chunk.choices[0].logprobs.content or [] if chunk.choices[0].logprobs else [])
    ]
    assert streamed == logprobs.content


@pytest.mark.parametrize("prompt", ["The capital of France is", [5, 6, 7]])
def test_a_completion(front: Front, client: openai.OpenAI, prompt: Any) -> None:
    front.stream("Paris", front.finished(FinishReason.LENGTH))
    answer = client.completions.create(model="org/tiny", prompt=prompt, max_tokens=7)
    assert (answer.object, answer.model) == ("text_completion", "org/tiny")
    assert answer.id.startswith("cmpl-")
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == ("Paris", "length")
    assert answer.choices[0].logprobs is None
    assert answer.usage is not None and answer.usage.completion_tokens == 7


def test_a_streamed_completion_with_logprobs(front: Front, client: openai.OpenAI) -> None:
    front.answer(TEXT)
    options: Any = {"stream_options": {"include_usage": True}}
    chunks = list(client.completions.create(model="tiny", prompt="x", logprobs=1, stream=True, **options))
    assert "".join(chunk.choices[0].text for chunk in chunks if chunk.choices) == TEXT
    logprobs = [chunk.choices[0].logprobs for chunk in chunks if chunk.choices and chunk.choices[0].logprobs]
    offsets = [offset for each in logprobs for offset in each.text_offset or []]
    assert len(offsets) == len(front.ids(TEXT))
    assert offsets == sorted(offsets)
    assert all("\ufffd" not in name for each in logprobs for name in each.tokens or [])
    assert chunks[-1].usage is not None


def test_requested_token_ids_are_sent_with_every_token(front: Front, client: openai.OpenAI) -> None:
    """Tokens without text of their own have a chunk too: a client sees each token on arrival, and the last one as
    well.
    """
    front.answer(TEXT)
    options: Any = {"model": "tiny", "extra_body": {"return_token_ids": True}, "stream": True}
    for chunks in (
        list(client.completions.create(prompt="x", **options)),
        list(client.chat.completions.create(messages=[{"role": "user", "content": "x"}], **options)),
    ):
        choices = [chunk.choices[0].model_dump() for chunk in chunks if chunk.choices]
        token_ids = [choice["token_ids"] for choice in choices if choice.get("token_ids")]
        assert token_ids == [[token] for token in (*front.ids(TEXT), 1)]
    whole = client.completions.create(model="tiny", prompt="x", extra_body={"return_token_ids": True})
    assert whole.choices[0].model_dump()["token_ids"] == [*front.ids(TEXT), 1]


def test_token_ids_are_absent_unless_requested(front: Front, client: openai.OpenAI) -> None:
    front.answer(TEXT)
    answer = client.completions.create(model="tiny", prompt="x")
    assert "token_ids" not in answer.choices[0].model_dump()


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["tiny", "org/tiny", "many", "other", "org/third"]
    model = client.models.retrieve("org/tiny")
    assert (model.id, model.owned_by, model.created) == ("org/tiny", "tandem", 1_700_000_000)


@pytest.mark.parametrize("name", ["many", "other", "org/third"])
def test_a_model_answers_to_every_name_by_that_name(front: Front, client: openai.OpenAI, name: str) -> None:
    front.answer(TEXT)
    assert client.models.retrieve(name).model_dump()["root"] == "many"
    assert client.models.retrieve(name).id == name
    assert client.chat.completions.create(model=name, messages=MESSAGES).model == name
    assert {chunk.model for chunk in client.completions.create(model=name, prompt="x", stream=True)} == {name}
    assert {request.model for request in front.dispatch.requests} == {"many"}


def test_errors_raise_the_openai_clients_exceptions(front: Front, client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as missing:
        client.chat.completions.create(model="nothing", messages=MESSAGES)
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as long:
        client.chat.completions.create(model="tiny", messages=MESSAGES, max_tokens=10_000)
    assert (long.value.code, long.value.param) == ("context_length_exceeded", "messages")
    front.stream("The capital", TandemError(ErrorKind.KV_LOST, "the keys and values are gone"))
    with pytest.raises(openai.APIError, match="keys and values are gone"):
        list(client.chat.completions.create(model="tiny", messages=MESSAGES, stream=True))


def test_many_streams_at_once(front: Front) -> None:
    front.dispatch.script = lambda request: front.answer(TEXT)

    async def one(client: openai.AsyncOpenAI) -> str:
        stream = await client.chat.completions.create(model="tiny", messages=MESSAGES, stream=True)
        return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

    async def all_of_them() -> list[str]:
        http = openai.DefaultAsyncHttpxClient(trust_env=False, verify=False)
        async with openai.AsyncOpenAI(
            base_url=f"{front.url}/v1", api_key="x", max_retries=0, http_client=http
        ) as client:
            return await asyncio.gather(*(one(client) for _ in range(32)))

    assert asyncio.run(all_of_them()) == [TEXT] * 32
    assert len({request.id for request in front.dispatch.requests}) == 32
