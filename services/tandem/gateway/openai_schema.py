"""The bodies of OpenAI's requests, and what of them is served; parses strictly and never guesses at a field."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec

from tandem.core.errors import ErrorKind, TandemError
from tandem.gateway.response_format import ResponseFormat, StructuredOutputs
from tandem.gateway.tools import MessageCall, Tool, ToolChoice

_WHERE = re.compile(r" - at `\$?\.?(?P<path>.*)`$")
_MISSING = re.compile(r"missing required field `(?P<name>[^`]*)`")

# Fields that would change the answer and that nothing here implements yet, with the values that ask for nothing.
# Fields in neither this table nor the structs below (metadata, user, store, ...) leave the answer as it is.
_OFF: Mapping[str, tuple[Any, ...]] = {
    "functions": (None, []),
    "function_call": (None, "none"),
    "logit_bias": (None, {}),
    "presence_penalty": (None, 0),
    "frequency_penalty": (None, 0),
    "repetition_penalty": (None, 1),
    "echo": (None, False),
    "best_of": (None, 1),
    "suffix": (None, ""),
    "audio": (None,),
    "modalities": (None, ["text"]),
    "prediction": (None,),
    "reasoning_effort": (None,),
    "verbosity": (None,),
    "web_search_options": (None,),
    # Widespread additions of other servers.
    "add_generation_prompt": (None, True),
    "cache_salt": (None, ""),
    "continue_final_message": (None, False),
    "documents": (None, []),
    "include_stop_str_in_output": (None, False),
    "min_tokens": (None, 0),
    "priority": (None, 0),
    "prompt_logprobs": (None,),
    "skip_special_tokens": (None, True),
    "stop_token_ids": (None, []),
    "truncate_prompt_tokens": (None,),
    "use_beam_search": (None, False),
}


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
    include_usage: bool | None = None


class SharedBody(msgspec.Struct, kw_only=True):
    """What chat and plain completions have in common. None and absent mean the same."""

    model: str
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    n: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    ignore_eos: bool | None = None
    return_token_ids: bool | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: str | dict[str, Any] | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None


class ChatBody(SharedBody, kw_only=True):
    messages: list[ChatMessage]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: list[Tool] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None


class CompletionBody(SharedBody, kw_only=True):
    """`prompt` is text, token ids, or a list with one of these."""

    prompt: str | list[int | str | list[int]]
    logprobs: int | None = None


Body = TypeVar("Body", ChatBody, CompletionBody)


def parse(body: bytes, kind: type[Body]) -> Body:
    """The body as `kind`. Raises INVALID_REQUEST with the path of what is wrong, or UNSUPPORTED with the field."""
    try:
        body.decode("utf-8")
        fields = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
        unserved = [name for name in fields if name in _OFF and not _is_off(name, fields[name])]
        if unserved:
            raise TandemError(ErrorKind.UNSUPPORTED, f"{unserved[0]} is not supported", param=unserved[0])
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


def _is_off(name: str, raw: msgspec.Raw) -> bool:
    value = msgspec.json.decode(raw)
    if isinstance(value, bool):  # for Python, but not for JSON, true equals 1
        return any(value is off for off in _OFF[name])
    return value in _OFF[name]


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
