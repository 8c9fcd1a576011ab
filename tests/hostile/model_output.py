"""Fuzz target: the text that a model writes, as the parsers of tool calls and of reasoning read it."""

from __future__ import annotations

import json
from collections.abc import Iterator

from tandem.gateway.output.reasoning_parser import ReasoningParser
from tandem.gateway.output.text_stream import Delta, ToolCallDelta
from tandem.gateway.output.tool_call_parser import ToolCallParser
from tandem.gateway.output.tool_formats import HERMES, LLAMA3, MISTRAL, MISTRAL_V11
from tests.hostile.surface import Surface

_FORMATS = (HERMES, LLAMA3, MISTRAL, MISTRAL_V11)


def _read(data: bytes) -> None:
    """Read a text; the first byte chooses the notation of calls. How the text is cut does not change what is found,
    and the arguments of a call that was not begun early are JSON."""
    text = data[1:].decode("utf-8", "replace")
    sign = data[0] if data else 0
    whole = _split(text, len(text) or 1, sign, is_eager=False)
    assert whole == _split(text, 3, sign, is_eager=False)
    assert _split(text, len(text) or 1, sign, is_eager=True) == _split(text, 1, sign, is_eager=True)
    for arguments in whole[2].values():
        assert isinstance(json.loads(arguments), dict)


def _split(text: str, size: int, sign: int, *, is_eager: bool) -> tuple[str, str, dict[int, str]]:
    """Return reasoning, plain text, and the arguments of each call by its index."""
    reasoning = ReasoningParser(is_open=bool(sign & 4))
    calls = ToolCallParser(_FORMATS[sign & 3], {"add"}, lambda: "id", is_eager=is_eager, max_calls=4)
    found = [calls.split(reasoning.split(delta, is_last), is_last) for delta, is_last in _deltas(text, size)]
    pieces: list[ToolCallDelta] = [piece for delta in found for piece in delta.tool_calls]
    arguments: dict[int, str] = {}
    for piece in pieces:
        arguments[piece.index] = arguments.get(piece.index, "") + piece.arguments
    return "".join(delta.reasoning for delta in found), "".join(delta.text for delta in found), arguments


def _deltas(text: str, size: int) -> Iterator[tuple[Delta, bool]]:
    for start in range(0, len(text), size):
        yield Delta(text[start : start + size], start), False
    yield Delta("", len(text)), True


SURFACES = {
    "model-output": Surface(
        read=_read,
        seeds=(
            b'\0hi <tool_call>\n{"name": "add", "arguments": {"a": [1, "}"]}}\n</tool_call>',
            b'\1{"name": "add", "parameters": {"a": "\\""}}; {"name": "add", "parameters": {}}',
            b'\2[TOOL_CALLS][{"name": "add", "arguments": {"a": null}}, {"name": "add", "arguments": {}}]',
            b'\3[TOOL_CALLS]add[ARGS]{"a": 1}[TOOL_CALLS]add[ARGS]{}',
            b"\4I think</think>\n\nfour",
            b"\0<think>so</think><tool_call>{}</tool_call> x",
        ),
    )
}
