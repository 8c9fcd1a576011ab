"""Test the streaming detokenizer against the plain decoding of all tokens at once."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models

from tandem.gateway.text.detokenizer import Detokenizer, StopMatcher, TokenTexts
from tests.effort import effort

SPECIAL = frozenset({0, 1, 2})
TEXTS = [
    "Hello, world",
    "你好。世界",
    "naïve café",
    "😀😃🎉👩‍🚀",
    "def f():\n\treturn 0",
    "\ufffd",
    "  ",
    "aaab",
    "abab",
]


def cut(text: str, stops: list[str], least: int = 0) -> str:
    """Return `text` up to its first complete stop string that ends beyond `least` characters; of several that end
    there, the longest counts.
    """
    for end in range(least + 1, len(text) + 1):
        hits = [stop for stop in stops if text[:end].endswith(stop)]
        if hits:
            return text[: end - max(map(len, hits))]
    return text


def run(tokenizer: Tokenizer, ids: list[int], stops: list[str]) -> tuple[list[str], bool]:
    """Return the pieces of the text, and whether a stop string was found; both are the same with texts of tokens."""
    results = []
    for texts in (None, TokenTexts.of(tokenizer)):
        detokenizer = Detokenizer(tokenizer, SPECIAL, stops, texts=texts)
        pieces = [detokenizer.push(token) for token in ids]
        pieces.append(detokenizer.finish())
        results.append((pieces, detokenizer.stopped, detokenizer.num_chars))
    assert results[0] == results[1]
    return results[1][:2]


@st.composite
def outputs(draw: st.DrawFn) -> list[str | int]:
    """Generate texts, to be tokenized, among single tokens of any kind: invalid bytes, halves of characters, special
    ones.
    """
    return draw(st.lists(st.one_of(st.sampled_from(TEXTS), st.integers(0, 419), st.text(max_size=6)), max_size=12))


@effort(300)
@given(outputs(), st.data())
def test_streamed_text_is_the_whole_text_cut_at_its_first_stop(
    tokenizer: Tokenizer, parts: list[str | int], data: st.DataObject
) -> None:
    ids: list[int] = []
    for part in parts:
        ids += tokenizer.encode(part, add_special_tokens=False).ids if isinstance(part, str) else [part]
    ids = [token for token in ids if token < tokenizer.get_vocab_size()]
    whole = tokenizer.decode(ids, skip_special_tokens=True)
    stops = data.draw(st.lists(st.text("ab c你😀\ufffd", min_size=1, max_size=4), max_size=3))
    if whole:
        spans = st.tuples(st.integers(0, len(whole) - 1), st.integers(1, 6))
        stops += [whole[start : start + length] for start, length in data.draw(st.lists(spans, max_size=2))]
    pieces, stopped = run(tokenizer, ids, stops)
    assert "".join(pieces) == cut(whole, stops)
    assert stopped == any(stop in whole for stop in stops)


@effort(200)
@given(st.text("abc", max_size=40), st.lists(st.text("abc", min_size=1, max_size=5), max_size=4), st.data())
def test_stop_strings_do_not_depend_on_how_the_text_is_cut(text: str, stops: list[str], data: st.DataObject) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    edges = [0, *cuts, len(text)]
    matcher, out = StopMatcher(stops), ""
    for start, end in pairwise(edges):
        out += matcher.feed(text[start:end])
        # No character of the stop string leaves, and no more is held back than could be the beginning of one.
        assert cut(text, stops).startswith(out)
        if not matcher.stopped:
            held = text[len(out) : end]
            assert held == "" or any(stop.startswith(held) for stop in stops)
    assert out + matcher.release() == cut(text, stops)


@effort(200)
@given(
    st.text("ab", max_size=40),
    st.lists(st.text("ab", min_size=1, max_size=5), max_size=4),
    st.integers(0, 40),
    st.data(),
)
def test_a_stop_string_counts_only_beyond_the_minimum_length(
    text: str, stops: list[str], least: int, data: st.DataObject
) -> None:
    """A stop string also counts if it began before, or if it is the rest of one that did not count."""
    cuts = data.draw(st.lists(st.integers(0, len(text)), max_size=6))
    edges = sorted({0, *cuts, min(least, len(text)), len(text)})
    matcher, out = StopMatcher(stops), ""
    for start, end in pairwise(edges):
        out += matcher.feed(text[start:end], may_stop=start >= least)
        assert cut(text, stops, least).startswith(out)
    assert out + matcher.release() == cut(text, stops, least)


@pytest.mark.parametrize("min_tokens", range(12))
def test_no_stop_string_counts_before_min_tokens(tokenizer: Tokenizer, min_tokens: int) -> None:
    ids = [token_of(tokenizer, ord(character)) for character in "a.b.c"]
    ids[1:1] = [1]  # a special token, which has no text, is one of them
    detokenizer = Detokenizer(tokenizer, SPECIAL, ["."], min_tokens=min_tokens)
    out = "".join(detokenizer.push(token) for token in ids) + detokenizer.finish()
    assert out == ("a" if min_tokens < 3 else "a.b" if min_tokens < 5 else "a.b.c")


@effort(200)
@given(st.text("abc", max_size=40), st.lists(st.text("abc", min_size=1, max_size=5), max_size=4), st.data())
def test_an_included_stop_string_ends_the_text(text: str, stops: list[str], data: st.DataObject) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    matcher, out = StopMatcher(stops, include=True), ""
    for start, end in pairwise([0, *cuts, len(text)]):
        out += matcher.feed(text[start:end])
    out += matcher.release()
    ends = [text.index(stop) + len(stop) for stop in stops if stop in text]
    assert out == text[: min(ends, default=len(text))]
    assert matcher.stopped == bool(ends)


def test_text_is_emitted_as_early_as_possible(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("The capital 你 of France", add_special_tokens=False).ids
    pieces, _ = run(tokenizer, ids, [])
    assert pieces[0] == tokenizer.decode(ids[:1]) != ""
    assert pieces[-1] == ""


def test_a_character_waits_for_all_its_bytes(tokenizer: Tokenizer) -> None:
    byte_tokens = [token_of(tokenizer, byte) for byte in "🎈".encode()]
    assert run(tokenizer, byte_tokens, [])[0] == ["", "", "", "🎈", ""]
    assert run(tokenizer, byte_tokens[:3], [])[0] == ["", "", "", "\ufffd"]


@pytest.mark.parametrize("num_bad", [7, 8, 40])
def test_invalid_bytes_are_not_held_back_for_ever(tokenizer: Tokenizer, num_bad: int) -> None:
    bad = [token_of(tokenizer, 0x80)] * num_bad + [token_of(tokenizer, byte) for byte in "🎈a".encode()]
    pieces, _ = run(tokenizer, bad, [])
    assert "".join(pieces) == "\ufffd" * num_bad + "🎈a"
    waiting = 0
    for piece in pieces[:num_bad]:
        waiting = 0 if piece else waiting + 1
        assert waiting < 8


def test_only_tokens_with_complete_characters_have_texts(tokenizer: Tokenizer) -> None:
    texts = TokenTexts.of(tokenizer)
    assert texts is not None
    first, second, letter = (token_of(tokenizer, byte) for byte in (*"é".encode(), ord("x")))
    assert [texts[first], texts[second], texts[letter]] == ["", "", "x"]
    assert {*texts} == {first, second, letter}, "each is decoded once"


def test_special_tokens_have_no_text_and_do_not_pile_up(tokenizer: Tokenizer) -> None:
    detokenizer = Detokenizer(tokenizer, SPECIAL)
    assert {detokenizer.push(1) for _ in range(5000)} == {""}
    assert detokenizer.push(token_of(tokenizer, ord("x"))) == "x"


def test_nothing_follows_a_stop_string(tokenizer: Tokenizer) -> None:
    detokenizer = Detokenizer(tokenizer, SPECIAL, ["ital"])
    out = [detokenizer.push(token) for token in tokenizer.encode("The capital of", add_special_tokens=False).ids]
    assert "".join(out) == "The cap"
    assert detokenizer.stopped
    assert detokenizer.push(token_of(tokenizer, ord("x"))) == ""
    assert detokenizer.finish() == ""


def test_num_chars_counts_held_text_too(tokenizer: Tokenizer) -> None:
    detokenizer = Detokenizer(tokenizer, SPECIAL, ["xyz"])
    for token in (token_of(tokenizer, ord(character)) for character in "abxy"):
        detokenizer.push(token)
    assert detokenizer.num_chars == 4
    assert detokenizer.finish() == "xy"


def test_sentencepiece_keeps_inner_spaces_and_joins_byte_tokens() -> None:
    pieces = ["<unk>", "\u2581Paris", "\u2581is", "<0xF0>", "<0x9F>", "<0x8E>", "<0x88>", "!"]
    tokenizer = Tokenizer(models.BPE({piece: index for index, piece in enumerate(pieces)}, [], byte_fallback=True))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    ids = [1, 2, 3, 4, 5, 6, 7, 2]
    pieces_out = [*run_plain(tokenizer, ids)]
    assert "".join(pieces_out) == tokenizer.decode(ids) == "Paris is🎈! is"
    assert pieces_out[:2] == ["Paris", " is"]
    assert "".join(run_plain(tokenizer, [1, 3, 4])) == tokenizer.decode([1, 3, 4])


def run_plain(tokenizer: Tokenizer, ids: list[int]) -> list[str]:
    detokenizer = Detokenizer(tokenizer, frozenset(), texts=TokenTexts.of(tokenizer))
    return [*(detokenizer.push(token) for token in ids), detokenizer.finish()]


def token_of(tokenizer: Tokenizer, byte: int) -> int:
    """Return the token that is this byte alone."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [other for other in range(256) if other not in printable]
    token = tokenizer.token_to_id(chr(byte) if byte in printable else chr(0x100 + others.index(byte)))
    assert isinstance(token, int)
    return token
