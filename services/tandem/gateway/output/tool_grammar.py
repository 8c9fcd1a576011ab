"""Write the Lark grammar of answers that are tool calls, in the notations that `tool_call_parser` reads."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from llguidance import regex_to_lark

from tandem.core.errors import ErrorKind, TandemError
from tandem.core.grammar import JSON_FORM, Grammar
from tandem.gateway.output.reasoning_parser import CLOSING, OPENING
from tandem.gateway.output.response_format import schema_source
from tandem.gateway.output.tool_formats import ToolCallFormat
from tandem.gateway.output.tools import FunctionTool, ToolSet

MAX_CALLS = 16
"""Largest number of calls in one answer that a grammar allows: without a bound, a small model may repeat calls
forever."""
SpecialToken = Callable[[str], int | None]
"""Function that returns the id of the special token with a text, which a grammar cannot spell; None for other texts."""


def call_rules(tools: ToolSet, call_format: ToolCallFormat, special: SpecialToken, *, is_marked: bool = False) -> str:
    """Return Lark rules that allow one or more calls of the callable tools; the start rule is `calls`. `special`: finds
    special tokens by their text.

    `is_marked`: the first call has its opening mark even where the notation makes the mark optional, so that other JSON
    cannot be read as a call."""
    most = MAX_CALLS if tools.max_calls is None else tools.max_calls
    separator = _quoted(call_format.separator) if call_format.separator else ""
    more = f" ({separator} one){{0,{most - 1}}}" if most > 1 else ""
    opening, closing = _mark(call_format.opening, special), _mark(call_format.closing, special)
    one_of = " | ".join(f"call_{index}" for index in range(len(tools.callable_tools)))
    if call_format.names_first:
        rules = [f"calls: one{more}", f"one: {opening} ({one_of})"]
    elif call_format.is_list:
        rules = [f'calls: {opening} "[" one{more} {closing}', f"one: {one_of}"]
    elif call_format.is_bare:
        first = f"{opening} one" if is_marked else "one"
        rules = [f"calls: {first}{more}", f"one: {one_of}"]
    else:
        rules = [f"calls: one{more}", f'one: {opening} "\\n" ({one_of}) "\\n" {closing}']
    rules += [_call(index, tool, call_format, special) for index, tool in enumerate(tools.callable_tools)]
    return "\n".join(rules)


def answer_grammar(
    form: Grammar | None, calls: str | None, *, special: SpecialToken, may_reason: bool, is_reasoning: bool
) -> Grammar | None:
    """Return the grammar of a whole answer that is either `form` (the requested structured output) or `calls` (rules of
    `call_rules`); None where both are None.

    `may_reason`: the answer may begin with free reasoning. `is_reasoning`: the prompt has opened the reasoning already.
    `special`: finds special tokens by their text. Raises UNSUPPORTED for a Lark `form` together with calls."""
    if form is None and calls is None:
        return None
    if form is not None and calls is None and not may_reason:
        return form
    if form is not None and form.kind == "lark":
        if calls is not None:
            raise TandemError(
                ErrorKind.UNSUPPORTED, "tools and a Lark grammar must not be used together", param="tool_choice"
            )
        return form  # rule names of ours could clash with its own, so it must allow for the reasoning itself
    rules = []
    if form is not None:
        rules.append(f"form: {_inline(form)}")
    kinds = " | ".join(name for name, rule in (("form", form), ("calls", calls)) if rule is not None)
    start = f"({kinds})"
    if may_reason:
        thought = "thought BLANKS" if is_reasoning else f"({_mark(OPENING, special)} thought BLANKS)?"
        start = f"{thought} {start}"
        rules += ["BLANKS: /[ \\n]{0,3}/", _reasoning_rule(special)]
    return Grammar("lark", "\n".join([f"start: {start}", *rules, *([calls] if calls else [])]))


def _reasoning_rule(special: SpecialToken) -> str:
    if special(CLOSING) is not None:
        return f"thought: /(.|\\n)*/ {_mark(CLOSING, special)}"
    return f"thought[suffix={_quoted(CLOSING)}]: /(.|\\n)*/"


def _call(index: int, tool: FunctionTool, call_format: ToolCallFormat, special: SpecialToken) -> str:
    # A schema within a Lark grammar carries the whitespace rules itself.
    schema = schema_source(_parameters(tool), lenient=not tool.strict, options=JSON_FORM)
    name = json.dumps(tool.name)
    if call_format.names_first:
        return f"call_{index}: {_quoted(tool.name)} {_mark(call_format.arguments_mark, special)} %json {schema}"
    head = f'{{"name": {name}, "{call_format.arguments_key}": '
    return f'call_{index}: {_quoted(head)} %json {schema} "}}"'


def _parameters(tool: FunctionTool) -> dict[str, Any]:
    """Return the schema of a tool's arguments, an empty object for a tool without one."""
    if tool.parameters is None:
        return {"type": "object", "properties": {}, "additionalProperties": False}
    return tool.parameters if "type" in tool.parameters else {"type": "object", **tool.parameters}


def _inline(form: Grammar) -> str:
    if form.kind == "json_schema":
        return "%json " + schema_source(json.loads(form.source), options=JSON_FORM)
    return f"/{regex_to_lark(form.source, '')}/"


def _mark(text: str, special: SpecialToken) -> str:
    token = special(text)
    return _quoted(text) if token is None else f"<[{token}]>"


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
