"""Test the openai client with several prompts, echo and prompt scores, streamed and not."""

from __future__ import annotations

import asyncio
import itertools
from typing import Any

import openai
import pytest

from tandem.core.errors import ErrorKind, TandemError
from tandem.core.request import Request
from tests.unit.gateway import instant
from tests.unit.gateway.openai_replies import collected

Front = Any  # the fixtures' class lives in conftest
TEXT = "Paris 你好 😀."
PROMPT = "Grüße aus Köln 😀"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("prompts", [["a", "b b"], [[5, 6], [7]], ["a"]], ids=str)
@pytest.mark.parametrize("n", [1, 2])
def test_several_prompts(front: Front, client: openai.OpenAI, stream: bool, prompts: Any, n: int) -> None:
    opened = front.instant(TEXT)
    options: Any = {"stream_options": {"include_usage": True}} if stream else {}
    answer: Any = client.completions.create(model="tiny", prompt=prompts, n=n, stream=stream, **options)
    choices, usage, _ = collected(answer, stream)
    first = front.text(front.ids(TEXT)[:1])
    assert [choice.text for choice in choices] == [first * (i % n) + TEXT for i in range(n * len(prompts))]
    requests = front.dispatch.requests
    assert len({request.id for request in requests}) == len(requests) == len(prompts)
    assert usage["prompt_tokens"] == sum(len(request.prompt_tokens) for request in requests)
    assert usage["completion_tokens"] == len(prompts) * sum(len(front.ids(TEXT)) + 1 + i for i in range(n))
    assert usage["prompt_tokens_details"]["cached_tokens"] == len(prompts) * instant.NUM_CACHED
    assert all(stream.closed.wait(20) and stream.num_closes == 1 for stream in opened)


def test_streams_of_several_prompts_interleave_as_tokens_arrive(front: Front, client: openai.OpenAI) -> None:
    gate = asyncio.Event()
    slow, fast = front.stream(gate, "b", front.finished()), front.stream("a", front.finished())
    streams = iter([slow, fast])
    front.dispatch.script = lambda request: next(streams)
    seen = []
    for chunk in client.completions.create(model="tiny", prompt=["x", "y"], stream=True):
        seen.append((chunk.choices[0].index, chunk.choices[0].finish_reason))
        if seen[-1] == (1, "stop"):
            front.let(gate)
    assert seen[-1] == (0, "stop") and all(index == 1 for index, _ in seen[: seen.index((1, "stop"))])


@pytest.mark.parametrize("stream", [False, True])
def test_one_failure_ends_all_prompts_with_one_error(front: Front, client: openai.OpenAI, stream: bool) -> None:
    bad = front.stream(TandemError(ErrorKind.KV_LOST, "gone"))
    others = [front.stream("a", asyncio.Event()) for _ in range(2)]
    streams = iter([others[0], bad, others[1]])
    front.dispatch.script = lambda request: next(streams)
    with pytest.raises(openai.APIError, match="gone"):
        list(client.completions.create(model="tiny", prompt=["x", "y", "z"], stream=stream))  # type: ignore[arg-type]
    assert all(each.closed.wait(20) and each.num_closes == 1 for each in (bad, *others))


def test_prompts_are_admitted_together_or_not_at_all(front: Front, client: openai.OpenAI) -> None:
    opened = [front.stream(asyncio.Event()) for _ in range(2)]
    count = itertools.count()

    def script(request: Request) -> Any:
        index = next(count)
        if index == 2:
            raise TandemError(ErrorKind.QUOTA, "no more", retry_after_s=3.0, reason="concurrency")
        return opened[index]

    front.dispatch.script = script
    with pytest.raises(openai.RateLimitError) as caught:
        client.completions.create(model="tiny", prompt=["a", "b", "c", "d"])
    assert caught.value.response.headers["x-tandem-reject-reason"] == "concurrency"
    assert caught.value.response.headers["retry-after"] == "3"
    assert all(each.closed.wait(20) and each.num_closes == 1 for each in opened)


def test_a_prompt_that_does_not_fit_refuses_all_before_any_is_admitted(front: Front, client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError):
        client.completions.create(model="tiny", prompt=["a", "word " * 600])
    assert front.dispatch.requests == []


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("prompt", [PROMPT, "<|im_start|>user\nx", [282, 283, 279], ["a", PROMPT]], ids=str)
def test_echo_without_scores(front: Front, client: openai.OpenAI, prompt: Any, n: int, stream: bool) -> None:
    front.instant(TEXT)
    answer = client.completions.create(model="tiny", prompt=prompt, echo=True, n=n, stream=stream)  # type: ignore[call-overload]
    choices, _, _ = collected(answer, stream)
    several = isinstance(prompt, list) and isinstance(prompt[0], str)
    texts = prompt if several else [prompt if isinstance(prompt, str) else front.text(prompt)]
    first = front.text(front.ids(TEXT)[:1])
    expected = [text + first * choice + TEXT for text in texts for choice in range(n)]
    assert [choice.text for choice in choices] == expected
    assert all(request.prompt_logprobs is None for request in front.dispatch.requests)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("prompt", [PROMPT, [0, 282, 283]], ids=str)
def test_echo_with_scores(front: Front, client: openai.OpenAI, prompt: Any, n: int, stream: bool) -> None:
    front.instant(TEXT)
    answer = client.completions.create(model="tiny", prompt=prompt, echo=True, logprobs=2, n=n, stream=stream)  # type: ignore[call-overload]
    (request,) = front.dispatch.requests
    num_prompt = len(request.prompt_tokens)
    assert request.prompt_logprobs == 2
    for index, choice in enumerate(collected(answer, stream)[0]):
        text = prompt if isinstance(prompt, str) else front.text(prompt[1:])
        assert choice.text.startswith(text) and choice.text.endswith(TEXT)
        _, scores, tops, offsets = map(list, zip(*choice.scores, strict=True))
        assert scores[0] is None and tops[0] is None
        assert set(scores[1:num_prompt]) == {instant.PROMPT_LOGPROB}
        assert scores[num_prompt:] == [instant.LOGPROB] * (len(front.ids(TEXT)) + index)
        assert all(len(top) == 2 for top in tops[1:])
        assert offsets == sorted(offsets) and offsets[0] == 0 and offsets[num_prompt] == len(text)


@pytest.mark.parametrize("stream", [False, True])
def test_scoring_alone(front: Front, client: openai.OpenAI, stream: bool) -> None:
    front.instant(TEXT)
    answer = client.completions.create(
        model="tiny", prompt=[PROMPT, "x"], echo=True, logprobs=0, max_tokens=0, stream=stream
    )  # type: ignore[call-overload]
    choices, _, _ = collected(answer, stream)
    assert [(choice.text, choice.ended) for choice in choices] == [(PROMPT, "length"), ("x", "length")]
    for choice, request in zip(choices, front.dispatch.requests, strict=True):
        assert request.sampling.max_tokens == 0
        assert len(choice.scores) == len(request.prompt_tokens)


def test_a_prompt_that_fills_the_context_can_be_scored(front: Front, client: openai.OpenAI) -> None:
    front.instant(TEXT)
    options: Any = {"model": "tiny", "prompt": [5] * 512, "echo": True, "logprobs": 0}
    assert client.completions.create(**options, max_tokens=0).usage.total_tokens == 512  # type: ignore[union-attr]
    with pytest.raises(openai.BadRequestError):
        client.completions.create(**options)


def test_prompt_logprobs_as_other_servers_give_them(front: Front, client: openai.OpenAI) -> None:
    front.instant(TEXT)
    answer = client.completions.create(model="tiny", prompt=[[5, 6, 7], [8]], extra_body={"prompt_logprobs": 2})
    first, second = [choice.model_dump()["prompt_logprobs"] for choice in answer.choices]
    assert second == [None]
    assert first[0] is None
    expected = {"logprob": instant.PROMPT_LOGPROB, "rank": 1, "decoded_token": front.text([6])}
    assert first[1]["6"] == expected and len(first[1]) == 2
    chat = client.chat.completions.create(
        model="tiny", messages=[{"role": "user", "content": "x"}], extra_body={"prompt_logprobs": 0}
    )
    scores = chat.model_dump()["prompt_logprobs"]
    assert len(scores) == len(front.dispatch.requests[-1].prompt_tokens)
    assert all(entry["rank"] is None for position in scores[1:] for entry in position.values())
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model="tiny", prompt="x", stream=True, extra_body={"prompt_logprobs": 0})
    assert caught.value.param == "prompt_logprobs"


def test_an_answer_without_requested_scores_is_an_error(front: Front, client: openai.OpenAI) -> None:
    front.answer(TEXT)
    with pytest.raises(openai.InternalServerError):
        client.completions.create(model="tiny", prompt="x y", echo=True, logprobs=1)
