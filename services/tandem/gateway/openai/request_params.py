"""Check the fields of a parsed OpenAI body, and build from them the `Request` for workers and the `GenerationParams`.

The gateway runs a body's prompts and formats the response by its `GenerationParams`.
"""

from __future__ import annotations

import math
import re
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tandem.core.errors import ErrorKind, TandemError, invalid_request
from tandem.core.ids import RequestId
from tandem.core.lane import Lane
from tandem.core.request import MAX_CHOICES, MAX_RETAIN_S, MAX_TOP_LOGPROBS, Request, SamplingParams
from tandem.gateway.context.interfaces import ServedModel
from tandem.gateway.context.request_context import RequestContext
from tandem.gateway.openai.prompt import checked_tokens, prompt_too_long
from tandem.gateway.openai.request_schema import MAX_SALT_CHARS, ChatBody, ChatMessage, CompletionBody, SharedBody
from tandem.gateway.output.tools import parse_message_calls
from tandem.gateway.text.chat_template import GenerationPrompt

MAX_NAMED_TOKENS = 4096
"""Largest number of tokens in `logit_bias` or in `stop_token_ids`."""
MAX_MESSAGES = 2048
"""Largest number of messages in a chat, the same as OpenAI's. A template's time may grow with its square."""
MAX_STOPS = 16
MAX_STOP_CHARS = 512
ROLES = frozenset({"system", "developer", "user", "assistant", "tool"})
_UNSERVED_IN_MESSAGES = ("function_call", "audio")
_TOKEN_ID = re.compile(r"0|[1-9][0-9]{0,9}")
_UNITS_S = {"s": 1.0, "m": 60.0, "h": 3600.0}
DEFAULT_TTL = "5m"
_TIERS = {"default": Lane.STANDARD, "flex": Lane.BATCH, "priority": Lane.INTERACTIVE}


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationParams:
    """Checked fields of a body, without its prompt.

    `body`: the body itself, for the fields that need no check here. `prompt_param`: name of the prompt's field, for
    errors. `max_tokens`: None for as many as the context length allows. `logprobs`: number of alternatives to return
    for each output token; None for no log probabilities. `num_choices`: number of choices of each prompt. `stops`: the
    stop strings. `echo`: the response repeats the prompt."""

    body: SharedBody
    prompt_param: str
    max_tokens: int | None
    logprobs: int | None
    num_choices: int
    stops: tuple[str, ...]
    echo: bool = False

    @property
    def prompt_scores(self) -> int | None:
        """Return how many alternatives workers must return, with log probabilities, for each token of the prompt; None
        where no log probabilities of the prompt are needed."""
        counts = [self.body.prompt_logprobs, self.logprobs if self.echo else None]
        return max((count for count in counts if count is not None), default=None)


def chat_params(body: ChatBody) -> GenerationParams:
    """Check the body of a chat and return its parameters. Raises INVALID_REQUEST or UNSUPPORTED, naming the field."""
    limit, param = body.max_completion_tokens, "max_completion_tokens"
    if limit is None:
        limit, param = body.max_tokens, "max_tokens"
    if body.top_logprobs and not body.logprobs:
        raise invalid_request("top_logprobs requires logprobs to be true", "top_logprobs")
    logprobs = _logprobs(body.top_logprobs or 0, "top_logprobs") if body.logprobs else None
    return _params(body, "messages", _max_tokens(limit, param, least=1), logprobs)


def completion_params(body: CompletionBody) -> GenerationParams:
    """Check the body of a plain completion and return its parameters. `max_tokens` may be 0, to score a prompt or to
    warm up a cache. Raises INVALID_REQUEST or UNSUPPORTED, naming the field."""
    logprobs = None if body.logprobs is None else _logprobs(body.logprobs, "logprobs")
    best_of = (body.n or 1) if body.best_of is None else body.best_of
    if best_of != (body.n or 1):
        message = f"best_of={best_of} is not supported unless it equals n: every sampled choice is returned"
        raise TandemError(ErrorKind.UNSUPPORTED, message, param="best_of")
    limit = _max_tokens(body.max_tokens, "max_tokens", least=0)
    return _params(body, "prompt", limit, logprobs, echo=bool(body.echo))


def _params(
    body: SharedBody, prompt_param: str, max_tokens: int | None, logprobs: int | None, *, echo: bool = False
) -> GenerationParams:
    n = 1 if body.n is None else body.n
    if not 1 <= n <= MAX_CHOICES:
        raise invalid_request(f"n must be in [1, {MAX_CHOICES}], got {n}", "n")
    if body.stream_options is not None and not body.stream:
        raise invalid_request("stream_options is only allowed when stream is true", "stream_options")
    if body.prompt_logprobs is not None:
        _logprobs(body.prompt_logprobs, "prompt_logprobs")
        if body.stream:
            raise invalid_request("prompt_logprobs is not allowed when stream is true", "prompt_logprobs")
    if body.cache_salt is not None and not 1 <= len(body.cache_salt) <= MAX_SALT_CHARS:
        raise invalid_request(f"cache_salt must have 1 to {MAX_SALT_CHARS} characters", "cache_salt")
    return GenerationParams(
        body=body,
        prompt_param=prompt_param,
        max_tokens=max_tokens,
        logprobs=logprobs,
        num_choices=n,
        stops=_stops(body.stop),
        echo=echo,
    )


def chat_ending(
    messages: Sequence[ChatMessage], add_header: bool | None, continue_last: bool | None
) -> GenerationPrompt:
    """Return where the prompt of a chat ends: after the header of the assistant's answer, after the last message, or
    within the last message. `add_header`, `continue_last`: the body's fields `add_generation_prompt` and
    `continue_final_message`. Raises INVALID_REQUEST where both are true, or where the last message is to be continued
    and has no content."""
    if not continue_last:
        return GenerationPrompt.CLOSED if add_header is False else GenerationPrompt.HEADER
    if add_header:
        raise invalid_request(
            "continue_final_message and add_generation_prompt must not both be true", "continue_final_message"
        )
    if messages and messages[-1].content is None:
        raise invalid_request("continue_final_message requires a last message with content", "continue_final_message")
    return GenerationPrompt.OPEN


def conversation(messages: Sequence[ChatMessage]) -> list[dict[str, Any]]:
    """Convert a chat's messages into the dictionaries that chat templates take; the text parts of one message are
    joined by line breaks. Raises INVALID_REQUEST or UNSUPPORTED, naming the field."""
    if not messages:
        raise invalid_request("messages must hold at least one message", "messages")
    if len(messages) > MAX_MESSAGES:
        raise invalid_request(f"messages must hold at most {MAX_MESSAGES} messages, got {len(messages)}", "messages")
    return [_message(message, f"messages[{index}]") for index, message in enumerate(messages)]


def _message(message: ChatMessage, where: str) -> dict[str, Any]:
    if message.role not in ROLES:
        text = f"{where}.role must be one of {', '.join(sorted(ROLES))}, got {message.role!r}"
        raise invalid_request(text, f"{where}.role")
    for name in _UNSERVED_IN_MESSAGES:
        if getattr(message, name):
            param = f"{where}.{name}"
            raise TandemError(ErrorKind.UNSUPPORTED, f"{param} is not supported; remove it", param=param)
    content = message.content
    if content is None and message.role == "assistant":
        content = ""  # the message has only tool calls, reasoning or a refusal
    if content is None:
        raise invalid_request(f"{where}.content must be a string or a list of text parts", f"{where}.content")
    if not isinstance(content, str):
        texts = []
        for index, part in enumerate(content):
            param = f"{where}.content[{index}]"
            if part.type != "text":
                text = f"{param} has type {part.type!r}, and this server supports text only"
                raise TandemError(ErrorKind.UNSUPPORTED, text, param=param)
            if part.text is None:
                raise invalid_request(f"{param}.text is missing", f"{param}.text")
            texts.append(part.text)
        content = "\n".join(texts)
    facts = {
        "role": message.role,
        "content": content,
        "name": message.name,
        "tool_call_id": message.tool_call_id,
        "tool_calls": parse_message_calls(message.tool_calls, f"{where}.tool_calls") if message.tool_calls else None,
        "reasoning_content": message.reasoning if message.reasoning_content is None else message.reasoning_content,
    }
    return {name: value for name, value in facts.items() if value is not None}


def new_id(prefix: str) -> str:
    """Return `prefix` followed by 32 random hexadecimal digits."""
    return prefix + secrets.token_hex(16)


def request(
    params: GenerationParams,
    served: ServedModel,
    prompt: tuple[int, ...],
    identity: str,
    caller: RequestContext,
    traceparent: str = "",
) -> Request:
    """Build the Request of one prompt, which workers receive.

    `prompt`: token ids. `identity`: id of the request. `traceparent`: W3C trace header to pass on; empty: none. Raises
    CONTEXT_LENGTH where prompt and output do not fit the model's context, or INVALID_REQUEST naming the field."""
    if not prompt:
        raise invalid_request(f"{params.prompt_param} must hold at least one token", params.prompt_param)
    body = params.body
    return Request(
        id=RequestId(identity),
        model=served.name,
        prompt_tokens=prompt,
        sampling=_sampling(params, served, _output_room(params, served, len(prompt))),
        tenant=caller.tenant.id,
        lane=effective_lane(body, caller),
        priority=body.priority or 0,
        cache_salt=body.cache_salt or "",
        retain_s=_retain_s(body),
        num_choices=params.num_choices,
        prompt_logprobs=params.prompt_scores,
        traceparent=traceparent,
    )


def _retain_s(body: SharedBody) -> float:
    """Return for how many seconds the prompt is to be kept in the prefix cache; 0: no longer than others. Raises
    INVALID_REQUEST where the requested time is no positive number or too long."""
    control = body.cache_control
    if control is None:
        return MAX_RETAIN_S if body.prompt_cache_retention == "24h" else 0.0
    text = f"{DEFAULT_TTL if control.ttl is None else control.ttl}"
    number, unit = (text[:-1], text[-1]) if text[-1:] in _UNITS_S else (text, "s")
    try:
        seconds = float(number) * _UNITS_S[unit]
    except ValueError:
        seconds = math.nan
    if not 0 < seconds <= MAX_RETAIN_S:
        rule = f'must be at most {MAX_RETAIN_S:g} seconds, as a number or as "5m" or "1h"'
        raise invalid_request(f"cache_control.ttl {rule}, got {control.ttl!r}", "cache_control.ttl")
    return seconds


def effective_lane(body: SharedBody, caller: RequestContext) -> Lane:
    """Return the lane of a request, which is not more urgent than the tenant's own lane.

    The client names the lane in a header (`caller.lane`) or, without the header, in the body's `service_tier`. Where it
    names none, or one more urgent than the tenant's own, the request gets the tenant's own lane.
    """
    requested = _TIERS.get(body.service_tier or "") if caller.lane is None else caller.lane
    return caller.tenant.lane if requested is None else max(requested, caller.tenant.lane)


def _output_room(params: GenerationParams, served: ServedModel, num_prompt_tokens: int) -> int:
    room = served.max_model_len - num_prompt_tokens
    if room < 0 or (room == 0 and params.max_tokens != 0):
        raise prompt_too_long(served.max_model_len, num_prompt_tokens, params.prompt_param)
    if params.max_tokens is None:
        return room
    if params.max_tokens > room:
        total = num_prompt_tokens + params.max_tokens
        message = (
            f"this model's maximum context length is {served.max_model_len} tokens, but {total} were requested: "
            f"{num_prompt_tokens} of prompt and {params.max_tokens} of output; shorten {params.prompt_param} or lower "
            "max_tokens"
        )
        raise TandemError(ErrorKind.CONTEXT_LENGTH, message, param=params.prompt_param)
    return params.max_tokens


def _sampling(params: GenerationParams, served: ServedModel, max_tokens: int) -> SamplingParams:
    body, text = params.body, served.text
    defaults = text.defaults
    top_k = int(_first(body.top_k, defaults.top_k, 0))
    ends = frozenset[int]() if body.ignore_eos else text.eos_token_ids
    return SamplingParams(
        max_tokens=max_tokens,
        temperature=_first(body.temperature, defaults.temperature, 1.0),
        top_p=_first(body.top_p, defaults.top_p, 1.0),
        top_k=0 if top_k == -1 else top_k,  # other servers write -1 for off
        min_p=_first(body.min_p, defaults.min_p, 0.0),
        seed=_seed(body.seed),
        stop_token_ids=ends | _stop_token_ids(body.stop_token_ids or [], text.vocab_size),
        logprobs=params.logprobs,
        presence_penalty=_first(body.presence_penalty, None, 0.0),
        frequency_penalty=_first(body.frequency_penalty, None, 0.0),
        repetition_penalty=_first(body.repetition_penalty, defaults.repetition_penalty, 1.0),
        logit_bias=_logit_bias(body.logit_bias or {}, text.vocab_size),
        min_tokens=body.min_tokens or 0,
    )


def _stop_token_ids(tokens: Sequence[int], vocab_size: int) -> frozenset[int]:
    if len(tokens) > MAX_NAMED_TOKENS:
        raise invalid_request(
            f"stop_token_ids holds {len(tokens)} tokens, at most {MAX_NAMED_TOKENS} are allowed", "stop_token_ids"
        )
    return frozenset(checked_tokens(tokens, vocab_size, "stop_token_ids"))


def _logit_bias(bias: dict[str, float], vocab_size: int) -> tuple[tuple[int, float], ...]:
    """Check the biases and sort them by token id. Keys must be decimal without leading zeros, so that no token can
    occur twice."""
    if len(bias) > MAX_NAMED_TOKENS:
        message = f"logit_bias holds {len(bias)} tokens, at most {MAX_NAMED_TOKENS} are allowed"
        raise invalid_request(message, "logit_bias")
    for key in bias:
        if not _TOKEN_ID.fullmatch(key) or int(key) >= vocab_size:
            message = f"logit_bias.{key} must be a token id in [0, {vocab_size}) in decimal"
            raise invalid_request(message, f"logit_bias.{key}")
    return tuple(sorted((int(key), value) for key, value in bias.items()))


def _first(requested: float | None, recommended: float | None, otherwise: float) -> float:
    return next(value for value in (requested, recommended, otherwise) if value is not None)


def _seed(seed: int | None) -> int:
    """Map a client's signed or unsigned 64-bit seed to [0, 2**64); pick a random one where the client sent none."""
    if seed is None:
        return secrets.randbits(64)
    if not -(2**63) <= seed < 2**64:
        raise invalid_request(f"seed must fit in 64 bits, got {seed}", "seed")
    return seed % 2**64


def _max_tokens(limit: int | None, param: str, *, least: int) -> int | None:
    if limit is not None and limit < least:
        raise invalid_request(f"{param} must be at least {least}, got {limit}", param)
    return limit


def _logprobs(count: int, param: str) -> int:
    if not 0 <= count <= MAX_TOP_LOGPROBS:
        raise invalid_request(f"{param} must be in [0, {MAX_TOP_LOGPROBS}], got {count}", param)
    return count


def _stops(stop: str | list[str] | None) -> tuple[str, ...]:
    stops = [stop] if isinstance(stop, str) else stop or []
    if len(stops) > MAX_STOPS:
        raise invalid_request(f"stop must hold at most {MAX_STOPS} strings, got {len(stops)}", "stop")
    if any(not 1 <= len(text) <= MAX_STOP_CHARS for text in stops):
        raise invalid_request(f"stop strings must have 1 to {MAX_STOP_CHARS} characters each", "stop")
    return tuple(dict.fromkeys(stops))
