"""Turn the output tokens of one choice into text incrementally, and cut the text at stop strings."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel

_MAX_HELD_TOKENS = 8
"""Tokens whose text may wait for a complete character. Longer runs are garbage, and waiting would cost quadratic
time."""
_MAX_CHARACTER_TOKENS = 4
"""Tokens that an incomplete character can span: a UTF-8 character has at most 4 bytes."""
_REPLACEMENT = "\ufffd"


class StopMatcher:
    """Return text up to the first stop string, and hold back what may be the beginning of a stop string.

    The stop string that is complete first counts; of several that end at the same character, the longest. So the result
    does not depend on how the text was cut into pieces. Each stop string has a Knuth-Morris-Pratt automaton: the cost
    is linear in the text. `include`: the stop string itself is returned too. `stopped`: a stop string was found.
    """

    __slots__ = ("_failures", "_held", "_include", "_states", "_stops", "stopped")

    def __init__(self, stops: Sequence[str], *, include: bool = False) -> None:
        self._stops = tuple(stops)
        self._include = include
        self._failures = tuple(_failure_table(stop) for stop in self._stops)
        self._states = [0] * len(self._stops)
        self._held = ""
        self.stopped = False

    def feed(self, text: str, *, may_stop: bool = True) -> str:
        """Add text; return the text, held-back text included, that cannot belong to a stop string.

        After a stop string, the result is always empty. `may_stop`: false to treat a stop string that becomes complete
        in this text as ordinary text. A stop string that becomes complete in a later call counts even if it began in
        this text.
        """
        if not self._stops or self.stopped:
            return "" if self.stopped else text
        buffer = self._held + text
        for position, character in enumerate(text, start=len(self._held) + 1):
            matched = self._advance(character)
            if matched and may_stop:
                self.stopped = True
                self._held = ""
                return buffer[: position if self._include else position - matched]
        settled = len(buffer) - max(self._states)
        self._held = buffer[settled:]
        return buffer[:settled]

    def release(self) -> str:
        """End the output; return the text that was held back."""
        held, self._held = self._held, ""
        return held

    def _advance(self, character: str) -> int:
        """Return the length of the longest stop string that ends with this character, else 0."""
        matched = 0
        for index, stop in enumerate(self._stops):
            state = self._states[index]
            while state and stop[state] != character:
                state = self._failures[index][state - 1]
            state += stop[state] == character
            if state == len(stop):
                matched = max(matched, state)
                state = self._failures[index][-1]
            self._states[index] = state
        return matched


@lru_cache(maxsize=64)
def _failure_table(stop: str) -> Sequence[int]:
    """Return, at i, the length of the longest proper prefix of `stop` that is a suffix of `stop[:i + 1]`.

    Cached, because all choices of a body have the same stop strings, and there may be a thousand."""
    table = [0] * len(stop)
    length = 0
    for index in range(1, len(stop)):
        while length and stop[index] != stop[length]:
            length = table[length - 1]
        length += stop[index] == stop[length]
        table[index] = length
    return table


class TokenTexts(dict[int, str]):
    """Decode each token on its own once, and keep its text: empty for a token whose bytes are no complete characters.

    Only for a tokenizer with the decoder ByteLevel, where the text of tokens is their bytes one after the other."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        super().__init__()
        self._tokenizer = tokenizer

    def __missing__(self, token: int) -> str:
        text = self._tokenizer.decode([token], skip_special_tokens=False)
        return self.setdefault(token, "" if _REPLACEMENT in text else text)

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> TokenTexts | None:
        """Return the texts of a tokenizer; None where the text of a token may depend on the tokens around it."""
        return cls(tokenizer) if isinstance(tokenizer.decoder, ByteLevel) else None


class Detokenizer:
    """Turn the output tokens of one choice into text as they arrive, and cut it at the first stop string.

    The results of `push` and `finish` concatenate to the decoded output. A character is returned once all of its bytes
    have arrived. `special`: ids of tokens without text. `texts`: the texts of single tokens, if the tokenizer has them.
    `include_stop`: the stop string itself is returned too. `min_tokens`: stop strings that are complete within the
    first `min_tokens` tokens are ordinary text.

    The detokenizer keeps a window of tokens: the last tokens whose text was returned, for context, and the tokens whose
    text waits for a complete character. Where none waits, a token with a text of its own needs no window: decoding the
    window twice took a tenth of the gateway's time of a token. `tokenizers.decoders.DecodeStream` is not used: it
    cannot flush, raises where a decoder rewrites earlier text, and decodes ever more tokens while the text ends in an
    invalid byte."""

    __slots__ = (
        "_num_context",
        "_num_left",
        "_shown",
        "_special",
        "_stops",
        "_texts",
        "_tokenizer",
        "_window",
        "num_chars",
    )

    def __init__(
        self,
        tokenizer: Tokenizer,
        special: frozenset[int],
        stops: Sequence[str] = (),
        *,
        texts: TokenTexts | None = None,
        include_stop: bool = False,
        min_tokens: int = 0,
    ) -> None:
        self._tokenizer = tokenizer
        self._texts = texts
        self._special = special
        self._num_left = min_tokens + 1  # tokens up to the first that may complete a stop string, itself included
        self._stops = StopMatcher(stops, include=include_stop) if stops else None
        self._window: list[int] = []
        self._num_context = 0  # tokens at the front of the window whose text was decoded before
        self._shown = 0  # characters of the decoded window that went on to the stop strings
        self.num_chars = 0
        """Characters decoded so far, held-back ones included; also the offset at which the next token's text begins."""

    @property
    def stopped(self) -> bool:
        """Return whether a stop string was found; there is no text after it."""
        return self._stops is not None and self._stops.stopped

    def push(self, token: int) -> str:
        """Add a token; return the text that it completes, which is empty for special tokens, for text that is held
        back, and after a stop string."""
        if self._num_left:
            self._num_left -= 1
        if token in self._special or self.stopped:
            return ""
        if self._texts is not None and self._num_context == len(self._window) and (text := self._texts[token]):
            if self._window:
                self._window, self._num_context, self._shown = [], 0, 0
            self.num_chars += len(text)
            return self._released(text)
        self._window.append(token)
        text = self._decode(self._window)
        end = len(text) - text.endswith(_REPLACEMENT)
        if end == len(text) and end > self._shown:
            return self._take(text, end, context=self._num_context)
        if len(self._window) - self._num_context < _MAX_HELD_TOKENS:
            return ""
        return self._take(text, end, context=-_MAX_CHARACTER_TOKENS)

    def finish(self) -> str:
        """End the output; return all text that was held back, with U+FFFD for bytes that never became a character."""
        text = self._decode(self._window)
        tail, self._window, self._shown, self._num_context = text[self._shown :], [], 0, 0
        self.num_chars += len(tail)
        if self._stops is None:
            return tail
        return self._stops.feed(tail, may_stop=not self._num_left) + self._stops.release()

    def _take(self, text: str, end: int, *, context: int) -> str:
        """Return the window's text up to `end`, and keep the tokens from index `context` on as the new window."""
        delta = text[self._shown : end]
        self.num_chars += len(delta)
        complete = end == len(text)
        self._window = self._window[context:]
        self._num_context = len(self._window) if complete else 0
        kept = self._decode(self._window)
        self._shown = len(kept) - (not complete and kept.endswith(_REPLACEMENT))
        return self._released(delta)

    def _released(self, text: str) -> str:
        """Return what of the next text of the choice, and of the text before it, cannot belong to a stop string."""
        return text if self._stops is None else self._stops.feed(text, may_stop=not self._num_left)

    def _decode(self, tokens: list[int]) -> str:
        return self._tokenizer.decode(tokens, skip_special_tokens=False)
