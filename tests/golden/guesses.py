"""Proposers of golden tests: the product's own, and one that knows the answer and spoils part of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from tandem.sched.phases.spec_decode import Speculation
from tandem.sched.state.ngram_proposer import NgramProposer

Method = Literal["off", "ngram", "mixed"]


class Spoiler:
    """A `Proposer` that guesses right but at every third position. `answers` are whole sequences, prompts included."""

    def __init__(self, answers: Sequence[Sequence[int]]) -> None:
        self._answers = [list(answer) for answer in answers]

    def propose(self, tokens: Sequence[int], max_tokens: int) -> tuple[int, ...]:
        start = len(tokens)
        answer = next((a for a in self._answers if len(a) > start and a[:start] == list(tokens)), [])
        return tuple(token ^ (place % 3 == 2) for place, token in enumerate(answer[start : start + max_tokens], start))


def speculation(method: Method, answers: Sequence[Sequence[int]]) -> Speculation | None:
    if method == "off":
        return None
    if method == "mixed":
        return Speculation(lambda: Spoiler(answers), num_tokens=5, max_batch_tokens=64)
    return Speculation(lambda: NgramProposer(1, 3), num_tokens=5, max_batch_tokens=64)
