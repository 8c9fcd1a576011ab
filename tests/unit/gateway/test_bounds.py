"""Test the bounds of one request: both front ends refuse bodies that are too expensive, and name the field."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from typing import Any

import grpc
import httpx
import pytest

from tandem.core.grammar import MAX_PATTERN_PROPERTIES
from tandem.gateway.openai.prompt import MAX_CHOICES_OF_ALL
from tandem.gateway.openai.request_params import MAX_MESSAGES
from tandem.gateway.output.json_limits import MAX_DEPTH
from tandem.gateway.output.response_format import MAX_GBNF_CHARS
from tandem.gateway.serving import completions
from tandem.gateway.serving.completions import _INLINE_CHARS, MAX_TOKENIZED, CompletionService
from tandem.gateway.text.detokenizer import StopMatcher
from tandem.wire.gen import inference_pb2 as pb
from tests.unit.gateway.conftest import Front, grpc_refusal

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
SHORT = [{"role": "user", "content": "a"}]


@pytest.fixture
def sizes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return the list to which the number of characters of each tokenization is added."""
    sizes: list[int] = []
    encode = CompletionService._encode

    async def seen(self: CompletionService, work: Callable[[], Any], num_chars: int, *rest: Any) -> Any:
        sizes.append(num_chars)
        return await encode(self, work, num_chars, *rest)

    monkeypatch.setattr(CompletionService, "_encode", seen)
    return sizes


def refusal(http: httpx.Client, path: str, **body: Any) -> dict[str, Any]:
    answer = http.post(path, json={"model": "tiny", **body})
    assert answer.status_code == 400, answer.text[:1000]
    error: dict[str, Any] = answer.json()["error"]
    return error


def test_the_answers_of_all_prompts_together_are_bounded(front: Front, http: httpx.Client, stub: Any) -> None:
    opened = front.instant("P")
    error = refusal(http, TEXT, prompt=["a"] * 256, n=128)
    assert error["param"] == "n" and "32768 choices" in error["message"] and "at most 1024" in error["message"]
    request = pb.CompleteRequest(model="tiny", prompt=[pb.Prompt(text="a")] * 9, n=114)
    refused = grpc_refusal(stub.Complete, request)
    assert refused.code() is grpc.StatusCode.INVALID_ARGUMENT and "1026 choices" in refused.details()
    assert not front.dispatch.requests
    answer = http.post(TEXT, json={"model": "tiny", "prompt": ["a"] * 8, "n": 128, "max_tokens": 1})
    assert len(answer.json()["choices"]) == MAX_CHOICES_OF_ALL
    assert all(stream.closed.wait(20) for stream in opened) and len(opened) == 8


def test_a_conversation_may_have_as_many_messages_as_at_openai(http: httpx.Client) -> None:
    message = {"role": "user", "content": ""}
    error = refusal(http, CHAT, messages=[message] * (MAX_MESSAGES + 1))
    assert error["param"] == "messages" and str(MAX_MESSAGES) in error["message"]
    answer = http.post("/tokenize", json={"model": "tiny", "messages": [message] * MAX_MESSAGES})
    assert answer.status_code == 200 and answer.json()["count"] > MAX_MESSAGES


@pytest.mark.parametrize(
    "body",
    [
        {"messages": [{"role": "user", "content": ""}] * 500},
        {"messages": [{"role": "user", "content": "a", "reasoning_content": "b" * 3000}]},
        {"messages": SHORT, "chat_template_kwargs": {"x": ["b"] * 1000}},
        {
            "messages": [
                {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": {"x": "b" * 3000}}}]},
                {"role": "tool", "content": "a"},
            ]
        },
        {"messages": SHORT, "tools": [{"type": "function", "function": {"name": "f", "description": "b" * 3000}}]},
    ],
    ids=["messages", "thoughts", "variables", "calls", "tools"],
)
def test_every_kind_of_long_prompt_is_tokenized_off_the_event_loop(
    front: Front, http: httpx.Client, body: dict[str, Any], sizes: list[int]
) -> None:
    """The tokenization runs in a thread, so no other request waits for it."""
    front.answer("Paris")
    answer = http.post(CHAT, json={"model": "tiny", **body})
    assert answer.status_code in (200, 400), answer.text
    assert len(sizes) == 1 and sizes[0] > _INLINE_CHARS


def test_the_stop_strings_of_many_choices_are_prepared_once() -> None:
    stop = "ab" * 200
    first, second = StopMatcher([stop]), StopMatcher([stop])
    assert first._failures[0] is second._failures[0]


@pytest.mark.parametrize(
    ("prompt", "has"),
    [([5] * 300_000, "has 300000"), ([[5], [5] * 300_000], "has 300000"), ("7" * 900_000, "has more")],
    ids=["token ids", "lists of token ids", "text"],
)
def test_a_prompt_that_is_much_too_long_is_refused_early(http: httpx.Client, prompt: Any, has: str) -> None:
    error = refusal(http, TEXT, prompt=prompt)
    assert (error["code"], error["param"]) == ("context_length_exceeded", "prompt")
    assert f"the prompt alone {has}; shorten prompt" in error["message"]


@pytest.mark.parametrize("num_tokens", [MAX_TOKENIZED, 4 * MAX_TOKENIZED + 1], ids=["a little", "much"])
def test_a_text_with_too_many_tokens_is_not_tokenized(http: httpx.Client, num_tokens: int) -> None:
    error = refusal(http, "/tokenize", prompt="7" * num_tokens)  # with BOS one more
    assert (error["code"], error["param"]) == ("context_length_exceeded", "prompt")
    assert f"more than {MAX_TOKENIZED} tokens" in error["message"]


def test_as_many_tokens_as_are_allowed_are_tokenized_and_detokenized(http: httpx.Client) -> None:
    answer = http.post("/tokenize", json={"model": "tiny", "prompt": "7" * (MAX_TOKENIZED - 1)})
    assert answer.json()["count"] == MAX_TOKENIZED
    assert http.post("/detokenize", json={"model": "tiny", "tokens": [5] * MAX_TOKENIZED}).status_code == 200
    error = refusal(http, "/detokenize", tokens=[5] * (MAX_TOKENIZED + 1))
    assert error["param"] == "tokens" and str(MAX_TOKENIZED) in error["message"]


def test_many_prompts_of_one_body_are_tokenized_in_several_turns(
    front: Front, http: httpx.Client, sizes: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    front.instant("P")
    prompts = ["a" * 20, "b" * 30, "c" * 40, "d" * 10]
    monkeypatch.setattr(completions, "_BATCH_CHARS", 50)
    answer = http.post(TEXT, json={"model": "tiny", "prompt": prompts, "max_tokens": 1, "echo": True})
    assert sizes == [50, 50]
    assert [choice["text"][:-1] for choice in answer.json()["choices"]] == prompts


def test_a_repeated_field_of_a_large_body_is_refused_without_a_search(http: httpx.Client) -> None:
    body = b'{"model": "tiny", "prompt": "%s", "n": 1, "n": 1}' % (b"a" * 300_000)
    answer = http.post(TEXT, content=body)
    assert answer.status_code == 400 and "a field occurs more than once" in answer.text


def test_a_grammar_that_the_gateway_rewrites_is_bounded(http: httpx.Client) -> None:
    rules = 'root ::= "' + "a" * MAX_GBNF_CHARS + '"'
    error = refusal(http, CHAT, messages=SHORT, guided_grammar=rules)
    assert error["param"] == "guided_grammar" and str(MAX_GBNF_CHARS) in error["message"]


def test_both_front_ends_bound_schemas(http: httpx.Client, stub: Any) -> None:
    schema = {"patternProperties": {f"{i}": {} for i in range(MAX_PATTERN_PROPERTIES + 1)}}
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    error = refusal(http, CHAT, messages=SHORT, response_format=form)
    most = f"must have at most {MAX_PATTERN_PROPERTIES} patternProperties"
    assert error["param"] == "response_format.json_schema.schema" and most in error["message"]
    outputs = pb.StructuredOutputs(json=json.dumps(schema))
    request = pb.CompleteRequest(model="tiny", prompt=[pb.Prompt(text="a")], structured_outputs=outputs)
    refused = grpc_refusal(stub.Complete, request)
    assert refused.code() is grpc.StatusCode.INVALID_ARGUMENT and most in refused.details()


@pytest.mark.parametrize("encoding", ["gzip", "br", "zstd", "gzip, identity"])
def test_a_compressed_body_is_refused_by_name(http: httpx.Client, encoding: str) -> None:
    body = gzip.compress(json.dumps({"model": "tiny", "prompt": "a"}).encode())
    answer = http.post(TEXT, content=body, headers={"content-encoding": encoding})
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["param"]) == (400, "unsupported", "content-encoding")
    assert encoding in error["message"]


def test_a_body_with_identity_encoding_is_accepted(front: Front, http: httpx.Client) -> None:
    front.answer("Paris")
    body = json.dumps({"model": "tiny", "prompt": "a"}).encode()
    headers = {"content-encoding": "Identity", "content-type": "application/json; charset=utf-8"}
    assert http.post(TEXT, content=body, headers=headers).json()["choices"][0]["text"] == "Paris"


def test_another_charset_is_refused_by_name(http: httpx.Client) -> None:
    for charset in ("latin-1", "utf-16"):
        body = json.dumps({"model": "tiny", "prompt": "ä"}, ensure_ascii=False).encode(charset)
        answer = http.post(TEXT, content=body, headers={"content-type": f"application/json; charset={charset}"})
        assert answer.status_code == 400 and "UTF-8" in answer.json()["error"]["message"]


@pytest.mark.parametrize("depth", [100, 500, 900, 950, 990, 995, 1000, 1010, 5000])
def test_json_of_any_depth_within_a_message_is_no_internal_error(front: Front, stub: Any, depth: int) -> None:
    """Depths around the JSON parser's recursion limit must not surprise the code that serializes the value again."""
    front.answer("Paris")
    deep = '{"a":' * depth + "1" + "}" * depth
    request = pb.ChatRequest(
        model="tiny", messages=[pb.ChatMessage(role="user", content="a")], chat_template_kwargs_json=deep
    )
    try:
        stub.Chat(request)
    except grpc.RpcError as error:
        assert error.code() is grpc.StatusCode.INVALID_ARGUMENT, error.details()


@pytest.mark.parametrize("path", [CHAT, "/tokenize"])
def test_template_variables_may_be_nested_as_deeply_as_a_schema(front: Front, http: httpx.Client, path: str) -> None:
    for depth in (MAX_DEPTH, *range(970, 1000), MAX_DEPTH + 1):
        front.answer("Paris")
        variables = '{"a":' + "[" * (depth - 1) + "]" * (depth - 1) + "}"
        body = f'{{"model": "tiny", "messages": {json.dumps(SHORT)}, "chat_template_kwargs": {variables}}}'
        answer = http.post(path, content=body)
        assert answer.status_code == (200 if depth == MAX_DEPTH else 400), (depth, answer.text)


@pytest.mark.parametrize("path", ["/v1/models", "/health", "/ready", "/metrics", "/openapi.json"])
def test_head_is_get_without_the_body(http: httpx.Client, path: str) -> None:
    answer = http.head(path)
    assert answer.status_code == 200 and answer.content == b"" and int(answer.headers["content-length"]) > 0
    assert http.get(path).status_code == 200, "the connection is still in step"


@pytest.mark.parametrize("method", ["OPTIONS", "PUT", "DELETE", "PATCH", "TRACE"])
def test_a_wrong_method_is_refused_with_the_allowed_ones(http: httpx.Client, method: str) -> None:
    answer = http.request(method, CHAT)
    assert answer.status_code == 405 and answer.headers["allow"] == "POST"
    answer = http.request("PATCH", "/v1/models/tiny")
    assert answer.status_code == 405 and answer.headers["allow"] == "GET, HEAD"


@pytest.mark.parametrize(
    "path", ["/v1/chat/completions/", "/v1/models/", "//v1/models", "/V1/models", "/v1/models/%0d%0ax", "/health%0a"]
)
def test_paths_are_not_normalized(http: httpx.Client, path: str) -> None:
    answer = http.get(path)
    assert answer.status_code == 404 and answer.json()["error"]["code"] in ("not_found", "model_not_found")
