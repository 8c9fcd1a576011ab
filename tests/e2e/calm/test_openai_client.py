"""Test the openai client, sync and async, against a whole cluster: model names, several prompts, echo and scores."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import jsonschema  # type: ignore[import-untyped]
import openai
import pytest

from tests.e2e.gateway.http import prompt
from tests.e2e.gateway.pair import Pair

SHAPE: dict[str, Any] = {
    "type": "object",
    "properties": {
        "sunny": {"type": "boolean"},
        "sky": {"enum": ["blue", "grey"]},
        "wind": {"type": "integer", "minimum": 0, "maximum": 99},
    },
    "required": ["sunny", "sky", "wind"],
    "additionalProperties": False,
}
FORM: dict[str, Any] = {
    "model": "tiny",
    "messages": [{"role": "user", "content": "The weather?"}],
    "response_format": {"type": "json_schema", "json_schema": {"name": "weather", "schema": SHAPE, "strict": True}},
    "n": 3,
    "temperature": 1.0,
    "seed": 3,
    "max_tokens": 200,
}
PROMPT = "Grüße aus Köln, the capital of nothing"


def complete(client: openai.OpenAI, **options: Any) -> Any:
    return client.completions.create(**{"model": "tiny", "prompt": PROMPT, "max_tokens": 8, "temperature": 0} | options)


def streamed_texts(chunks: Any) -> list[str]:
    texts: dict[int, str] = {}
    for choice in [choice for chunk in chunks for choice in chunk.choices]:
        texts[choice.index] = texts.get(choice.index, "") + choice.text
    return [texts[index] for index in sorted(texts)]


def test_a_model_answers_to_its_alias(client: openai.OpenAI) -> None:
    assert client.models.retrieve("org/alias").model_dump()["root"] == "tiny"
    one, other = complete(client), complete(client, model="org/alias")
    assert (one.model, other.model) == ("tiny", "org/alias")
    assert one.choices[0].text == other.choices[0].text


@pytest.mark.parametrize("stream", [False, True])
def test_several_prompts_are_answered_as_each_of_them_alone(client: openai.OpenAI, stream: bool) -> None:
    prompts = [PROMPT, "def main():", "x"]
    alone = [complete(client, prompt=prompt).choices[0].text for prompt in prompts]
    answer = complete(client, prompt=prompts, stream=stream)
    together = streamed_texts(answer) if stream else [choice.text for choice in answer.choices]
    assert together == alone


@pytest.mark.parametrize("stream", [False, True])
def test_an_echo_begins_with_the_prompt(client: openai.OpenAI, stream: bool) -> None:
    text = complete(client).choices[0].text
    answer = complete(client, echo=True, stream=stream)
    assert (streamed_texts(answer) if stream else [answer.choices[0].text]) == [PROMPT + text]


@pytest.mark.parametrize("stream", [False, True])
def test_choices_differ_and_repeat(calm: Pair, client: openai.OpenAI, stream: bool) -> None:
    """The first of several choices equals that of a single-choice request; each choice has its own end."""
    options: dict[str, Any] = {"temperature": 1.0, "seed": 5, "max_tokens": 12}
    alone = complete(client, **options).choices[0].text
    whole = complete(client, n=3, **options)
    assert [choice.index for choice in whole.choices] == [0, 1, 2]
    texts = [choice.text for choice in whole.choices]
    assert texts[0] == alone and len(set(texts)) == 3
    assert whole.usage.completion_tokens == 36
    again = complete(client, n=3, stream=stream, **options)
    assert (streamed_texts(again) if stream else [choice.text for choice in again.choices]) == texts
    calm.wait_idle()


def test_a_stop_string_ends_one_choice_and_not_the_others(calm: Pair, client: openai.OpenAI) -> None:
    options: dict[str, Any] = {"temperature": 1.0, "seed": 5, "max_tokens": 40, "n": 3}
    texts = [choice.text for choice in complete(client, **options).choices]
    stop = texts[1][9:14]
    assert stop not in texts[0] + texts[2]
    stopped = complete(client, stop=[stop], **options).choices
    assert [choice.finish_reason for choice in stopped] == ["length", "stop", "length"]
    assert [choice.text for choice in stopped] == [texts[0], texts[1][: texts[1].index(stop)], texts[2]]
    calm.wait_idle()


@pytest.mark.parametrize("num_choices", [1, 2])
def test_tokens_cached_at_the_prefill_worker_are_in_the_usage(client: openai.OpenAI, num_choices: int) -> None:
    """The decode worker has the prompt cached too, and ends the request unless a stop string does."""
    for num_cached in (0, 96, 96):
        usage = complete(client, prompt=prompt(100, 900 + num_choices), n=num_choices).usage
        assert usage.prompt_tokens == 100 and usage.prompt_tokens_details.cached_tokens == num_cached
        assert usage.completion_tokens == 8 * num_choices
    options: dict[str, Any] = {"prompt": prompt(100, 900 + num_choices), "n": num_choices, "max_tokens": 40}
    stop = complete(client, **options).choices[0].text[5:8]
    answer = complete(client, stop=[stop], **options)
    assert {choice.finish_reason for choice in answer.choices} == {"stop"}
    assert answer.usage.prompt_tokens_details.cached_tokens == 96


@pytest.mark.parametrize("stream", [False, True])
def test_choices_in_a_form_end_although_the_model_has_no_end(
    calm: Pair, client: openai.OpenAI, *, stream: bool
) -> None:
    choices = client.chat.completions.create(**FORM).choices
    assert [choice.finish_reason for choice in choices] == ["stop", "stop", "stop"]
    texts = [choice.message.content for choice in choices]
    assert len(set(texts)) > 1
    for text in texts:
        jsonschema.validate(json.loads(text), SHAPE)
    if stream:
        parts: dict[int, list[Any]] = {}
        for choice in [
            choice for chunk in client.chat.completions.create(stream=True, **FORM) for choice in chunk.choices
        ]:
            parts.setdefault(choice.index, []).append(choice)
        assert ["".join(part.delta.content or "" for part in parts[index]) for index in range(3)] == texts
        assert [parts[index][-1].finish_reason for index in range(3)] == ["stop"] * 3
    calm.wait_idle()


def test_choices_of_several_prompts_with_echo_and_scores(calm: Pair, client: openai.OpenAI) -> None:
    prompts = [PROMPT, "x y z"]
    options: dict[str, Any] = {"temperature": 1.0, "seed": 5, "n": 2, "logprobs": 1}
    plain, echoed = [complete(client, prompt=prompts, echo=echo, **options).choices for echo in (False, True)]
    assert [choice.text for choice in echoed] == [
        prompts[choice.index // 2] + other.text for choice, other in zip(echoed, plain, strict=True)
    ]
    scores = [choice.logprobs.token_logprobs for choice in echoed]
    assert scores[0][:-8] == scores[1][:-8] and scores[2][:-8] == scores[3][:-8]
    assert [score[-8:] for score in scores] == [
        pytest.approx(choice.logprobs.token_logprobs, abs=1e-3) for choice in plain
    ]
    calm.wait_idle()


def test_prompt_scores_equal_the_logprobs_of_the_same_sampled_tokens(client: openai.OpenAI) -> None:
    """Greedily sampled tokens have the same log probabilities when they are scored as part of a prompt."""
    sampled = complete(client, logprobs=2, extra_body={"return_token_ids": True}).choices[0]
    ids = client.post("/../tokenize", body={"model": "tiny", "prompt": PROMPT}, cast_to=dict[str, Any])["tokens"]
    whole = [*ids, *sampled.token_ids]
    scored = complete(client, prompt=whole, echo=True, logprobs=2, max_tokens=0).choices[0]
    assert scored.finish_reason == "length"
    assert len(scored.logprobs.token_logprobs) == len(whole)
    assert scored.logprobs.token_logprobs[0] is None
    assert scored.logprobs.token_logprobs[-8:] == pytest.approx(sampled.logprobs.token_logprobs, abs=1e-3)
    assert scored.logprobs.tokens[-8:] == sampled.logprobs.tokens
    again = complete(client, prompt=whole, extra_body={"prompt_logprobs": 0}).choices[0].model_dump()["prompt_logprobs"]
    logprobs = [next(iter(entry.values()))["logprob"] for entry in again[1:]]
    assert logprobs == pytest.approx(scored.logprobs.token_logprobs[1:], abs=1e-3)


def test_tokens_are_forbidden_and_forced_by_bias(client: openai.OpenAI) -> None:
    first = complete(client, extra_body={"return_token_ids": True}).choices[0].token_ids
    other = complete(client, logit_bias={str(first[0]): -100}, extra_body={"return_token_ids": True}).choices[0]
    assert first[0] not in other.token_ids
    forced = complete(client, logit_bias={"77": 100}, extra_body={"return_token_ids": True}).choices[0]
    assert forced.token_ids == [77] * 8


def test_usage_over_several_prompts(client: openai.OpenAI) -> None:
    prompts = ["one two three", "four"]
    alone = [complete(client, prompt=prompt).usage for prompt in prompts]
    together = complete(client, prompt=prompts).usage
    assert together.prompt_tokens == sum(usage.prompt_tokens for usage in alone)
    assert together.completion_tokens == 16


def test_many_asynchronous_clients(calm: Pair) -> None:
    async def one(client: openai.AsyncOpenAI, number: int, stream: bool) -> str:
        options: dict[str, Any] = {"prompt": f"{PROMPT} {number}", "max_tokens": 8, "temperature": 0}
        answer: Any = await client.completions.create(model="tiny", stream=stream, **options)
        if not stream:
            return str(answer.choices[0].text)
        return "".join([chunk.choices[0].text async for chunk in answer])

    async def all_of_them() -> list[tuple[str, str]]:
        http = openai.DefaultAsyncHttpxClient(trust_env=False, timeout=60)
        url = f"{calm.gateway.url}/v1"
        async with openai.AsyncOpenAI(base_url=url, api_key="none", http_client=http, max_retries=0) as client:
            tasks = [one(client, number, stream) for number in range(8) for stream in (False, True)]
            texts = await asyncio.gather(*tasks)
        return list(zip(texts[::2], texts[1::2], strict=True))

    pairs = asyncio.run(all_of_them())
    assert all(whole == streamed for whole, streamed in pairs)
    calm.wait_idle()
