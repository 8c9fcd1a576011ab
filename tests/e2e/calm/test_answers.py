"""Test what clients get over two real workers: chat and completions, streamed or not, equal to one worker's answers."""

from __future__ import annotations

from typing import Any

import httpx
import openai
import pytest

from tests.e2e.gateway.http import completion, send
from tests.e2e.gateway.pair import Pair

CHAT = [{"role": "user", "content": "What is the capital of France?"}]
SEEDED = {"temperature": 1.0, "top_p": 0.9, "top_k": 50, "seed": 11}


def post_completion(http: httpx.Client, url: str, body: dict[str, Any], path: str) -> dict[str, Any]:
    answer = http.post(f"{url}/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    assert answer.headers["x-tandem-path"] == path
    found: dict[str, Any] = answer.json()
    return found


def test_the_openai_client_lists_chats_and_streams(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["tiny", "org/alias"]
    whole = client.chat.completions.with_raw_response.create(
        model="tiny", messages=CHAT, max_tokens=12, temperature=0  # type: ignore[arg-type]
    )  # fmt: skip
    assert whole.headers["x-tandem-path"] == "remote"
    reply = whole.parse()
    assert reply.choices[0].finish_reason == "length"
    assert reply.usage is not None and reply.usage.completion_tokens == 12
    streamed: Any = {"messages": CHAT, "stream": True, "stream_options": {"include_usage": True}}
    chunks: Any = [*client.chat.completions.create(model="tiny", max_tokens=12, temperature=0, **streamed)]
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == reply.choices[0].message.content
    assert chunks[-1].usage is not None and chunks[-1].usage.total_tokens == reply.usage.total_tokens


def test_the_openai_client_completes(client: openai.OpenAI) -> None:
    whole = client.completions.create(model="tiny", prompt="Grüße aus Köln", max_tokens=9, temperature=0)
    parts = client.completions.create(model="tiny", prompt="Grüße aus Köln", max_tokens=9, temperature=0, stream=True)
    assert "".join(part.choices[0].text for part in parts) == whole.choices[0].text


def test_the_openai_client_understands_a_refusal(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as unknown:
        client.completions.create(model="nobody", prompt="x")
    assert unknown.value.code == "model_not_found"


@pytest.mark.parametrize(
    ("length", "options"),
    [(1, {}), (16, SEEDED), (17, {}), (300, {"temperature": 0.7, "min_p": 0.02, "seed": 3})],
    ids=str,
)
def test_split_or_not_the_answer_is_the_same(
    calm: Pair, http: httpx.Client, length: int, options: dict[str, Any]
) -> None:
    """Each gateway also answers prompts that the other has left in a prefix cache, and new ones."""
    for salt in (500, 501):
        body = completion(length, salt, 24, logprobs=2, **options)
        order = [(calm.gateway.url, "remote"), (calm.whole.url, "local")]
        order = order if salt == 500 else order[::-1]
        first, second = [post_completion(http, url, body, path) for url, path in order]
        ours, theirs = first["choices"][0], second["choices"][0]
        assert ours["text"] == theirs["text"]
        assert ours["logprobs"]["tokens"] == theirs["logprobs"]["tokens"]
        assert ours["logprobs"]["token_logprobs"] == pytest.approx(theirs["logprobs"]["token_logprobs"], abs=1e-3)
        assert first["usage"]["completion_tokens"] == second["usage"]["completion_tokens"] == 24


def test_a_seed_repeats_and_another_differs(calm: Pair, http: httpx.Client) -> None:
    one, again, other = [
        post_completion(http, calm.gateway.url, completion(30, 510, 24, temperature=1.0, seed=seed), "remote")
        for seed in (5, 5, 6)
    ]
    assert one["choices"][0]["text"] == again["choices"][0]["text"] != other["choices"][0]["text"]


def test_the_first_token_may_be_the_last(calm: Pair, http: httpx.Client) -> None:
    """It comes from the prefill worker, and no KV is transferred."""
    reply = post_completion(http, calm.gateway.url, completion(40, 520, 1), "remote")
    assert reply["usage"]["completion_tokens"] == 1 and reply["choices"][0]["finish_reason"] == "length"
    calm.wait_idle()


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_ends_the_request_everywhere(calm: Pair, http: httpx.Client, *, stream: bool) -> None:
    whole = post_completion(http, calm.gateway.url, completion(40, 530, 60), "remote")["choices"][0]["text"]
    stop = whole[20:23]
    expected = whole[: whole.index(stop)]
    body = completion(40, 530, 4000, stop=[stop], stream=stream)
    if stream:
        text = send(calm.gateway.url, body).text()
    else:
        reply = post_completion(http, calm.gateway.url, body, "remote")
        assert reply["choices"][0]["finish_reason"] == "stop"
        text = reply["choices"][0]["text"]
    assert text == expected
    calm.wait_idle()


def test_a_request_id_is_echoed(calm: Pair, http: httpx.Client) -> None:
    answer = http.post(
        f"{calm.gateway.url}/v1/completions", json=completion(5, 540, 1), headers={"x-request-id": "mine-1"}
    )
    assert answer.headers["x-request-id"] == "mine-1"
