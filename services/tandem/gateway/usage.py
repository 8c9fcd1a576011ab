"""Adds up the tokens of one answer; never decides what they cost."""

from __future__ import annotations

from collections import defaultdict
from typing import NamedTuple

from tandem.gateway.completion import Delta, Ending


class Usage(NamedTuple):
    """Tokens of all prompts and choices. `num_cached`: of the prompts' tokens, those that came out of a cache; None
    while nobody has said."""

    num_prompt: int
    num_output: int
    num_cached: int | None


class Tally:
    """Counts parts as they come. A prompt counts once, whatever the number of its choices."""

    __slots__ = ("_cached", "_num_choices", "_num_prompt", "_output", "reasons")

    def __init__(self, num_choices: int) -> None:
        """`num_choices` of each prompt."""
        self._num_choices = num_choices
        self._num_prompt = 0
        self._output: defaultdict[int, int] = defaultdict(int)
        self._cached: dict[int, int] = {}
        self.reasons: dict[int, str] = {}
        """Why each choice ended that has."""

    def admitted(self, num_prompt_tokens: int) -> None:
        self._num_prompt += num_prompt_tokens

    def take(self, part: Delta | Ending) -> bool:
        """Whether it is a token; text that was held back is none. An Ending knows exactly what its deltas only add up
        to."""
        if isinstance(part, Delta):
            if part.token is None:
                return False
            self._output[part.choice] += 1
            return True
        self.reasons[part.choice] = part.reason.value
        self._output[part.choice] = part.num_output_tokens
        if part.num_cached_tokens is not None:
            self._cached[part.choice // self._num_choices] = part.num_cached_tokens
        return False

    def usage(self) -> Usage:
        cached = sum(self._cached.values()) if self._cached else None
        return Usage(self._num_prompt, sum(self._output.values()), cached)
