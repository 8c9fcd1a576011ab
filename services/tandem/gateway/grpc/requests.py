"""Translates inference.proto's requests into the JSON bodies of HTTP's; never checks a value, so that both fronts share
one meaning and one set of refusals.

The rule: a field is the body's field of the same name; `x_json` is `x` as JSON text; absent and empty fields are left
out. The messages that are shaped otherwise than the JSON are named in `_SHAPES`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import msgspec
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from tandem.core.errors import ErrorKind, TandemError
from tandem.gateway.openai.request_schema import ChatBody, CompletionBody, DetokenizeBody, TokenizeBody, parse
from tandem.wire.gen import inference_pb2 as pb

_JSON_SUFFIX = "_json"
_RENAMED = {"content_parts": "content"}
"""Where OpenAI's field is of two types, each needs a name; both present, the last one counts."""


def chat_body(request: pb.ChatRequest, *, stream: bool = False) -> ChatBody:
    """Raises INVALID_REQUEST or UNSUPPORTED, as `parse` does."""
    return parse(_encoded(request, messages=[], stream=stream), ChatBody)


def completion_body(request: pb.CompleteRequest, *, stream: bool = False) -> CompletionBody:
    """Raises INVALID_REQUEST or UNSUPPORTED, as `parse` does."""
    return parse(_encoded(request, prompt=[], stream=stream), CompletionBody)


def tokenize_body(request: pb.TokenizeRequest) -> TokenizeBody:
    """Raises INVALID_REQUEST, as `parse` does."""
    return parse(_encoded(request), TokenizeBody)


def detokenize_body(request: pb.DetokenizeRequest) -> DetokenizeBody:
    """Raises INVALID_REQUEST, as `parse` does."""
    return parse(_encoded(request, tokens=[]), DetokenizeBody)


def _encoded(request: Message, **unsaid: Any) -> bytes:
    """`unsaid`: what the body must have where the request has nothing; a list that is empty here is absent there."""
    return msgspec.json.encode({**unsaid, **_plain(request, "")})


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
    """JSON, of which this becomes a body, has no other numbers."""
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
