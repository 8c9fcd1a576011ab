"""Define and parse the bodies of OpenAI's requests, strictly: a field of the wrong type or an unsupported one is an
error, and nothing is guessed."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta

from tandem.core.config import Disaggregation
from tandem.core.errors import ErrorKind, TandemError, invalid_request
from tandem.core.request import MAX_CHOICES, MAX_COUNT, MAX_TOP_LOGPROBS
from tandem.gateway.output.response_format import ResponseFormat, StructuredOutputs
from tandem.gateway.output.tools import MessageCall, Tool, ToolChoice

_WHERE = re.compile(r" - at `\$?\.?(?P<path>.*)`$")
_EXPECTED = re.compile(r"Expected `(?P<expected>[^`]*)`, got `(?P<got>[^`]*)`")
_JSON_TYPES = {"str": "string", "int": "integer", "float": "number", "bool": "boolean"}
_MISSING = re.compile(r"missing required field `(?P<name>[^`]*)`")

# Fields that would change the response and that are not implemented, with the values that mean "off".
# Fields in neither these tables nor the structs below (metadata, store, ...) do not change the response: ignored.
_OFF: Mapping[str, tuple[Any, ...]] = {
    "functions": (None, []),
    "function_call": (None, "none"),
    "audio": (None,),
    "modalities": (None, ["text"]),
    "prediction": (None,),
    "reasoning_effort": (None,),
    "verbosity": (None,),
    "web_search_options": (None,),
    # Widespread additions of other servers.
    "allowed_token_ids": (None, []),
    "bad_words": (None, []),
    "chat_template": (None,),
    "documents": (None, []),
    "length_penalty": (None, 1),
    "logprob_token_ids": (None,),
    "prompt_embeds": (None,),
    "repetition_detection": (None,),
    "return_prompt_text": (None, False),
    "return_tokens_as_token_ids": (None, False),
    "thinking_token_budget": (None, -1),
    "truncate_prompt_tokens": (None,),
    "use_beam_search": (None, False),
    "watermarking": (None, False),
}
_INSTEAD = {"functions": "tools", "function_call": "tool_choice"}
"""OpenAI's older fields, and the supported field to use instead of each."""

MAX_SALT_CHARS = 256
_MAX_SEARCHED = 256 << 10
"""Size in bytes of the largest body that is parsed in full to name a repeated field: a larger one may take 0.2 s."""


def _range(**keywords: float) -> Meta:
    """Document the range of a field in openapi.json. `request_params` and core's requests check it, with errors that
    name the range and the value."""
    return Meta(extra_json_schema=keywords)


_Penalty = Annotated[float | None, _range(minimum=-2, maximum=2)]
_NumAlternatives = Annotated[int | None, _range(minimum=0, maximum=MAX_TOP_LOGPROBS)]
_NumTokens = Annotated[int | None, _range(minimum=0)]


class ContentPart(msgspec.Struct):
    """Hold one part of a message's content; only the `type` "text" is supported."""

    type: str
    text: str | None = None


class ChatMessage(msgspec.Struct):
    """Message of a chat. `reasoning`: vLLM's later name for `reasoning_content`, which overrides it."""

    role: str
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_call_id: str | None = None
    tool_calls: list[MessageCall] | None = None
    reasoning_content: str | None = None
    function_call: dict[str, Any] | None = None
    audio: dict[str, Any] | None = None
    reasoning: str | None = None


class StreamOptions(msgspec.Struct):
    """Options of a streamed response. `include_usage`: the last chunk has the token usage. `continuous_usage_stats`:
    with `include_usage`, every chunk has the usage up to then."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class CacheControl(msgspec.Struct):
    """How long to keep the prompt in the prefix cache. `ttl`: seconds, or a number with s, m or h; default "5m"."""

    type: Literal["ephemeral"]
    ttl: str | float | None = None


class SharedBody(msgspec.Struct, kw_only=True):
    """Fields that chat and plain completions have in common. None and absent mean the same.

    Ranges are checked in `request_params`. `stop`, `stop_token_ids`: the text that they match is left out of the output
    unless `include_stop_str_in_output`. `logit_bias`: by token id as a decimal string. `priority`: lower runs first
    within a lane. `service_tier`: names a lane, as priority, default or flex. `cache_salt`: only requests with the same
    salt share cached prefixes. `cache_control`: how long to keep the prompt in the prefix cache; for OpenAI this is
    `prompt_cache_retention`. `prompt_logprobs`: number of alternatives to return for each token of the prompt. `user`:
    names the session where no header does. `disaggregation`: as the header `x-tandem-disaggregation`, which takes
    precedence. `spaces_between_special_tokens`: accepted, but without effect.
    """

    model: str
    max_tokens: _NumTokens = None
    temperature: Annotated[float | None, _range(minimum=0, maximum=2)] = None
    top_p: Annotated[float | None, _range(exclusiveMinimum=0, maximum=1)] = None
    top_k: Annotated[int | None, _range(minimum=-1, maximum=MAX_COUNT)] = None
    min_p: Annotated[float | None, _range(minimum=0, maximum=1)] = None
    seed: Annotated[int | None, _range(minimum=-(2**63), maximum=2**64 - 1)] = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    min_tokens: _NumTokens = None
    logit_bias: dict[str, float] | None = None
    presence_penalty: _Penalty = None
    frequency_penalty: _Penalty = None
    repetition_penalty: Annotated[float | None, _range(exclusiveMinimum=0, maximum=10)] = None
    n: Annotated[int | None, _range(minimum=1, maximum=MAX_CHOICES)] = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    add_special_tokens: bool | None = None
    prompt_logprobs: _NumAlternatives = None
    return_token_ids: bool | None = None
    priority: Annotated[int | None, _range(minimum=-MAX_COUNT, maximum=MAX_COUNT)] = None
    service_tier: Literal["auto", "default", "flex", "scale", "priority"] | None = None
    cache_salt: Annotated[str | None, _range(minLength=1, maxLength=MAX_SALT_CHARS)] = None
    cache_control: CacheControl | None = None
    prompt_cache_retention: Literal["in_memory", "in-memory", "24h"] | None = None
    user: str | None = None
    disaggregation: Disaggregation | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: str | dict[str, Any] | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None


class ChatBody(SharedBody, kw_only=True):
    """Body of /v1/chat/completions.

    `max_completion_tokens`: OpenAI's later name for `max_tokens`, which it overrides. `chat_template_kwargs`: variables
    for the chat template. `continue_final_message`: the output continues the last message instead of beginning a new
    one."""

    messages: Annotated[list[ChatMessage], _range(minItems=1)]
    max_completion_tokens: Annotated[int | None, _range(minimum=1)] = None
    logprobs: bool | None = None
    top_logprobs: _NumAlternatives = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    tools: list[Tool] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None


class CompletionBody(SharedBody, kw_only=True):
    """Body of /v1/completions.

    `prompt`: one text, one list of token ids, or a list of several texts or of several lists of token ids, which are
    separate prompts and served concurrently. `echo`: the response repeats the prompt before the output, with the
    prompt's log probabilities where `logprobs` is set."""

    prompt: str | list[int | str | list[int]]
    logprobs: _NumAlternatives = None
    echo: bool | None = None
    best_of: int | None = None


class TokenizeBody(msgspec.Struct, kw_only=True):
    """Body of /tokenize, with either `prompt` or `messages`.

    `add_special_tokens`: the tokenizer's own special tokens are added to a prompt unless this is false, and to messages
    only if it is true, because a chat template writes its own. `tools`: shown by the chat template with the
    messages."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[ChatMessage] | None, _range(minItems=1)] = None
    tools: list[Tool] | None = None
    tool_choice: ToolChoice | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool | None = None


class DetokenizeBody(msgspec.Struct, kw_only=True):
    tokens: list[int]
    model: str | None = None


_OFF_OF: Mapping[type[msgspec.Struct], Mapping[str, tuple[Any, ...]]] = {
    ChatBody: {**_OFF, "echo": (None, False), "best_of": (None, 1), "include_reasoning": (None, True)},
    CompletionBody: {**_OFF, "suffix": (None, ""), "top_logprobs": (None,)},
    TokenizeBody: {"chat_template": (None,)},
}
Body = TypeVar("Body", ChatBody, CompletionBody, TokenizeBody, DetokenizeBody)


def parse(body: bytes, kind: type[Body]) -> Body:
    """Parse a JSON body into a struct of type `kind`.

    Raises INVALID_REQUEST with the path of the wrong, missing or repeated field, or UNSUPPORTED with the name of a
    field that would change the response and is not implemented. Fields without effect on the response are ignored."""
    try:
        if not body.isascii():
            body.decode("utf-8")
        fields = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
        _check_names(body, fields)
        off = _OFF_OF.get(kind, {})
        unserved = [name for name in fields if name in off and not _is_off(fields[name], off[name])]
        if unserved:
            raise TandemError(ErrorKind.UNSUPPORTED, _unserved(unserved[0]), param=unserved[0])
        return msgspec.json.decode(body, type=kind)
    except UnicodeDecodeError as error:
        message = f"the request body is not valid UTF-8 (byte {error.start})"
    except RecursionError:
        message = "the request body is nested too deeply"
    except msgspec.ValidationError as error:
        raise _misfit(str(error)) from None
    except ValueError as error:
        message = f"the request body is not valid JSON: {error}"
    raise invalid_request(message)


def _check_names(body: bytes, fields: Mapping[str, msgspec.Raw]) -> None:
    """Raise INVALID_REQUEST for a field that occurs twice: a proxy that inspected this body may have read the other
    occurrence. A body without duplicates is exactly as long as its fields encoded again, both without whitespace, and
    needs no second parse."""
    encoded = msgspec.json.encode(fields)
    if len(encoded) == len(body) or len(_compact(encoded)) == len(_compact(body)):
        return
    if len(body) > _MAX_SEARCHED:
        raise invalid_request("a field occurs more than once in the request body, or its name is written with escapes")
    seen: set[str] = set()
    for name, _ in json.loads(body, object_pairs_hook=list):
        if name in seen:
            raise invalid_request(f"{name} occurs more than once in the request body", name)
        seen.add(name)


def _compact(body: bytes) -> bytes:
    return msgspec.json.format(body, indent=-1)


def _unserved(name: str) -> str:
    instead = _INSTEAD.get(name)
    return f"{name} is not supported; " + (f"use {instead}" if instead else "remove it from the request")


def _is_off(raw: msgspec.Raw, off: tuple[Any, ...]) -> bool:
    value = msgspec.json.decode(raw)
    if isinstance(value, bool):  # for Python, but not for JSON, true equals 1
        return any(value is each for each in off)
    return value in off


def _misfit(message: str) -> TandemError:
    """Make an INVALID_REQUEST from the message of msgspec, `Expected ... - at `$.path``, with the path as `param`."""
    where = _WHERE.search(message)
    missing = _MISSING.search(message)
    path = [where["path"]] if where else []
    path += [missing["name"]] if missing else []
    if not path:
        return invalid_request(f"the request body {_rule(message)}")
    param = ".".join(path)
    if missing:
        return invalid_request(f"{param} is required and missing", param)
    what = message[: where.start()] if where else message
    return invalid_request(f"{param} {_rule(what)}", param)


def _rule(message: str) -> str:
    """Return the message of msgspec as text that follows a field's name, with JSON's names of types."""
    wrong_type = _EXPECTED.fullmatch(message)
    if wrong_type is None:
        return f"is not valid: {message}; /openapi.json has the schema"
    expected, got = (
        re.sub(r"\w+", lambda word: _JSON_TYPES.get(word[0], word[0]), text) for text in wrong_type.groups()
    )
    return f"must be of type {expected}, got {got}"
