"""Describe tools in the prompt of a model whose chat template has no place for them, in Hermes' notation.

The notation is that of Nous Research's Hermes models, which Qwen's templates adopted: signatures within `<tools>`,
calls within `<tool_call>`, results within `<tool_response>`."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

_BEFORE = """# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
"""
_AFTER = """
</tools>

For each function call, return a json object with function name and arguments within <tool_call></tool_call> XML tags:
<tool_call>
{"name": <function-name>, "arguments": <args-json-object>}
</tool_call>"""


def with_tools(messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return `messages` rewritten for a template without tools.

    The tools are described in a system message before the conversation, or at the end of its first system message.
    Calls become text of the assistant, and results become messages of the user."""
    conversation = [_without_tool_fields(message) for message in messages]
    if not tools:
        return conversation
    block = _BEFORE + "\n".join(_to_json(tool) for tool in tools) + _AFTER
    if conversation and conversation[0]["role"] in ("system", "developer"):
        first = conversation[0]
        return [{**first, "content": f"{first['content']}\n\n{block}"}, *conversation[1:]]
    return [{"role": "system", "content": block}, *conversation]


def _without_tool_fields(message: Mapping[str, Any]) -> dict[str, Any]:
    content = message["content"]
    if message["role"] == "tool":
        return {"role": "user", "content": f"<tool_response>\n{content}\n</tool_response>"}
    calls = message.get("tool_calls")
    if not calls:
        return dict(message)
    call_texts = [f"<tool_call>\n{_to_json(call['function'])}\n</tool_call>" for call in calls]
    rest = {name: value for name, value in message.items() if name != "tool_calls"}
    return {**rest, "content": "\n".join([content, *call_texts] if content else call_texts)}


def _to_json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
