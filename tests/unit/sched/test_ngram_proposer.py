"""Test that prompt lookup proposes what a scan of the whole sequence finds."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.sched.state.ngram_proposer import NgramProposer

MAX_TOKENS = 6
sizes = st.tuples(st.integers(1, 3), st.integers(0, 4)).map(lambda pair: (pair[0], pair[0] + pair[1]))
texts = st.integers(1, 5).flatmap(lambda width: st.lists(st.integers(0, width), max_size=90))


def scan(tokens: list[int], min_n: int, max_n: int) -> int:
    """Return the continuation of the best and most recent earlier occurrence, found by a full scan."""
    places = [p for p in range(min_n, len(tokens)) if tokens[p - min_n : p] == tokens[len(tokens) - min_n :]]
    best, longest = -1, 0
    for place in reversed(places[-NgramProposer.MAX_CANDIDATES :]):
        length = max(
            n for n in range(min_n, min(max_n, place) + 1) if tokens[place - n : place] == tokens[len(tokens) - n :]
        )
        if length > longest:
            best, longest = place, length
    return best


@given(text=texts, n=sizes, shown=st.sets(st.integers(0, 90)))
def test_the_index_finds_what_a_scan_finds(text: list[int], n: tuple[int, int], shown: set[int]) -> None:
    lookup = NgramProposer(*n)
    for stop in sorted(s for s in {*shown, len(text)} if s <= len(text)):
        tokens = text[:stop]
        place = scan(tokens, *n)
        expected = tokens[place:] if place >= 0 else []
        while 0 < len(expected) < MAX_TOKENS:
            expected.append(expected[len(expected) - (len(tokens) - place)])
        assert lookup.propose(tokens, MAX_TOKENS) == tuple(expected[:MAX_TOKENS])


@given(text=texts, n=sizes)
def test_every_guess_has_followed_the_same_tokens_before(text: list[int], n: tuple[int, int]) -> None:
    known = list(text)
    for guess in NgramProposer(*n).propose(text, MAX_TOKENS):
        end = known[len(known) - n[0] :]
        assert any(known[i : i + n[0] + 1] == [*end, guess] for i in range(len(known) - n[0]))
        known.append(guess)


@pytest.mark.parametrize(
    ("text", "guesses"),
    [
        ([], ()),
        ([1], ()),
        ([1, 2, 3, 4], ()),
        ([1, 2, 3, 4, 1, 2], (3, 4, 1, 2, 3, 4)),
        ([7, 7, 7], (7,) * 6),
        ([1, 2, 8, 5, 1, 2, 9, 1, 2], (9, 1, 2, 9, 1, 2)),
        ([5, 1, 2, 8, 6, 1, 2, 9, 5, 1, 2], (8, 6, 1, 2, 9, 5)),
    ],
    ids=["nothing", "too short", "new", "copied", "loop", "most recent", "longest"],
)
def test_what_is_proposed(text: list[int], guesses: tuple[int, ...]) -> None:
    assert NgramProposer(2, 3).propose(text, MAX_TOKENS) == guesses


def test_bounds() -> None:
    assert NgramProposer(1, 1).propose([3, 3], 0) == ()
    for n in ((0, 1), (3, 2)):
        with pytest.raises(ValueError, match="n-grams"):
            NgramProposer(*n)
    lookup = NgramProposer(1, 1)
    lookup.propose([1, 2, 3], 1)
    with pytest.raises(ValueError, match="only grow"):
        lookup.propose([1, 2], 1)
