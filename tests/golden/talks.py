"""Make conversations of several turns on tiny models, which share their beginning."""

from __future__ import annotations

from tests.golden.models import Reference, random_prompt

NUM_TURNS, NUM_OUTPUTS = 3, 10
_NUM_TALKS, _NUM_QUESTION_TOKENS = 3, 7


OPENINGS = tuple(random_prompt(17, 0) + random_prompt(20 + 3 * i, 1 + i) for i in range(_NUM_TALKS))
LONGEST = len(OPENINGS[-1]) + NUM_TURNS * (NUM_OUTPUTS + _NUM_QUESTION_TOKENS)
"""Tokens that a conversation comes to at most."""


def turns_of(reference: Reference) -> list[list[tuple[list[int], list[int]]]]:
    """By turn, what each conversation asks and what transformers answers, greedily."""
    histories = [list(opening) for opening in OPENINGS]
    turns = []
    for turn in range(NUM_TURNS):
        answers = [reference.greedy(prompt, NUM_OUTPUTS) for prompt in histories]
        turns.append(list(zip(histories, answers, strict=True)))
        histories = [
            [*p, *a, *random_prompt(_NUM_QUESTION_TOKENS, 100 * turn + i)] for i, (p, a) in enumerate(turns[-1])
        ]
    return turns
