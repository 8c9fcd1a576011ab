"""The bodies of OpenAI's requests, and what of them is served; parses strictly and never guesses at a field."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, Literal, TypeVar

import msgspec

from tandem.core.errors import ErrorKind, TandemError
from tandem.gateway.output.response_format import ResponseFormat, StructuredOutputs
from tandem.gateway.output.tools import MessageCall, Tool, ToolChoice

_WHERE = re.compile(r" - at `\$?\.?(?P<path>.*)`$")
_MISSING = re.compile(r"missing required field `(?P<name>[^`]*)`")

# Fields that would change the answer and that nothing here implements yet, with the values that ask for nothing.
# Fields in neither these tables nor the structs below (metadata, store, ...) leave the answer as it is.
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
    "documents": (None, []),
    "length_penalty": (None, 1),
    "truncate_prompt_tokens": (None,),
    "use_beam_search": (None, False),
}
_INSTEAD = {"functions": "tools", "function_call": "tool_choice"}
"""OpenAI's own older names for what is served."""
_OFF_IN_CHAT = {**_OFF, "echo": (None, False), "best_of": (None, 1)}
_OFF_IN_COMPLETIONS = {**_OFF, "suffix": (None, ""), "top_logprobs": (None,)}


class ContentPart(msgspec.Struct):
    """One part of a message; only `type` "text" is served."""

    type: str
    text: str | None = None


class ChatMessage(msgspec.Struct):
    role: str
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_call_id: str | None = None
    tool_calls: list[MessageCall] | None = None
    reasoning_content: str | None = None
    function_call: dict[str, Any] | None = None
    audio: dict[str, Any] | None = None


class StreamOptions(msgspec.Struct):
    """`continuous_usage_stats`: each chunk tells the usage so far, not only the last one."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class SharedBody(msgspec.Struct, kw_only=True):
    """What chat and plain completions have in common. None and absent mean the same.

    Ranges are checked where the request is made. `stop` strings and `stop_token_ids` are not part of the text unless
    `include_stop_str_in_output`. `logit_bias` is by token id as a decimal string. `priority`: lower runs first within a
    lane. `service_tier` names a lane: priority, default or flex. `cache_salt` keeps the prompt's cached prefix apart.
    `prompt_logprobs` is how many alternatives to tell for each token of the prompt. `user` names a session where no
    header does; `spaces_between_special_tokens` says nothing that the tokenizers here heed.
    """

    model: str
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    min_tokens: int | None = None
    logit_bias: dict[str, float] | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    n: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    add_special_tokens: bool | None = None
    prompt_logprobs: int | None = None
    return_token_ids: bool | None = None
    priority: int | None = None
    service_tier: Literal["auto", "default", "flex", "scale", "priority"] | None = None
    cache_salt: str | None = None
    user: str | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: str | dict[str, Any] | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None


class ChatBody(SharedBody, kw_only=True):
    """`max_completion_tokens` is OpenAI's later name for `max_tokens`, and goes before it. Templates get
    `chat_template_kwargs` as variables. With `continue_final_message` the answer goes on where the last message
    ends."""

    messages: list[ChatMessage]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    tools: list[Tool] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None


class CompletionBody(SharedBody, kw_only=True):
    """`prompt` is one text or one list of token ids, or a list of either, answered side by side. `echo` gives the
    prompt back before the answer, with its scores where `logprobs` are asked for."""

    prompt: str | list[int | str | list[int]]
    logprobs: int | None = None
    echo: bool | None = None
    best_of: int | None = None


class TokenizeBody(msgspec.Struct, kw_only=True):
    """Either `prompt` or `messages`. A prompt gets the tokenizer's own special tokens unless `add_special_tokens` is
    false, and messages get them only if it is true, because a chat template writes its own. `tools` are what the
    template shows with the messages."""

    model: str | None = None
    prompt: str | None = None
    messages: list[ChatMessage] | None = None
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
    ChatBody: _OFF_IN_CHAT,
    CompletionBody: _OFF_IN_COMPLETIONS,
    TokenizeBody: {},
    DetokenizeBody: {},
}
Body = TypeVar("Body", ChatBody, CompletionBody, TokenizeBody, DetokenizeBody)


def parse(body: bytes, kind: type[Body]) -> Body:
    """The body as `kind`. Raises INVALID_REQUEST with the path of what is wrong, or UNSUPPORTED with the field."""
    try:
        body.decode("utf-8")
        fields = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
        _check_names(body, fields)
        off = _OFF_OF[kind]
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
    raise TandemError(ErrorKind.INVALID_REQUEST, message)


def _check_names(body: bytes, fields: Mapping[str, msgspec.Raw]) -> None:
    """Raises INVALID_REQUEST for a field that is there twice: whoever looked at this body before may have read the
    other one. A body without blanks is as long as its fields written again, so it is not read again."""
    if len(msgspec.json.encode(fields)) == len(body):
        return
    seen: set[str] = set()
    for name, _ in json.loads(body, object_pairs_hook=list):
        if name in seen:
            raise TandemError(ErrorKind.INVALID_REQUEST, f"{name} is there more than once", param=name)
        seen.add(name)


def _unserved(name: str) -> str:
    instead = _INSTEAD.get(name)
    return f"{name} is not supported" + (f"; use {instead}" if instead else "")


def _is_off(raw: msgspec.Raw, off: tuple[Any, ...]) -> bool:
    value = msgspec.json.decode(raw)
    if isinstance(value, bool):  # for Python, but not for JSON, true equals 1
        return any(value is each for each in off)
    return value in off


def _misfit(message: str) -> TandemError:
    """msgspec says `Expected ... - at `$.path``; the path goes into `param` too."""
    where = _WHERE.search(message)
    missing = _MISSING.search(message)
    path = [where["path"]] if where else []
    path += [missing["name"]] if missing else []
    if not path:
        return TandemError(ErrorKind.INVALID_REQUEST, f"the request body does not fit: {message}")
    param = ".".join(path)
    what = message[: where.start()] if where else message
    return TandemError(ErrorKind.INVALID_REQUEST, f"{param}: {what}", param=param)
