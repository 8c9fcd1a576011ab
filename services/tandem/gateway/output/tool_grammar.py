"""Writes the grammar of answers that are tool calls, in the form that their family is read in; never compiles it."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from llguidance import regex_to_lark

from tandem.core.errors import ErrorKind, TandemError
from tandem.core.grammar import JSON_FORM, Grammar
from tandem.gateway.output.reasoning_parser import CLOSING, OPENING
from tandem.gateway.output.tool_formats import ToolCallFormat
from tandem.gateway.output.tools import FunctionTool, ToolSet

MAX_CALLS = 16
"""In one answer that a grammar shapes, so that a small model comes to an end."""
SpecialToken = Callable[[str], int | None]
"""The id of a text that is one special token, which a grammar cannot spell; None for other texts."""


def call_rules(box: ToolSet, family: ToolCallFormat, special: SpecialToken, *, is_marked: bool = False) -> str:
    """Lark's rules for one call or more, from `calls` on. With `is_marked` the first one has its family's mark even
    where it could do without, so that it is no other JSON."""
    most = MAX_CALLS if box.max_calls is None else box.max_calls
    opening, closing = _mark(family.opening, special), _mark(family.closing, special) if family.closing else ""
    one_of = " | ".join(f"call_{index}" for index in range(len(box.callable_tools)))
    if family.names_first:
        rules = [f"calls: one{_more('one', '', most)}", f"one: {opening} ({one_of})"]
    elif family.is_list:
        more = _more("one", _quoted(family.separator), most)
        rules = [f'calls: {opening} "[" one{more} {closing}', f"one: {one_of}"]
    elif family.is_bare:
        first = f"{opening} one" if is_marked else "one"
        rules = [f"calls: {first}{_more('one', _quoted(family.separator), most)}", f"one: {one_of}"]
    else:
        more = _more("one", _quoted(family.separator), most)
        rules = [f"calls: one{more}", f'one: {opening} "\\n" ({one_of}) "\\n" {closing}']
    rules += [_call(index, tool, family, special) for index, tool in enumerate(box.callable_tools)]
    return "\n".join(rules)


def answer_grammar(
    form: Grammar | None, calls: str | None, *, special: SpecialToken, may_think: bool, is_thinking: bool
) -> Grammar | None:
    """Of a whole answer: of the form that was asked for, or of `calls` (see `call_rules`), or either. A model that
    thinks does so before, as it likes; `is_thinking`: the prompt has begun the thought."""
    if form is None and calls is None:
        return None
    if form is not None and calls is None and not may_think:
        return form
    if form is not None and form.kind == "lark":
        if calls is not None:
            raise TandemError(ErrorKind.UNSUPPORTED, "a Lark grammar and tools exclude each other", param="tool_choice")
        return form  # its rules may have any names: it says itself what comes before
    rules = []
    if form is not None:
        rules.append(f"form: {_inline(form)}")
    kinds = " | ".join(name for name, rule in (("form", form), ("calls", calls)) if rule is not None)
    start = f"({kinds})"
    if may_think:
        opening = "" if is_thinking else f"{_mark(OPENING, special)} "
        thought = f"{opening}thought BLANKS"
        start = f"{thought} {start}" if is_thinking else f"({thought})? {start}"
        rules += ["BLANKS: /[ \\n]{0,3}/", _thought(special)]
    return Grammar("lark", "\n".join([f"start: {start}", *rules, *([calls] if calls else [])]))


def _thought(special: SpecialToken) -> str:
    if special(CLOSING) is not None:
        return f"thought: /(.|\\n)*/ {_mark(CLOSING, special)}"
    return f"thought[suffix={_quoted(CLOSING)}]: /(.|\\n)*/"


def _call(index: int, tool: FunctionTool, family: ToolCallFormat, special: SpecialToken) -> str:
    schema = _embedded(_parameters(tool), lenient=not tool.strict)
    name = json.dumps(tool.name)
    if family.names_first:
        return f"call_{index}: {_quoted(tool.name)} {_mark(family.arguments_mark, special)} %json {schema}"
    head = f'{{"name": {name}, "{family.arguments_key}": '
    return f'call_{index}: {_quoted(head)} %json {schema} "}}"'


def _parameters(tool: FunctionTool) -> dict[str, Any]:
    """A tool without a schema takes nothing."""
    if tool.parameters is None:
        return {"type": "object", "properties": {}, "additionalProperties": False}
    return tool.parameters if "type" in tool.parameters else {"type": "object", **tool.parameters}


def _embedded(schema: dict[str, Any], *, lenient: bool = False) -> str:
    """A schema within a Lark grammar, which takes the form of its JSON from the schema itself."""
    given = schema.get("x-guidance")
    options = {**(given if isinstance(given, dict) else {}), **({"lenient": True} if lenient else {}), **JSON_FORM}
    return json.dumps({**schema, "x-guidance": options}, ensure_ascii=False)


def _inline(form: Grammar) -> str:
    if form.kind == "json_schema":
        return "%json " + _embedded(json.loads(form.source))
    return f"/{regex_to_lark(form.source, '')}/"


def _more(rule: str, separator: str, most: int) -> str:
    return f" ({separator} {rule}){{0,{most - 1}}}" if most > 1 else ""


def _mark(text: str, special: SpecialToken) -> str:
    token = special(text)
    return _quoted(text) if token is None else f"<[{token}]>"


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
