"""Choices that come interleaved are told apart each by its own reader; what was held back comes before its end."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing

import pytest

from tandem.core.events import FinishReason, SampledToken
from tandem.gateway.completion import Delta, Ending
from tandem.gateway.reasoning import Reasoning
from tandem.gateway.speech import Speech, heard
from tandem.gateway.tool_calls import ToolCalls
from tandem.gateway.tool_family import HERMES

CALL = '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'


def speech() -> Speech:
    return Speech(Reasoning(is_open=False), ToolCalls(HERMES, {"f"}, lambda: "id", is_eager=False))


async def interleaved(closed: list[bool]) -> AsyncGenerator[Delta | Ending | str, None]:
    """Two choices, a character each in turn, the first with thoughts and a call; something else first."""
    texts = (f"<think>Hm.</think>So: {CALL}", "Plain <tool_call")
    try:
        yield "something else"
        for place in range(max(map(len, texts))):
            for choice, text in enumerate(texts):
                if place < len(text):
                    yield Delta(text[place], place, SampledToken(place), choice)
        yield Ending(FinishReason.STOP, 5, None, 0)
        yield Ending(FinishReason.LENGTH, 5, None, 1)
    finally:
        closed.append(True)


async def test_interleaved_choices() -> None:
    closed: list[bool] = []
    async with aclosing(heard(interleaved(closed), [speech(), speech()])) as parts:
        got = [part async for part in parts]
    assert closed == [True]
    assert got[0] == "something else"
    deltas = [[part for part in got if isinstance(part, Delta) and part.choice == choice] for choice in range(2)]
    assert ["".join(delta.text for delta in each) for each in deltas] == ["So:", "Plain <tool_call"]
    assert ["".join(delta.reasoning for delta in each) for each in deltas] == ["Hm.", ""]
    calls = [call for delta in deltas[0] for call in delta.tool_calls]
    assert [(call.name, call.arguments) for call in calls] == [("f", '{"a": 1}')]
    assert [part.reason for part in got if isinstance(part, Ending)] == [FinishReason.TOOL_CALLS, FinishReason.LENGTH]
    for each in deltas:
        tokens = [delta.token.id for delta in each if delta.token is not None]
        assert tokens == list(range(len(tokens))), "each token once, in order, with its offset"
        assert [delta.offset for delta in each] == list(range(len(each)))


@pytest.mark.parametrize("num_read", [0, 1, 5])
async def test_leaving_early_closes_what_is_read(num_read: int) -> None:
    closed: list[bool] = []
    async with aclosing(heard(interleaved(closed), [speech(), speech()])) as parts:
        for _ in range(num_read):
            await anext(parts)
    assert closed == ([True] if num_read else []), "a generator that never began has nothing to close"
