"""Check the tools of a chat body, and resolve which of them the model may or must call."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from tandem.core.errors import ErrorKind, TandemError, invalid_request
from tandem.gateway.output.json_limits import check_depth

MAX_TOOLS = 128
_NAME = re.compile(r"[a-zA-Z0-9_.-]{1,64}")


class FunctionTool(msgspec.Struct, omit_defaults=True):
    """Function that a model may call. `parameters`: the JSON schema of its arguments, an object. `strict`: keywords of
    the schema that cannot be enforced are refused; without it they are ignored."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(msgspec.Struct, omit_defaults=True):
    """Entry of `tools` in a chat body; only the `type` "function" is supported."""

    type: str
    function: FunctionTool


class FunctionName(msgspec.Struct):
    name: str


class NamedTool(msgspec.Struct):
    """Value of `tool_choice` that names the one tool to call."""

    type: str
    function: FunctionName


class CalledFunction(msgspec.Struct):
    """Function name and arguments of a tool call. `arguments`: the JSON text of an object; some clients send the object
    itself."""

    name: str
    arguments: str | dict[str, Any] = "{}"


class MessageCall(msgspec.Struct):
    """Tool call in an earlier message of the assistant."""

    function: CalledFunction
    id: str | None = None
    type: str = "function"


ToolChoice = Literal["none", "auto", "required"] | NamedTool


@dataclass(frozen=True, slots=True)
class ToolSet:
    """Tools of one request, and which of them the model may or must call.

    `shown`: the tools as the chat template receives them. `callable_tools`: those that may be called. `is_required`: at
    least one call is required. `max_calls`: largest number of calls; None: no limit."""

    shown: tuple[dict[str, Any], ...]
    callable_tools: tuple[FunctionTool, ...]
    is_required: bool
    max_calls: int | None

    @property
    def names(self) -> frozenset[str]:
        """Return the names of the callable tools."""
        return frozenset(tool.name for tool in self.callable_tools)

    def parameter(self, tool: FunctionTool) -> str:
        """Return the path of the body field that holds this tool's schema, for errors."""
        index = next(i for i, shown in enumerate(self.shown) if shown["function"]["name"] == tool.name)
        return f"tools[{index}].function.parameters"


def make_tool_set(tools: Sequence[Tool] | None, choice: ToolChoice | None, parallel: bool | None) -> ToolSet | None:
    """Check `tools`, `tool_choice` and `parallel_tool_calls` of a body and return its ToolSet; None where there are no
    tools, or where none of them may be called.

    Raises INVALID_REQUEST or UNSUPPORTED, naming the field."""
    if not tools:
        if choice not in (None, "none", "auto"):
            raise invalid_request("tool_choice requires a tool call, but tools is empty or missing", "tool_choice")
        return None
    _check(tools)
    functions = tuple(tool.function for tool in tools)
    shown = tuple(msgspec.to_builtins(tool) for tool in tools)
    max_calls = 1 if parallel is False else None
    if isinstance(choice, NamedTool):
        named = tuple(function for function in functions if function.name == choice.function.name)
        if choice.type != "function" or not named:
            raise invalid_request(f"tool_choice names {choice.function.name!r}, which is not in tools", "tool_choice")
        return ToolSet(shown, named, is_required=True, max_calls=1)
    if choice == "none":
        return None
    return ToolSet(shown, functions, is_required=choice == "required", max_calls=max_calls)


def parse_message_calls(calls: Sequence[MessageCall], where: str) -> list[dict[str, Any]]:
    """Return the tool calls of an earlier assistant message as chat templates expect them, with arguments as objects.

    `where`: path of the body field with the calls. Raises INVALID_REQUEST naming the call's field where its arguments
    are no JSON object."""
    return [
        {
            "type": "function",
            **({"id": call.id} if call.id else {}),
            "function": {
                "name": call.function.name,
                "arguments": _object(call.function.arguments, f"{where}[{index}].function.arguments"),
            },
        }
        for index, call in enumerate(calls)
    ]


def _object(arguments: str | dict[str, Any], param: str) -> dict[str, Any]:
    if isinstance(arguments, dict):
        check_depth(arguments, param)
        return arguments
    try:
        value = msgspec.json.decode(arguments or "{}")
    except (ValueError, RecursionError) as error:
        raise invalid_request(f"{param} is not valid JSON: {error}", param) from None
    if not isinstance(value, dict):
        raise invalid_request(f"{param} must be a JSON object", param)
    check_depth(value, param)
    return value


def _check(tools: Sequence[Tool]) -> None:
    if len(tools) > MAX_TOOLS:
        raise invalid_request(f"tools must hold at most {MAX_TOOLS} tools, got {len(tools)}", "tools")
    seen: set[str] = set()
    for index, tool in enumerate(tools):
        where = f"tools[{index}]"
        if tool.type != "function":
            message = f"{where}.type must be function, got {tool.type!r}"
            raise TandemError(ErrorKind.UNSUPPORTED, message, param=f"{where}.type")
        name = tool.function.name
        if not _NAME.fullmatch(name):
            message = (
                f"{where}.function.name must have 1 to 64 letters, digits, dots, dashes or underscores, got {name!r}"
            )
            raise invalid_request(message, f"{where}.function.name")
        if name in seen:
            raise invalid_request(f"{where}.function.name {name!r} occurs twice", f"{where}.function.name")
        seen.add(name)
        check_depth(tool.function.parameters, f"{where}.function.parameters")
