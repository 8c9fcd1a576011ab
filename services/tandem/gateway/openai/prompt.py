"""Read the prompts of one completion body, which are texts or lists of token ids."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tandem.core.errors import ErrorKind, TandemError, invalid_request
from tandem.gateway.text.text_model import TextModel

MAX_PROMPTS = 256
"""Largest number of prompts in one body; each of them becomes a request of its own."""

MAX_CHOICES_OF_ALL = 1024
"""Largest number of choices over all prompts of one body: the gateway keeps memory for each until the client has read
the whole response."""

GivenPrompt = str | tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Prompt:
    """Token ids of one prompt, and the text that they were encoded from.

    `text`: as the client sent it; None where the client sent token ids. `offsets`: the index in `text` of the character
    at which each token begins; empty where the caller of `encode` requested no offsets."""

    ids: tuple[int, ...]
    text: str | None = None
    offsets: tuple[int, ...] = ()


def given_prompts(
    prompt: str | list[int | str | list[int]], vocab_size: int, max_model_len: int, num_choices: int = 1
) -> list[GivenPrompt]:
    """Split the field `prompt` of a body into its prompts, each a text or a tuple of token ids.

    Raises CONTEXT_LENGTH where one has more than `max_model_len` token ids. Raises INVALID_REQUEST where `prompt` is
    empty, mixes texts, token ids and lists, holds a token id that is not in [0, `vocab_size`), or has more than
    MAX_PROMPTS prompts; also where these have more than MAX_CHOICES_OF_ALL choices together, at `num_choices` each."""
    _check_lengths(prompt, max_model_len)
    given = _read_prompts(prompt, vocab_size)
    if len(given) * num_choices > MAX_CHOICES_OF_ALL:
        message = f"{len(given)} prompts with n={num_choices} have {len(given) * num_choices} choices"
        message += f", at most {MAX_CHOICES_OF_ALL} are allowed in one request"
        raise invalid_request(message, "n")
    return given


def prompt_too_long(max_model_len: int, num_tokens: int | None, param: str) -> TandemError:
    """Return the error for a prompt that does not fit the model's context of `max_model_len` tokens. `num_tokens`:
    number of tokens of the prompt; None where counting stopped at more than `max_model_len`. `param`: the field at
    fault."""
    has = f"has {num_tokens}" if num_tokens is not None else "has more"
    limit = f"this model's maximum context length is {max_model_len} tokens"
    return TandemError(ErrorKind.CONTEXT_LENGTH, f"{limit}, and the prompt alone {has}; shorten {param}", param=param)


def _check_lengths(prompt: str | list[int | str | list[int]], max_model_len: int) -> None:
    """Raise CONTEXT_LENGTH where a list of token ids is too long, before each of its items is looked at."""
    if isinstance(prompt, str) or not prompt:
        return
    lists = (
        [prompt] if isinstance(prompt[0], int) else [item for item in prompt[:MAX_PROMPTS] if isinstance(item, list)]
    )
    longest = max(map(len, lists), default=0)
    if longest > max_model_len:
        raise prompt_too_long(max_model_len, longest, "prompt")


def _read_prompts(prompt: str | list[int | str | list[int]], vocab_size: int) -> list[GivenPrompt]:
    if isinstance(prompt, str):
        return [prompt]
    if not prompt:
        raise invalid_request("prompt must not be empty", "prompt")
    tokens = [item for item in prompt if isinstance(item, int)]
    if len(tokens) == len(prompt):
        return [checked_tokens(tokens, vocab_size)]
    if len(prompt) > MAX_PROMPTS:
        message = f"prompt holds {len(prompt)} prompts, at most {MAX_PROMPTS} are allowed in one request"
        raise invalid_request(message, "prompt")
    texts = [item for item in prompt if isinstance(item, str)]
    lists = [item for item in prompt if isinstance(item, list)]
    if len(prompt) not in (len(texts), len(lists)):
        raise invalid_request("prompt must hold only texts, only token ids or only lists of token ids", "prompt")
    return [*texts] if texts else [checked_tokens(each, vocab_size) for each in lists]


def encode(
    given: GivenPrompt, model: TextModel, max_tokens: int, *, add_special_tokens: bool, with_offsets: bool
) -> Prompt:
    """Encode one prompt with the tokenizer of `model`; token ids are kept as they are. `add_special_tokens`: add the
    tokenizer's own special tokens, such as BOS. `with_offsets`: also fill `Prompt.offsets`. Raises TextTooLong for a
    text that clearly has more than `max_tokens` tokens."""
    if isinstance(given, tuple):
        return Prompt(given)
    ids, offsets = model.encode(
        given, add_special_tokens=add_special_tokens, with_offsets=with_offsets, max_tokens=max_tokens
    )
    return Prompt(ids, given, offsets)


def checked_tokens(tokens: Sequence[int], vocab_size: int, param: str = "prompt") -> tuple[int, ...]:
    """Return the token ids as a tuple. Raises INVALID_REQUEST for the field `param` unless all are in [0,
    vocab_size)."""
    for token in (min(tokens), max(tokens)) if tokens else ():
        if not 0 <= token < vocab_size:
            message = f"{param} holds the token id {token}; this model's token ids are 0 to {vocab_size - 1}"
            raise invalid_request(message, param)
    return tuple(tokens)
