"""Test the real model behind a gateway with KV over the default transport: a sensible answer, a structured one, and a
tool call.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import jsonschema  # type: ignore[import-untyped]
import openai
import pytest

from tests.e2e.gateway.processes import Gateway, cluster

MODEL = "smollm2-135m-instruct"
CHAT = [{"role": "user", "content": "What is the capital of France?"}]

# `make test` has the exactness in tests/golden, and answers of a tiny model in e2e/calm.
pytestmark = [pytest.mark.nightly, pytest.mark.timeout(240)]


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory, redis_url: str) -> Iterator[Gateway]:
    directory = tmp_path_factory.mktemp("real")
    settings = ("--namespace", "real", "--kv-cache-memory", "128MiB")
    with cluster(directory, redis_url, MODEL, *settings) as running:
        running.worker("p", "prefill")
        running.worker("d", "decode")
        gateway = running.gateway("gateway")
        running.wait_serving()
        yield gateway
        assert running.complaints() == []


PERSON: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 40},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "languages": {"type": "array", "items": {"enum": ["French", "German", "English"]}, "maxItems": 3},
    },
    "required": ["name", "age", "languages"],
    "additionalProperties": False,
}
PLACE: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 30}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": "get_weather", "description": "Weather in a city.", "parameters": PLACE}},
    {"type": "function", "function": {"name": "get_time", "description": "Time in a city.", "parameters": PLACE}},
]


@pytest.fixture(scope="module")
def client(gateway: Gateway) -> Iterator[openai.OpenAI]:
    with (
        openai.DefaultHttpxClient(trust_env=False, timeout=60) as http,
        openai.OpenAI(base_url=f"{gateway.url}/v1", api_key="none", http_client=http, max_retries=0) as client,
    ):
        yield client


@pytest.mark.parametrize("temperature", [1.2, pytest.param(0.0, marks=pytest.mark.nightly)])
def test_an_object_of_a_schema(client: openai.OpenAI, temperature: float) -> None:
    options: dict[str, Any] = {
        "model": MODEL,
        "messages": [{"role": "user", "content": "Describe a person from Lyon as JSON."}],
        "response_format": {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON, "strict": True}},
        "max_tokens": 200,
        "temperature": temperature,
        "seed": 4,
    }
    whole = client.chat.completions.create(**options).choices[0]
    assert whole.finish_reason == "stop"
    jsonschema.validate(json.loads(whole.message.content or ""), PERSON)
    chunks = client.chat.completions.create(stream=True, **options)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.message.content


@pytest.mark.parametrize(
    ("choice", "parallel"),
    [
        ("required", True),
        pytest.param("required", False, marks=pytest.mark.nightly),
        ({"type": "function", "function": {"name": "get_time"}}, False),
        pytest.param({"type": "function", "function": {"name": "get_time"}}, True, marks=pytest.mark.nightly),
    ],
    ids=str,
)
def test_a_call_that_must_be_made(client: openai.OpenAI, choice: Any, parallel: bool) -> None:
    options: dict[str, Any] = {
        "model": MODEL,
        "messages": [{"role": "user", "content": "What is the weather in Paris?"}],
        "tools": TOOLS,
        "tool_choice": choice,
        "parallel_tool_calls": parallel,
        "max_tokens": 300,
        "temperature": 0,
    }
    whole = client.chat.completions.create(**options).choices[0]
    calls = [call.function for call in whole.message.tool_calls or []]
    assert whole.finish_reason == "tool_calls"
    assert whole.message.content is None
    assert 1 <= len(calls) <= (16 if parallel and choice == "required" else 1)
    for call in calls:
        assert call.name in ("get_weather", "get_time") if choice == "required" else call.name == "get_time"
        jsonschema.validate(json.loads(call.arguments), PLACE)
    names, arguments = list[str](), list[str]()
    chunks: Any = client.chat.completions.create(stream=True, **options)
    for chunk in chunks:
        for piece in chunk.choices[0].delta.tool_calls or [] if chunk.choices else []:
            if piece.function.name:
                names.append(piece.function.name)
                arguments.append("")
            arguments[piece.index] += piece.function.arguments or ""
    assert names == [call.name for call in calls]
    assert arguments == [call.arguments for call in calls]


def test_the_capital_of_france(client: openai.OpenAI) -> None:
    whole = client.chat.completions.with_raw_response.create(
        model=MODEL, messages=CHAT, max_tokens=24, temperature=0  # type: ignore[arg-type]
    )  # fmt: skip
    assert whole.headers["x-tandem-path"] == "remote"
    choice = whole.parse().choices[0]
    assert "Paris" in (choice.message.content or "")
    assert choice.finish_reason == "stop", "the model ends its answer itself"
    chunks = client.chat.completions.create(
        model=MODEL, messages=CHAT, max_tokens=24, temperature=0, stream=True  # type: ignore[arg-type]
    )  # fmt: skip
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == choice.message.content
