"""Test that interleaved choices have a parser each, and that held-back text is emitted before a choice ends."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing

import pytest

from tandem.core.events import FinishReason, SampledToken
from tandem.gateway.output.output_parser import OutputParser, parse_stream
from tandem.gateway.output.reasoning_parser import ReasoningParser
from tandem.gateway.output.text_stream import ChoiceEnd, Delta
from tandem.gateway.output.tool_call_parser import ToolCallParser
from tandem.gateway.output.tool_formats import HERMES

CALL = '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'


def speech() -> OutputParser:
    return OutputParser(ReasoningParser(is_open=False), ToolCallParser(HERMES, {"f"}, lambda: "id", is_eager=False))


async def interleaved(closed: list[bool]) -> AsyncGenerator[Delta | ChoiceEnd | str, None]:
    """Yield two choices, a character each in turn, the first with reasoning and a call, after another item."""
    texts = (f"<think>Hm.</think>So: {CALL}", "Plain <tool_call")
    try:
        yield "something else"
        for place in range(max(map(len, texts))):
            for choice, text in enumerate(texts):
                if place < len(text):
                    yield Delta(text[place], place, SampledToken(place), choice)
        yield ChoiceEnd(FinishReason.STOP, 5, None, 0)
        yield ChoiceEnd(FinishReason.LENGTH, 5, None, 1)
    finally:
        closed.append(True)


async def test_interleaved_choices() -> None:
    closed: list[bool] = []
    async with aclosing(parse_stream(interleaved(closed), [speech(), speech()])) as parts:
        got = [part async for part in parts]
    assert closed == [True]
    assert got[0] == "something else"
    deltas = [[part for part in got if isinstance(part, Delta) and part.choice == choice] for choice in range(2)]
    assert ["".join(delta.text for delta in each) for each in deltas] == ["So:", "Plain <tool_call"]
    assert ["".join(delta.reasoning for delta in each) for each in deltas] == ["Hm.", ""]
    calls = [call for delta in deltas[0] for call in delta.tool_calls]
    assert [(call.name, call.arguments) for call in calls] == [("f", '{"a": 1}')]
    assert [part.reason for part in got if isinstance(part, ChoiceEnd)] == [
        FinishReason.TOOL_CALLS,
        FinishReason.LENGTH,
    ]
    for each in deltas:
        tokens = [delta.token.id for delta in each if delta.token is not None]
        assert tokens == list(range(len(tokens))), "each token once, in order, with its offset"
        assert [delta.offset for delta in each] == list(range(len(each)))


@pytest.mark.parametrize("num_read", [0, 1, 5])
async def test_leaving_early_closes_what_is_read(num_read: int) -> None:
    closed: list[bool] = []
    async with aclosing(parse_stream(interleaved(closed), [speech(), speech()])) as parts:
        for _ in range(num_read):
            await anext(parts)
    assert closed == ([True] if num_read else []), "a generator that never began has nothing to close"
