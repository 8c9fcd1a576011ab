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
    """All tokens of the `prompt`-th prompt with their log probabilities; the first token has none."""

    prompt: int
    tokens: tuple[SampledToken, ...]


@dataclass(frozen=True, slots=True)
class Echo:
    """The prompt as the beginning of a choice's text, one Delta per token; the first has no log probability.

    Offsets of the choice's own deltas begin where the echo ends."""

    deltas: tuple[Delta, ...]
    choice: int

    @property
    def num_chars(self) -> int:
        return sum(len(delta.text) for delta in self.deltas)


class PromptScores:
    """Assemble the log probabilities of one prompt from pieces, which may arrive more than once."""

    __slots__ = ("_tokens",)

    def __init__(self, prompt: Sequence[int]) -> None:
        self._tokens: list[SampledToken | None] = [SampledToken(prompt[0]), *[None] * (len(prompt) - 1)]

    def take(self, scored: PromptLogprobs) -> None:
        end = scored.first_index + len(scored.tokens)
        if not 1 <= scored.first_index <= end <= len(self._tokens):
            raise TandemError(ErrorKind.INTERNAL, "a worker scored tokens that the prompt does not have")
        self._tokens[scored.first_index : end] = scored.tokens

    def complete(self) -> tuple[SampledToken, ...]:
        """Return the tokens of the prompt. Raises INTERNAL while scores are missing."""
        found = tuple(token for token in self._tokens if token is not None)
        if len(found) < len(self._tokens):
            raise TandemError(ErrorKind.INTERNAL, "the first token arrived before all scores of the prompt")
        return found


def echo_deltas(
    prompt: Prompt, model: TextModel, scores: Sequence[SampledToken], num_top: int, *, skip_special_tokens: bool
) -> tuple[Delta, ...]:
    """Return the prompt's text token by token, with at most `num_top` alternatives each.

    `scores` is empty where no log probabilities were requested."""
    pieces = _text_pieces(prompt) if prompt.text is not None else _token_pieces(prompt, model, skip_special_tokens)
    tokens = scores or [SampledToken(token) for token in prompt.ids]
    return tuple(
        Delta(text, offset, SampledToken(token.id, token.logprob, token.top[:num_top]))
        for (text, offset), token in zip(pieces, tokens, strict=True)
    )


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
