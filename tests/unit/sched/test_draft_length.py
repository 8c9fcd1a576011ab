"""Test how the draft length of a sequence follows from the acceptance of its draft tokens."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from tandem.sched.state.draft_length import FIRST_LENGTH, MAX_PAUSE, AdaptiveDraft


class Counting:
    """A proposer of 0, 1, 2, ... which returns more tokens than requested."""

    def propose(self, tokens: Sequence[int], max_tokens: int) -> tuple[int, ...]:
        return tuple(range(max_tokens + 3))


def lengths(adaptive: AdaptiveDraft, share: float, steps: int) -> list[int]:
    """Return the number of draft tokens of each step when this share of them is right."""
    made = []
    for _ in range(steps):
        guesses = adaptive.draft([1], 100)
        made.append(len(guesses))
        if guesses:
            adaptive.learn(len(guesses), int(share * len(guesses)))
    return made


def test_all_right_doubles_up_to_the_limit() -> None:
    assert lengths(AdaptiveDraft(Counting(), 12), 1.0, 4) == [FIRST_LENGTH, 8, 12, 12]


def test_half_right_stays() -> None:
    assert lengths(AdaptiveDraft(Counting(), 12), 0.5, 3) == [4, 4, 4]


def test_few_right_halves_and_does_not_pause() -> None:
    assert lengths(AdaptiveDraft(Counting(), 12), 0.25, 3) == [4, 2, 1]


def test_never_right_pauses_twice_as_long_each_time() -> None:
    made = lengths(AdaptiveDraft(Counting(), 12), 0.0, 400)
    assert made[:13] == [4, 2, 0, 1, 0, 0, 0, 1, 0, 0, 0, 0, 0]
    tries = [step for step, count in enumerate(made) if count]
    assert max(b - a for a, b in pairwise(tries)) == MAX_PAUSE + 1


def test_one_right_guess_ends_the_pauses() -> None:
    adaptive = AdaptiveDraft(Counting(), 12)
    lengths(adaptive, 0.0, 4)
    adaptive.learn(1, 1)
    assert adaptive.length == 2 and lengths(adaptive, 1.0, 20)[-1] == 12


def test_the_caller_bounds_it_too() -> None:
    adaptive = AdaptiveDraft(Counting(), 12)
    assert adaptive.draft([1], 2) == (0, 1)
    assert adaptive.draft([1], 0) == adaptive.draft([1], -3) == ()
    assert AdaptiveDraft(Counting(), 1).draft([1], 9) == (0,)


def test_fewer_than_half_right_halves() -> None:
    adaptive = AdaptiveDraft(Counting(), 12)
    lengths(adaptive, 1.0, 1)
    assert len(adaptive.draft([1], 100)) == 8
    adaptive.learn(8, 3)
    assert adaptive.length == 4
