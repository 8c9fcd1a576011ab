"""Translate the requests of inference.proto into the JSON bodies of the HTTP API.

The parser of the HTTP API then checks the bodies, so that both front ends accept and refuse the same requests. Each
field of a message becomes the field of the same name in the body; a field `x_json` becomes the field `x`, whose JSON
text it holds; absent and empty fields are left out. `_SHAPES` has the messages whose structure differs from the JSON.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import msgspec
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from tandem.core.errors import ErrorKind, TandemError
from tandem.gateway.openai.request_schema import Body, ChatBody, CompletionBody, DetokenizeBody, parse

_JSON_SUFFIX = "_json"
_RENAMED = {"content_parts": "content"}
"""JSON names of proto fields that exist because OpenAI's field has two types. If both are set, the later field of the
message wins."""


_REQUIRED_LISTS: Mapping[type[msgspec.Struct], str] = {
    ChatBody: "messages",
    CompletionBody: "prompt",
    DetokenizeBody: "tokens",
}
"""Lists that a body must have though its message may lack them; a message cannot tell an empty list from an absent
one."""


def body_of(request: Message, kind: type[Body], *, stream: bool = False) -> Body:
    """Translate a request message into a body of type `kind`, and return the body.

    `stream`: value of the body's field `stream`. Raises INVALID_REQUEST or UNSUPPORTED, as `parse` does.
    """
    fields: dict[str, Any] = {"stream": True} if stream else {}
    if kind in _REQUIRED_LISTS:
        fields[_REQUIRED_LISTS[kind]] = []
    return parse(msgspec.json.encode({**fields, **_plain(request, "")}), kind)


def _plain(message: Message, where: str) -> Any:
    shape = _SHAPES.get(message.DESCRIPTOR.name)
    if shape is not None:
        return shape(message)
    facts: dict[str, Any] = {}
    for field, value in message.ListFields():
        name = _RENAMED.get(field.name, field.name.removesuffix(_JSON_SUFFIX))
        path = f"{where}.{name}" if where else name
        if field.name.endswith(_JSON_SUFFIX):
            facts[name] = _decoded(value, path)
        else:
            facts[name] = _value(field, value, path)
    return facts


def _value(field: FieldDescriptor, value: Any, path: str) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _finite(item, f"{path}.{key}") for key, item in value.items()}
    if field.is_repeated:
        if field.message_type is None:
            return list(value)
        return [_plain(item, f"{path}[{index}]") for index, item in enumerate(value)]
    if field.message_type is not None:
        return _plain(value, path)
    return _finite(value, path)


def _finite(value: Any, path: str) -> Any:
    """Return the value; raise INVALID_REQUEST for a float that is infinite or not a number, which JSON cannot
    express."""
    if isinstance(value, float) and not math.isfinite(value):
        raise TandemError(ErrorKind.INVALID_REQUEST, f"{path} must be a finite number, got {value}", param=path)
    return value


def _decoded(text: str, path: str) -> Any:
    try:
        return msgspec.json.decode(text)
    except RecursionError:
        message = f"{path} is nested too deeply"
    except ValueError as error:
        message = f"{path} is not valid JSON: {error}"
    raise TandemError(ErrorKind.INVALID_REQUEST, message, param=path)


def _prompt(message: Any) -> str | list[int]:
    return message.text if message.WhichOneof("prompt") != "token_ids" else list(message.token_ids.ids)


def _tool_choice(message: Any) -> str | dict[str, Any]:
    if message.WhichOneof("choice") == "function":
        return {"type": "function", "function": {"name": message.function}}
    return str(message.mode)


_SHAPES: Mapping[str, Callable[[Any], Any]] = {"Prompt": _prompt, "ToolChoice": _tool_choice}
