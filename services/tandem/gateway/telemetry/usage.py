"""Adds up the tokens of one answer; never decides what they cost."""

from __future__ import annotations

from typing import NamedTuple

from tandem.gateway.output.text_stream import ChoiceEnd
from tandem.gateway.telemetry.token_timing import TokenTiming


class Usage(NamedTuple):
    """Tokens of all prompts and choices. `num_cached`: of the prompts' tokens, those that came out of a cache; None
    while nobody has said."""

    num_prompt: int
    num_output: int
    num_cached: int | None


class UsageCounter:
    """A prompt counts once, whatever the number of its choices. Tokens of choices that go on are those that `pace` saw
    leave."""

    __slots__ = ("_beyond", "_cached", "_num_choices", "_num_prompt", "_pace", "reasons")

    def __init__(self, num_choices: int, pace: TokenTiming) -> None:
        """`num_choices` of each prompt."""
        self._num_choices = num_choices
        self._pace = pace
        self._num_prompt = 0
        self._beyond = 0
        self._cached: dict[int, int] = {}
        self.reasons: dict[int, str] = {}
        """Why each choice ended that has."""

    def admitted(self, num_prompt_tokens: int) -> None:
        self._num_prompt += num_prompt_tokens

    def ended(self, ending: ChoiceEnd) -> None:
        """It knows exactly what was seen to leave but for tokens that are no text."""
        self.reasons[ending.choice] = ending.reason.value
        self._beyond += ending.num_output_tokens - self._pace.num_of(ending.choice)
        if ending.num_cached_tokens is not None:
            self._cached[ending.choice // self._num_choices] = ending.num_cached_tokens

    def usage(self) -> Usage:
        cached = sum(self._cached.values()) if self._cached else None
        return Usage(self._num_prompt, self._pace.num_tokens + self._beyond, cached)
