"""Repeat the prompt in a response (`echo`), and collect its log probabilities (`prompt_logprobs`)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tandem.core.errors import ErrorKind, TandemError
from tandem.core.events import PromptLogprobs, SampledToken
from tandem.gateway.openai.prompt import Prompt
from tandem.gateway.output.text_stream import Delta
from tandem.gateway.text.text_model import TextModel


@dataclass(frozen=True, slots=True)
class ScoredPrompt:
    """Tokens of one prompt with their log probabilities; the first token has none. `prompt`: index of the prompt in its
    body."""

    prompt: int
    tokens: tuple[SampledToken, ...]


@dataclass(frozen=True, slots=True)
class Echo:
    """Hold the prompt as the beginning of the text of choice number `choice`.

    `deltas`: one Delta per token of the prompt; the first has no log probability. The `offset` of the choice's own
    deltas continues after those of the echo."""

    deltas: tuple[Delta, ...]
    choice: int

    @property
    def num_chars(self) -> int:
        """Return the number of characters of the echoed prompt."""
        return sum(len(delta.text) for delta in self.deltas)


class PromptScores:
    """Collect the log probabilities of one prompt, which workers report in several events and in part more than once.
    `prompt`: its token ids."""

    __slots__ = ("_tokens",)

    def __init__(self, prompt: Sequence[int]) -> None:
        self._tokens: list[SampledToken | None] = [SampledToken(prompt[0]), *[None] * (len(prompt) - 1)]

    def take(self, scored: PromptLogprobs) -> None:
        """Add the log probabilities of one event. Raises INTERNAL where they are not for positions of the prompt."""
        end = scored.first_index + len(scored.tokens)
        if not 1 <= scored.first_index <= end <= len(self._tokens):
            raise TandemError(ErrorKind.INTERNAL, "a worker scored tokens that the prompt does not have")
        self._tokens[scored.first_index : end] = scored.tokens

    def complete(self) -> tuple[SampledToken, ...]:
        """Return all tokens of the prompt with their log probabilities. Raises INTERNAL while some are missing."""
        found = tuple(token for token in self._tokens if token is not None)
        if len(found) < len(self._tokens):
            raise TandemError(ErrorKind.INTERNAL, "the first token arrived before all scores of the prompt")
        return found


def echo_deltas(
    prompt: Prompt, model: TextModel, scores: Sequence[SampledToken], num_top: int, *, skip_special_tokens: bool
) -> Iterator[Delta]:
    """Yield the prompt's text as one Delta per token, each with at most `num_top` alternatives.

    `scores`: the tokens with their log probabilities; empty where none were requested. `skip_special_tokens`: special
    tokens get no text; without effect on a prompt that the client sent as text."""
    pieces = _text_pieces(prompt) if prompt.text is not None else _token_pieces(prompt, model, skip_special_tokens)
    tokens = scores or (SampledToken(token) for token in prompt.ids)
    for (text, offset), token in zip(pieces, tokens, strict=True):
        yield Delta(text, offset, SampledToken(token.id, token.logprob, token.top[:num_top]))


def _text_pieces(prompt: Prompt) -> Iterator[tuple[str, int]]:
    """Yield the text of each token and its offset.

    Characters that the tokenizer dropped belong to the token before them; those before the first token belong to the
    first."""
    text = prompt.text or ""
    begins = [0, *prompt.offsets[1:]]
    for begin, end in zip(begins, [*begins[1:], len(text)], strict=True):
        yield text[begin:end], begin


def _token_pieces(prompt: Prompt, model: TextModel, skip_special_tokens: bool) -> Iterator[tuple[str, int]]:
    detokenizer = model.detokenizer(skip_special_tokens=skip_special_tokens)
    last = len(prompt.ids) - 1
    for index, token in enumerate(prompt.ids):
        offset = detokenizer.num_chars
        text = detokenizer.push(token)
        yield text + (detokenizer.finish() if index == last else ""), offset
