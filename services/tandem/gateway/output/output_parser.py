"""Split the text of one choice into reasoning, content and tool calls, independent of the API protocol."""

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
    """Chain the reasoning parser and the tool call parser of one choice.

    The tool call parser reads what the reasoning parser leaves as content. None for either means that the model, or the
    request, has no such part."""

    __slots__ = ("_calls", "_reasoning")

    def __init__(self, reasoning: ReasoningParser | None, calls: ToolCallParser | None) -> None:
        self._reasoning = reasoning
        self._calls = calls

    def push(self, delta: Delta) -> Delta:
        """Return the delta of the same token, with its text split into reasoning, content and tool calls."""
        reasoning, text = ("", delta.text) if self._reasoning is None else self._reasoning.push(delta.text)
        return self._split(delta, reasoning, self._calls.push(text) if self._calls is not None else text)

    def finish(self, delta: Delta) -> Delta:
        """Return `delta`, which has no text, filled with all text that the parsers still hold back."""
        reasoning, text = ("", "") if self._reasoning is None else self._reasoning.finish()
        content = text
        if self._calls is not None:
            content = self._calls.push(text) + self._calls.finish()
        return self._split(delta, reasoning, content)

    def end(self, ending: ChoiceEnd) -> ChoiceEnd:
        """Return `ending` with the finish reason TOOL_CALLS where the choice called tools and stopped by itself."""
        is_for_calls = self._calls is not None and self._calls.num_calls > 0 and ending.reason is FinishReason.STOP
        return replace(ending, reason=FinishReason.TOOL_CALLS) if is_for_calls else ending

    def _split(self, delta: Delta, reasoning: str, content: str) -> Delta:
        calls = self._calls.take() if self._calls is not None else ()
        if content == delta.text and not reasoning and not calls:
            return delta
        return delta._replace(text=content, reasoning=reasoning, tool_calls=calls)


async def parse_stream(
    parts: AsyncGenerator[Delta | ChoiceEnd | Other, None], parsers: Sequence[OutputParser]
) -> AsyncGenerator[Delta | ChoiceEnd | Other, None]:
    """Run the deltas of each choice through its parser; `parsers` has one per choice. Other parts pass unchanged.

    Held-back text comes as one more Delta before the choice's ChoiceEnd. The caller closes the generator with `aclose`,
    which closes `parts`."""
    ends = [0] * len(parsers)
    async with aclosing(parts):
        async for part in parts:
            if isinstance(part, Delta):
                ends[part.choice] = part.offset + len(part.text)
                yield parsers[part.choice].push(part)
            elif isinstance(part, ChoiceEnd):
                parser = parsers[part.choice]
                rest = parser.finish(Delta("", ends[part.choice], choice=part.choice))
                if rest.text or rest.reasoning or rest.tool_calls:
                    yield rest
                yield parser.end(part)
            else:
                yield part
