"""Add up the tokens of one response."""

from __future__ import annotations

from typing import NamedTuple

from tandem.gateway.output.text_stream import ChoiceEnd
from tandem.gateway.telemetry.token_timing import TokenTiming


class Usage(NamedTuple):
    """Numbers of tokens of one response, over all its prompts and choices.

    `num_prompt` counts each prompt once. `num_cached`: those prompt tokens whose KV a worker took from a cache; None
    while no worker has reported it.
    """

    num_prompt: int
    num_output: int
    num_cached: int | None


class UsageCounter:
    """Add up the prompt and output tokens of one response.

    A prompt counts once, whatever the number of its choices. A choice that has not ended counts with the tokens sent so
    far, as recorded by `pace`. `reasons`: why each ended choice finished, by choice index."""

    __slots__ = ("_beyond", "_cached", "_num_choices", "_num_prompt", "_pace", "reasons")

    def __init__(self, num_choices: int, pace: TokenTiming) -> None:
        """Create a counter for prompts that have `num_choices` choices each."""
        self._num_choices = num_choices
        self._pace = pace
        self._num_prompt = 0
        self._beyond = 0
        self._cached: dict[int, int] = {}
        self.reasons: dict[int, str] = {}
        """Finish reasons of the choices that have ended, by choice."""

    def admitted(self, num_prompt_tokens: int) -> None:
        """Add the tokens of one admitted prompt."""
        self._num_prompt += num_prompt_tokens

    def ended(self, ending: ChoiceEnd) -> None:
        """Replace the count of an ended choice by the exact one.

        The exact count includes tokens that produced no text and so were not sent.
        """
        self.reasons[ending.choice] = ending.reason.value
        self._beyond += ending.num_output_tokens - self._pace.num_of(ending.choice)
        if ending.num_cached_tokens is not None:
            self._cached[ending.choice // self._num_choices] = ending.num_cached_tokens

    def usage(self) -> Usage:
        """Return the numbers of prompt and output tokens up to now."""
        cached = sum(self._cached.values()) if self._cached else None
        return Usage(self._num_prompt, self._pace.num_tokens + self._beyond, cached)
