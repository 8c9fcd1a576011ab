"""Translates a parsed OpenAI body into a Request and how to answer it; never admits or runs one."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

from tandem.core.errors import ErrorKind, TandemError
from tandem.core.ids import RequestId
from tandem.core.request import MAX_TOP_LOGPROBS, Request, SamplingParams
from tandem.gateway.caller import Caller
from tandem.gateway.openai_schema import ChatBody, ChatMessage, CompletionBody, SharedBody
from tandem.gateway.ports import ServedModel
from tandem.gateway.tools import made_calls

MAX_STOPS = 16
MAX_STOP_CHARS = 512
_ROLES = frozenset({"system", "developer", "user", "assistant", "tool"})
_UNSERVED_IN_MESSAGES = ("function_call", "audio")


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """All of a body but the prompt, checked. `max_tokens` is None for as many as there is room for."""

    body: SharedBody
    prompt_param: str
    max_tokens: int | None
    logprobs: int | None
    stops: tuple[str, ...]
    stream: bool
    include_usage: bool


def chat_ask(body: ChatBody) -> Ask:
    """Raises INVALID_REQUEST or UNSUPPORTED, naming the field."""
    limit, param = body.max_completion_tokens, "max_completion_tokens"
    if limit is None:
        limit, param = body.max_tokens, "max_tokens"
    if body.top_logprobs is not None and not body.logprobs:
        raise _invalid("top_logprobs needs logprobs to be true", "top_logprobs")
    logprobs = _logprobs(body.top_logprobs or 0, "top_logprobs") if body.logprobs else None
    return _ask(body, "messages", _max_tokens(limit, param), logprobs)


def completion_ask(body: CompletionBody) -> Ask:
    """Raises INVALID_REQUEST or UNSUPPORTED, naming the field."""
    logprobs = None if body.logprobs is None else _logprobs(body.logprobs, "logprobs")
    return _ask(body, "prompt", _max_tokens(body.max_tokens, "max_tokens"), logprobs)


def _ask(body: SharedBody, prompt_param: str, max_tokens: int | None, logprobs: int | None) -> Ask:
    n = 1 if body.n is None else body.n
    if n < 1:
        raise _invalid(f"n must be at least 1, got {n}", "n")
    if n > 1:
        raise TandemError(ErrorKind.UNSUPPORTED, f"n={n} is not supported, only one choice per request", param="n")
    stream = bool(body.stream)
    if body.stream_options is not None and not stream:
        raise _invalid("stream_options is only allowed when stream is true", "stream_options")
    return Ask(
        body=body,
        prompt_param=prompt_param,
        max_tokens=max_tokens,
        logprobs=logprobs,
        stops=_stops(body.stop),
        stream=stream,
        include_usage=body.stream_options is not None and bool(body.stream_options.include_usage),
    )


def conversation(messages: Sequence[ChatMessage]) -> list[dict[str, Any]]:
    """Messages as templates know them: the text parts of one message are joined by line breaks."""
    if not messages:
        raise _invalid("messages must hold at least one message", "messages")
    return [_message(message, f"messages[{index}]") for index, message in enumerate(messages)]


def _message(message: ChatMessage, where: str) -> dict[str, Any]:
    if message.role not in _ROLES:
        raise _invalid(f"{where}.role must be one of {sorted(_ROLES)}, got {message.role!r}", f"{where}.role")
    for name in _UNSERVED_IN_MESSAGES:
        if getattr(message, name):
            param = f"{where}.{name}"
            raise TandemError(ErrorKind.UNSUPPORTED, f"{param} is not supported", param=param)
    content = "" if message.content is None and message.tool_calls else message.content
    if content is None:
        raise _invalid(f"{where}.content must be a string or a list of text parts", f"{where}.content")
    if not isinstance(content, str):
        texts = []
        for index, part in enumerate(content):
            param = f"{where}.content[{index}]"
            if part.type != "text":
                text = f"{param} is of type {part.type!r}; only text is supported"
                raise TandemError(ErrorKind.UNSUPPORTED, text, param=param)
            if part.text is None:
                raise _invalid(f"{param}.text is missing", f"{param}.text")
            texts.append(part.text)
        content = "\n".join(texts)
    facts = {
        "role": message.role,
        "content": content,
        "name": message.name,
        "tool_call_id": message.tool_call_id,
        "tool_calls": made_calls(message.tool_calls, f"{where}.tool_calls") if message.tool_calls else None,
        "reasoning_content": message.reasoning_content,
    }
    return {name: value for name, value in facts.items() if value is not None}


def single_prompt(prompt: str | list[int | str | list[int]], vocab_size: int) -> str | tuple[int, ...]:
    """The one prompt of a completion, as text or as token ids below `vocab_size`."""
    if isinstance(prompt, str):
        return prompt
    if not prompt:
        raise _invalid("prompt must not be empty", "prompt")
    if all(isinstance(token, int) for token in prompt):
        return _tokens([token for token in prompt if isinstance(token, int)], vocab_size)
    if len(prompt) > 1:
        if all(isinstance(item, str) for item in prompt) or all(isinstance(item, list) for item in prompt):
            raise TandemError(ErrorKind.UNSUPPORTED, "only one prompt per request is supported", param="prompt")
        raise _invalid("prompt mixes texts, token ids and lists of token ids", "prompt")
    only = prompt[0]
    return _tokens(only, vocab_size) if isinstance(only, list) else str(only)


def _tokens(tokens: list[int], vocab_size: int) -> tuple[int, ...]:
    for token in tokens:
        if not 0 <= token < vocab_size:
            raise _invalid(f"prompt holds the token id {token}, outside of [0, {vocab_size})", "prompt")
    return tuple(tokens)


def request(ask: Ask, served: ServedModel, prompt: tuple[int, ...], id_prefix: str, caller: Caller) -> Request:
    """The request, with an identity of its own. Raises CONTEXT_LENGTH, or INVALID_REQUEST naming the field."""
    if not prompt:
        raise _invalid(f"{ask.prompt_param} must hold at least one token", ask.prompt_param)
    return Request(
        id=RequestId(id_prefix + uuid4().hex),
        model=served.name,
        prompt_tokens=prompt,
        sampling=_sampling(ask, served, _output_room(ask, served, len(prompt))),
        tenant=caller.tenant.id,
        lane=caller.tenant.lane if caller.lane is None else caller.lane,
    )


def _output_room(ask: Ask, served: ServedModel, num_prompt_tokens: int) -> int:
    room = served.max_model_len - num_prompt_tokens
    limit = f"this model's maximum context length is {served.max_model_len} tokens"
    if room < 1:
        message = f"{limit}, and the prompt alone has {num_prompt_tokens}"
        raise TandemError(ErrorKind.CONTEXT_LENGTH, message, param=ask.prompt_param)
    if ask.max_tokens is None:
        return room
    if ask.max_tokens > room:
        total = num_prompt_tokens + ask.max_tokens
        message = f"{limit}, but {total} were requested: {num_prompt_tokens} of prompt and {ask.max_tokens} of output"
        raise TandemError(ErrorKind.CONTEXT_LENGTH, message, param=ask.prompt_param)
    return ask.max_tokens


def _sampling(ask: Ask, served: ServedModel, max_tokens: int) -> SamplingParams:
    body, defaults = ask.body, served.text.defaults
    top_k = int(_first(body.top_k, defaults.top_k, 0))
    return SamplingParams(
        max_tokens=max_tokens,
        temperature=_first(body.temperature, defaults.temperature, 1.0),
        top_p=_first(body.top_p, defaults.top_p, 1.0),
        top_k=0 if top_k == -1 else top_k,  # other servers write -1 for off
        min_p=_first(body.min_p, defaults.min_p, 0.0),
        seed=_seed(body.seed),
        stop_token_ids=frozenset() if body.ignore_eos else served.text.eos_token_ids,
        logprobs=ask.logprobs,
    )


def _first(asked: float | None, recommended: float | None, otherwise: float) -> float:
    return next(value for value in (asked, recommended, otherwise) if value is not None)


def _seed(seed: int | None) -> int:
    """A client's seed is a signed or an unsigned 64-bit number; a request without one gets one here."""
    if seed is None:
        return secrets.randbits(64)
    if not -(2**63) <= seed < 2**64:
        raise _invalid(f"seed must fit in 64 bits, got {seed}", "seed")
    return seed % 2**64


def _max_tokens(limit: int | None, param: str) -> int | None:
    if limit is not None and limit < 1:
        raise _invalid(f"{param} must be at least 1, got {limit}", param)
    return limit


def _logprobs(count: int, param: str) -> int:
    if not 0 <= count <= MAX_TOP_LOGPROBS:
        raise _invalid(f"{param} must be in [0, {MAX_TOP_LOGPROBS}], got {count}", param)
    return count


def _stops(stop: str | list[str] | None) -> tuple[str, ...]:
    stops = [stop] if isinstance(stop, str) else stop or []
    if len(stops) > MAX_STOPS:
        raise _invalid(f"stop must hold at most {MAX_STOPS} strings, got {len(stops)}", "stop")
    if any(not 1 <= len(text) <= MAX_STOP_CHARS for text in stops):
        raise _invalid(f"each stop string must have 1 to {MAX_STOP_CHARS} characters", "stop")
    return tuple(dict.fromkeys(stops))


def _invalid(message: str, param: str) -> TandemError:
    return TandemError(ErrorKind.INVALID_REQUEST, message, param=param)
