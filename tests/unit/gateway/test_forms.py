"""Test tool calls and reasoning in chunks and whole bodies, read by the openai client's own types."""

from __future__ import annotations

import json
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from tandem.core.events import FinishReason, SampledToken
from tandem.gateway.http.openai_response import ChatFormatter
from tandem.gateway.http.openai_schema import TandemFacts
from tandem.gateway.openai.request_schema import StreamOptions
from tandem.gateway.output.text_stream import ChoiceEnd, Delta, ToolCallDelta
from tandem.gateway.telemetry.usage import Usage
from tandem.gateway.text.text_model import TextModel

USAGE = Usage(3, 4, None)
CALLS = [
    Delta("", 0, reasoning="I should "),
    Delta("", 0, reasoning="look."),
    Delta("", 0, tool_calls=(ToolCallDelta(0, id="call_0", name="weather"),)),
    Delta("", 0, tool_calls=(ToolCallDelta(0, '{"city":'),)),
    Delta("", 0, tool_calls=(ToolCallDelta(0, '"Köln"}'), ToolCallDelta(1, "{}", "call_1", "time"))),
]


def uncounted_usage() -> Usage:
    """Fail the test if the usage is computed, because the client did not request it."""
    raise AssertionError


@pytest.fixture
def form(make_text: Callable[..., TextModel]) -> ChatFormatter:
    return formatter(make_text())


def formatter(
    text: TextModel,
    model: str = "m",
    usage: Callable[[], Usage] = uncounted_usage,
    options: StreamOptions | None = None,
) -> ChatFormatter:
    """Make the formatter of a request without other options."""
    body = SimpleNamespace(return_token_ids=None, service_tier=None, stream_options=options)
    params = SimpleNamespace(body=body, logprobs=None)
    served = SimpleNamespace(text=text)
    answer: Any = SimpleNamespace(id="x", model=model, params=params, served=served, usage=usage)
    return ChatFormatter(answer, 1)


def test_a_whole_message_with_calls_has_no_content(make_text: Callable[..., TextModel]) -> None:
    form = formatter(make_text(), usage=lambda: USAGE)
    body = form.body([*CALLS, ChoiceEnd(FinishReason.STOP, 4, None)], TandemFacts("local", 1))
    (choice,) = ChatCompletion.model_validate_json(body).choices
    assert choice.message.content is None
    assert (choice.message.model_extra or {})["reasoning_content"] == "I should look."
    calls: Any = choice.message.tool_calls
    assert [(call.id, call.type, call.function.name, json.loads(call.function.arguments)) for call in calls] == [
        ("call_0", "function", "weather", {"city": "Köln"}),
        ("call_1", "function", "time", {}),
    ]


def test_text_before_calls_stays_content(make_text: Callable[..., TextModel]) -> None:
    form = formatter(make_text(), usage=lambda: USAGE)
    parts = [Delta("Let me see.", 0), *CALLS, ChoiceEnd(FinishReason.STOP, 4, None)]
    body = form.body(parts, TandemFacts("local", 1))
    message = ChatCompletion.model_validate_json(body).choices[0].message
    assert message.content == "Let me see." and message.tool_calls


def test_pieces_of_calls_and_thoughts_stream_one_by_one(form: ChatFormatter) -> None:
    chunks = [ChatCompletionChunk.model_validate_json(chunk) for delta in CALLS for chunk in form.chunk(delta)]
    deltas = [chunk.choices[0].delta for chunk in chunks]
    assert [delta.content for delta in deltas] == [None] * 5
    assert [(delta.model_extra or {}).get("reasoning_content") for delta in deltas[:2]] == ["I should ", "look."]
    pieces = [piece for delta in deltas for piece in delta.tool_calls or []]
    assert [(piece.index, piece.id) for piece in pieces] == [(0, "call_0"), (0, None), (0, None), (1, "call_1")]
    assert [piece.function.name for piece in pieces if piece.function] == ["weather", None, None, "time"]
    assert "".join(p.function.arguments or "" for p in pieces if p.function and not p.index) == '{"city":"Köln"}'


@pytest.mark.parametrize("model", ["m", '"', "\0", '"content":"\0"'])
@pytest.mark.parametrize("include_usage", [False, True])
def test_every_text_survives_a_chunk_with_nothing_else(
    make_text: Callable[..., TextModel], model: str, include_usage: bool
) -> None:
    form = formatter(make_text(), model, options=StreamOptions(include_usage))
    expected = {"id": "x", "created": 1, "model": model, "object": "chat.completion.chunk"}
    expected |= {"usage": None} if include_usage else {}
    for text in (" river", '"', "\\", "\0", "\n\n", "Köln \u2028 🏞", "data: [DONE]"):
        for choice in (0, 11, 0):
            (chunk,) = form.chunk(Delta(text, 7, SampledToken(3), choice))
            assert b"\n" not in chunk
            shown = {"index": choice, "delta": {"content": text}, "logprobs": None, "finish_reason": None}
            assert json.loads(chunk) == expected | {"choices": [shown]}


def test_continuous_usage_is_computed_for_each_chunk(make_text: Callable[..., TextModel]) -> None:
    counts, usages = [], iter([Usage(3, 1, None), Usage(3, 2, None)])
    form = formatter(make_text(), usage=lambda: next(usages), options=StreamOptions(True, True))
    for _ in range(2):
        (chunk,) = form.chunk(Delta(" river", 0, SampledToken(3)))
        counts.append(json.loads(chunk)["usage"]["completion_tokens"])
    assert counts == [1, 2]


def test_an_empty_delta_makes_no_chunk(form: ChatFormatter) -> None:
    assert form.chunk(Delta("", 0)) == []
