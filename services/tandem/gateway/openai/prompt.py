"""The prompts of one body, given as text or as token ids; never renders a chat or admits a request."""

from __future__ import annotations

from dataclasses import dataclass

from tandem.core.errors import ErrorKind, TandemError
from tandem.gateway.text.text_model import TextModel

MAX_PROMPTS = 256
"""Each one is a request of its own; clients that have more send several bodies."""

MAX_CHOICES_OF_ALL = 1024
"""Of all prompts of one body: each holds memory here until the whole answer has been read."""

GivenPrompt = str | tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Prompt:
    """What is computed. `text` is what the client wrote, and None where it wrote token ids; each token begins at its
    character of `offsets` there."""

    ids: tuple[int, ...]
    text: str | None = None
    offsets: tuple[int, ...] = ()


def given_prompts(
    prompt: str | list[int | str | list[int]], vocab_size: int, num_choices: int = 1
) -> list[GivenPrompt]:
    """One or several prompts, as texts or as token ids below `vocab_size`, each of `num_choices` answers. Raises
    INVALID_REQUEST."""
    given = _read_prompts(prompt, vocab_size)
    if len(given) * num_choices > MAX_CHOICES_OF_ALL:
        message = f"{len(given)} prompts with n={num_choices} have {len(given) * num_choices} answers"
        message += f", at most {MAX_CHOICES_OF_ALL} are given at once"
        raise TandemError(ErrorKind.INVALID_REQUEST, message, param="n")
    return given


def _read_prompts(prompt: str | list[int | str | list[int]], vocab_size: int) -> list[GivenPrompt]:
    if isinstance(prompt, str):
        return [prompt]
    if not prompt:
        raise _invalid("prompt must not be empty")
    tokens = [item for item in prompt if isinstance(item, int)]
    if len(tokens) == len(prompt):
        return [checked_tokens(tokens, vocab_size)]
    if len(prompt) > MAX_PROMPTS:
        raise _invalid(f"prompt holds {len(prompt)} prompts, at most {MAX_PROMPTS} are taken")
    texts = [item for item in prompt if isinstance(item, str)]
    lists = [item for item in prompt if isinstance(item, list)]
    if len(prompt) not in (len(texts), len(lists)):
        raise _invalid("prompt mixes texts, token ids and lists of token ids")
    return [*texts] if texts else [checked_tokens(each, vocab_size) for each in lists]


def encode(given: GivenPrompt, model: TextModel, *, add_special_tokens: bool, with_offsets: bool) -> Prompt:
    """Without places there are no `offsets`."""
    if isinstance(given, tuple):
        return Prompt(given)
    ids, offsets = model.encode_with_offsets(given, add_special_tokens=add_special_tokens, with_offsets=with_offsets)
    return Prompt(ids, given, offsets)


def checked_tokens(tokens: list[int], vocab_size: int, param: str = "prompt") -> tuple[int, ...]:
    """Raises INVALID_REQUEST unless all are in [0, vocab_size)."""
    for token in (min(tokens), max(tokens)) if tokens else ():
        if not 0 <= token < vocab_size:
            message = f"{param} holds the token id {token}, outside of [0, {vocab_size})"
            raise TandemError(ErrorKind.INVALID_REQUEST, message, param=param)
    return tuple(tokens)


def _invalid(message: str) -> TandemError:
    return TandemError(ErrorKind.INVALID_REQUEST, message, param="prompt")
