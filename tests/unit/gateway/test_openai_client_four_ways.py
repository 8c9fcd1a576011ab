"""Test every feature through the openai client, sync and async, whole and streamed: the dispatch gets the same
requests and the client the same objects.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import openai
import pytest

from tests.unit.gateway.openai_replies import CollectedChoice, collected
from tests.unit.gateway.parity import comparable

pytestmark = pytest.mark.slow

Front = Any  # the fixtures' class lives in conftest
USER_MESSAGE = {"role": "user", "content": "What is the capital of France?"}
PARTS = [{"type": "text", "text": "What is the capital"}, {"type": "text", "text": " of France?"}]
TEXT = "Paris 你好 😀."
CALL = '<tool_call>\n{"name": "now", "arguments": {"zone": "CET"}}\n</tool_call>'
TOOL = {
    "type": "function",
    "function": {"name": "now", "parameters": {"type": "object", "properties": {"zone": {"type": "string"}}}},
}
PERSON = {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}
RETURNED = {
    "role": "assistant",
    "tool_calls": [{"id": "call_1", "type": "function", "function": {"name": "now", "arguments": '{"zone": "CET"}'}}],
}
ANSWERED = {"role": "tool", "tool_call_id": "call_1", "content": "noon"}

CHAT: dict[str, dict[str, Any]] = {
    "plain": {},
    "sampling": {"temperature": 0.5, "top_p": 0.9, "presence_penalty": 0.5, "frequency_penalty": -0.5},
    "vLLM's": {"extra_body": {"top_k": 4, "min_p": 0.1, "repetition_penalty": 1.1, "min_tokens": 1, "priority": -1}},
    "choices": {"n": 3},
    "length": {"max_completion_tokens": 2},
    "stop": {"stop": ["好", "never"]},
    "stop shown": {"stop": "好", "extra_body": {"include_stop_str_in_output": True}},
    "logprobs": {"logprobs": True, "top_logprobs": 2},
    "bias": {"logit_bias": {"30": 5}},
    "tier": {"service_tier": "flex", "user": "somebody", "metadata": {"a": "b"}},
    "no special tokens hidden": {"extra_body": {"skip_special_tokens": False, "ignore_eos": True}},
    "json": {"response_format": {"type": "json_object"}},
    "schema": {"response_format": {"type": "json_schema", "json_schema": {"name": "p", "schema": PERSON}}},
    "regex": {"extra_body": {"structured_outputs": {"regex": "[a-z]+"}}},
    "parts": {"messages": [{"role": "developer", "content": "Be brief."}, {"role": "user", "content": PARTS}]},
    "continued": {
        "messages": [USER_MESSAGE, {"role": "assistant", "content": "It is"}],
        "extra_body": {"continue_final_message": True, "add_generation_prompt": False},
    },
    "tools": {"tools": [TOOL]},
    "no tools": {"tools": [TOOL], "tool_choice": "none"},
    "a tool": {"tools": [TOOL], "tool_choice": "required", "n": 2},
    "this tool": {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "now"}}},
    "one call": {"tools": [TOOL], "parallel_tool_calls": False},
    "second turn": {"messages": [USER_MESSAGE, RETURNED, ANSWERED], "tools": [TOOL]},
}
CALLING = {"tools", "a tool", "this tool", "one call"}
COMPLETION: dict[str, dict[str, Any]] = {
    "text": {"prompt": "x"},
    "texts": {"prompt": ["x", "yes"], "n": 2},
    "ids": {"prompt": [5, 6, 7]},
    "lists of ids": {"prompt": [[5, 6], [7]]},
    "echo": {"prompt": "x", "echo": True},
    "echo with scores": {"prompt": [5, 6, 7], "echo": True, "logprobs": 2},
    "only scores": {"prompt": "What is it?", "echo": True, "logprobs": 1, "max_tokens": 0},
    "stop": {"prompt": "x", "stop": "好"},
    "guided": {"prompt": "x", "extra_body": {"guided_choice": ["yes", "no"]}},
    "best of n": {"prompt": "x", "n": 2, "best_of": 2},
}


@pytest.fixture
def call_all_variants(front: Front, client: openai.OpenAI) -> Any:
    # A template without a place for tools lists them in words, which are many tokens for this tokenizer.
    front.dispatch.served = [replace(front.dispatch.served[0], max_model_len=8192)]

    async def call_async(kind: str, stream: bool, body: dict[str, Any]) -> Any:
        http = openai.DefaultAsyncHttpxClient(trust_env=False, timeout=20, verify=False)
        async with openai.AsyncOpenAI(base_url=client.base_url, api_key="x", max_retries=0, http_client=http) as other:
            answer = await (other.chat.completions if kind == "chat" else other.completions).create(**body)
            return [chunk async for chunk in answer] if stream else answer

    def call_variants(kind: str, **body: Any) -> list[Any]:
        replies = []
        for stream in (False, True):
            full = {"model": "tiny", "seed": 7, **body}
            full |= {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
            answer = (client.chat.completions if kind == "chat" else client.completions).create(**full)
            replies.append(collected(answer, stream))
            replies.append(collected(asyncio.run(call_async(kind, stream, full)), stream))
        return replies

    return call_variants


def same(front: Front, answers: list[Any]) -> tuple[list[CollectedChoice], dict[str, Any]]:
    """Return what all four variants received after checking that they agree and sent equal requests."""
    requests = [comparable(request, True) for request in front.dispatch.requests]
    each = len(requests) // 4
    assert requests == requests[:each] * 4 and each > 0
    assert answers == answers[:1] * 4
    choices, usage, _ = answers[0]
    return choices, usage


@pytest.mark.parametrize("name", CHAT)
def test_chat(front: Front, call_all_variants: Any, name: str) -> None:
    front.instant(CALL if name in CALLING else TEXT)
    choices, usage = same(front, call_all_variants("chat", **{"messages": [USER_MESSAGE], **CHAT[name]}))
    assert len(choices) == CHAT[name].get("n", 1)
    assert all(choice.ended for choice in choices) and usage["completion_tokens"] > 0
    if name in CALLING:
        assert choices[0].calls == [["now", '{"zone": "CET"}']]
        assert choices[0].text == "" and choices[0].ended == "tool_calls"
    elif name not in ("length", "stop", "stop shown", "no special tokens hidden"):
        assert choices[0].text == TEXT and choices[0].ended == "stop"
    assert bool(choices[0].scores) is (name == "logprobs")


@pytest.mark.parametrize("name", COMPLETION)
def test_completions(front: Front, call_all_variants: Any, name: str) -> None:
    front.instant()
    options = COMPLETION[name]
    choices, usage = same(front, call_all_variants("completion", **options))
    num_prompts = len(options["prompt"]) if name in ("texts", "lists of ids") else 1
    assert len(choices) == num_prompts * options.get("n", 1)
    assert all(choice.ended for choice in choices)
    assert (usage["completion_tokens"] == 0) is (name == "only scores")
    if "logprobs" in options:
        assert choices[0].scores[0][1] is None and all(score is not None for _, score, *_ in choices[0].scores[1:])


@pytest.mark.parametrize(
    ("path", "message"),
    [("embeddings", "embeddings"), ("responses", "Responses"), ("batches", "Batch"), ("load_lora_adapter", "LoRA")],
)
def test_an_unsupported_route_raises_not_found_with_the_reason(
    front: Front, client: openai.OpenAI, path: str, message: str
) -> None:
    with pytest.raises(openai.NotFoundError, match=message) as caught:
        client.post(f"/{path}", body={"model": "tiny"}, cast_to=object)
    assert caught.value.code == "not_found" and not front.dispatch.requests
