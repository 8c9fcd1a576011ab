"""Owns what one choice's text says: thoughts, answer and calls; never knows how a front writes them."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import TypeVar

from tandem.core.events import FinishReason
from tandem.gateway.output.reasoning_parser import ReasoningParser
from tandem.gateway.output.text_stream import ChoiceEnd, Delta
from tandem.gateway.output.tool_call_parser import ToolCallParser

Other = TypeVar("Other")


class OutputParser:
    """A reader of thoughts, then one of calls in what remains; either may be missing."""

    __slots__ = ("_calls", "_reasoning")

    def __init__(self, reasoning: ReasoningParser | None, calls: ToolCallParser | None) -> None:
        self._reasoning = reasoning
        self._calls = calls

    def hear(self, delta: Delta) -> Delta:
        """The same token, its text told apart."""
        thought, text = ("", delta.text) if self._reasoning is None else self._reasoning.push(delta.text)
        return self._told(delta, thought, self._calls.push(text) if self._calls is not None else text)

    def finish(self, delta: Delta) -> Delta:
        """`delta`, which is empty, with all that was held back."""
        thought, text = ("", "") if self._reasoning is None else self._reasoning.finish()
        said = text
        if self._calls is not None:
            said = self._calls.push(text) + self._calls.finish()
        return self._told(delta, thought, said)

    def end(self, ending: ChoiceEnd) -> ChoiceEnd:
        """A choice that made calls and stopped by itself, stopped for them."""
        is_for_calls = self._calls is not None and self._calls.num_calls > 0 and ending.reason is FinishReason.STOP
        return replace(ending, reason=FinishReason.TOOL_CALLS) if is_for_calls else ending

    def _told(self, delta: Delta, thought: str, said: str) -> Delta:
        calls = self._calls.take() if self._calls is not None else ()
        if said == delta.text and not thought and not calls:
            return delta
        return delta._replace(text=said, reasoning=thought, tool_calls=calls)


async def parse_stream(
    parts: AsyncGenerator[Delta | ChoiceEnd | Other, None], speeches: Sequence[OutputParser]
) -> AsyncGenerator[Delta | ChoiceEnd | Other, None]:
    """The parts of all choices with their texts told apart, one speech for each choice; others as they are. What was
    held back comes before a choice's Ending. To be closed by `aclose`, which closes `parts`."""
    ends = [0] * len(speeches)
    async with aclosing(parts):
        async for part in parts:
            if isinstance(part, Delta):
                ends[part.choice] = part.offset + len(part.text)
                yield speeches[part.choice].hear(part)
            elif isinstance(part, ChoiceEnd):
                speech = speeches[part.choice]
                rest = speech.finish(Delta("", ends[part.choice], choice=part.choice))
                if rest.text or rest.reasoning or rest.tool_calls:
                    yield rest
                yield speech.end(part)
            else:
                yield part
