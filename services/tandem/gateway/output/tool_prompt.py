"""Tells a model whose chat template knows no tools about them, in Hermes' form; never used where the template does.

The form is that of Nous Research's Hermes models, which Qwen's templates took over: signatures within `<tools>`, calls
within `<tool_call>`, results within `<tool_response>`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

_BEFORE = """# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
"""
_BEHIND = """
</tools>

For each function call, return a json object with function name and arguments within <tool_call></tool_call> XML tags:
<tool_call>
{"name": <function-name>, "arguments": <args-json-object>}
</tool_call>"""


def with_tools(messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The conversation as one without tools: they are described in a system message before it, at the end of the first
    one if there is one; calls are text of the assistant, and results are said by the user."""
    told = [_plain(message) for message in messages]
    if not tools:
        return told
    block = _BEFORE + "\n".join(_written(tool) for tool in tools) + _BEHIND
    if told and told[0]["role"] in ("system", "developer"):
        first = told[0]
        return [{**first, "content": f"{first['content']}\n\n{block}"}, *told[1:]]
    return [{"role": "system", "content": block}, *told]


def _plain(message: Mapping[str, Any]) -> dict[str, Any]:
    content = message["content"]
    if message["role"] == "tool":
        return {"role": "user", "content": f"<tool_response>\n{content}\n</tool_response>"}
    calls = message.get("tool_calls")
    if not calls:
        return dict(message)
    written = [f"<tool_call>\n{_written(call['function'])}\n</tool_call>" for call in calls]
    rest = {name: value for name, value in message.items() if name != "tool_calls"}
    return {**rest, "content": "\n".join([content, *written] if content else written)}


def _written(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
