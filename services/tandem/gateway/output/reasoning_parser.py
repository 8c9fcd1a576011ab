"""Separate a model's reasoning (`<think>...</think>`) from its answer in the streamed text of one choice."""

from __future__ import annotations

from typing import Literal

from tandem.gateway.output.text_stream import Delta

OPENING, CLOSING = "<think>", "</think>"
ReasoningParserName = Literal["auto", "think", "none"]
_BLANKS = " \t\r\n"


class ReasoningParser:
    """Split the streamed text of one choice at the marks `<think>` and `</think>` into reasoning and answer.

    `is_open`: the prompt ends with `<think>`, so the output begins inside the reasoning. Otherwise the output has
    reasoning only where it begins with `<think>`. Blanks around the marks are dropped. Reasoning without `</think>`
    extends to the end of the output."""

    __slots__ = ("_held", "_state")

    def __init__(self, *, is_open: bool) -> None:
        self._state: Literal["start", "reasoning start", "reasoning", "answer start", "answer"] = (
            "reasoning start" if is_open else "start"
        )
        self._held = ""

    def split(self, delta: Delta, is_last: bool) -> Delta:
        """Return the delta with its text split into reasoning and answer; this method is a `DeltaTransform`.

        `is_last`: the delta is the choice's last one, and also gets the text held back.
        """
        reasoning, text = self.push(delta.text)
        if is_last:
            last_reasoning, last_text = self.finish()
            reasoning += last_reasoning
            text += last_text
        if text == delta.text and not reasoning:
            return delta
        return delta._replace(text=text, reasoning=reasoning)

    def push(self, text: str) -> tuple[str, str]:
        """Add text; return (reasoning, answer), the parts of the text so far that later text cannot change.

        The rest, such as a possible beginning of a mark, is held back.
        """
        self._held += text
        reasoning = ""
        if self._state == "start":
            self._find_opening()
        if self._state == "reasoning start":
            self._held = self._held.lstrip(_BLANKS)
            self._state = "reasoning" if self._held else self._state
        if self._state == "reasoning":
            reasoning = self._take_reasoning()
        if self._state == "answer start":
            self._held = self._held.lstrip(_BLANKS)
            self._state = "answer" if self._held else self._state
        answer = self._release() if self._state == "answer" else ""
        return reasoning, answer

    def finish(self) -> tuple[str, str]:
        """End the output; return (reasoning, answer) of the text that was held back."""
        state, rest = self._state, self._release()
        if state in ("reasoning", "reasoning start", "answer start"):
            return rest.rstrip(_BLANKS), ""
        return "", rest

    def _find_opening(self) -> None:
        stripped = self._held.lstrip(_BLANKS)
        if stripped.startswith(OPENING):
            self._held = stripped[len(OPENING) :]
            self._state = "reasoning start"
        elif not OPENING.startswith(stripped):
            self._state = "answer"

    def _take_reasoning(self) -> str:
        reasoning, mark, rest = self._held.partition(CLOSING)
        if mark:
            self._held = rest
            self._state = "answer start"
            return reasoning.rstrip(_BLANKS)
        held = max(size for size in range(len(CLOSING)) if reasoning.endswith(CLOSING[:size]))
        settled = reasoning[: len(reasoning) - held].rstrip(_BLANKS)
        self._held = reasoning[len(settled) :]
        return settled

    def _release(self) -> str:
        held, self._held = self._held, ""
        return held
