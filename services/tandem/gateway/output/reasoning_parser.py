"""Parts what a model thinks from what it answers, in one choice's text as it comes; never drops a word of either."""

from __future__ import annotations

from typing import Literal

OPENING, CLOSING = "<think>", "</think>"
ReasoningParserName = Literal["auto", "think", "none"]
_BLANKS = " \t\r\n"


class ReasoningParser:
    """`is_open`: the prompt has opened the thought already. Otherwise one is only where the text begins with it; blanks
    around marks belong to nobody. A thought that is never closed is all there is."""

    __slots__ = ("_held", "_place")

    def __init__(self, *, is_open: bool) -> None:
        self._place: Literal["start", "thought start", "thought", "answer start", "answer"] = (
            "thought start" if is_open else "start"
        )
        self._held = ""

    def push(self, text: str) -> tuple[str, str]:
        """What of the text that is settled now is thought, and what is answer."""
        self._held += text
        thought = ""
        if self._place == "start":
            self._find_opening()
        if self._place == "thought start":
            self._held = self._held.lstrip(_BLANKS)
            self._place = "thought" if self._held else self._place
        if self._place == "thought":
            thought = self._take_thought()
        if self._place == "answer start":
            self._held = self._held.lstrip(_BLANKS)
            self._place = "answer" if self._held else self._place
        answer = self._release() if self._place == "answer" else ""
        return thought, answer

    def finish(self) -> tuple[str, str]:
        """No more text will come."""
        place, rest = self._place, self._release()
        if place in ("thought", "thought start", "answer start"):
            return rest.rstrip(_BLANKS), ""
        return "", rest

    def _find_opening(self) -> None:
        begun = self._held.lstrip(_BLANKS)
        if begun.startswith(OPENING):
            self._held = begun[len(OPENING) :]
            self._place = "thought start"
        elif not OPENING.startswith(begun):
            self._place = "answer"

    def _take_thought(self) -> str:
        thought, mark, rest = self._held.partition(CLOSING)
        if mark:
            self._held = rest
            self._place = "answer start"
            return thought.rstrip(_BLANKS)
        held = max(size for size in range(len(CLOSING)) if thought.endswith(CLOSING[:size]))
        settled = thought[: len(thought) - held].rstrip(_BLANKS)
        self._held = thought[len(settled) :]
        return settled

    def _release(self) -> str:
        held, self._held = self._held, ""
        return held
