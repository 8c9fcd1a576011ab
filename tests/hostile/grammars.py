"""Fuzz target: the JSON schemas, regular expressions and grammars that clients send, up to their compilation."""

from __future__ import annotations

import json

from tandem.gateway.openai.request_schema import CompletionBody, parse
from tandem.gateway.output.grammar_compiler import compile_grammar
from tandem.gateway.output.response_format import requested_structured_output
from tests.hostile.surface import Surface

_KINDS = {b"j": "guided_json", b"r": "guided_regex", b"g": "guided_grammar"}


def _read(data: bytes) -> None:
    """Read bytes after the first as what the first byte names: JSON schema, regular expression, grammar, or else a
    list of choices, one a line."""
    text = data[1:].decode("utf-8", "replace")
    name = _KINDS.get(data[:1], "guided_choice")
    value = text.split("\n") if name == "guided_choice" else text
    body = parse(json.dumps({"model": "tiny", "prompt": "a", name: value}).encode(), CompletionBody)
    guided = {field: getattr(body, f"guided_{field}") for field in ("json", "regex", "choice", "grammar")}
    output = requested_structured_output(body.response_format, body.structured_outputs, guided)
    assert output is not None
    compile_grammar("gbnf" if output.is_gbnf else output.grammar.kind, output.grammar.source)


_SCHEMAS = (
    {
        "type": "object",
        "properties": {"a": {"type": "string", "pattern": "^[a-z]+$"}, "b": {"$ref": "#/$defs/c"}},
        "required": ["a"],
        "additionalProperties": False,
        "$defs": {"c": {"type": "array", "items": {"type": "integer", "minimum": 0}, "maxItems": 5}},
    },
    {"anyOf": [{"enum": ["x", 5, None]}, {"const": True}, {"type": "number", "multipleOf": 0.5}]},
    {"type": "string", "minLength": 1, "maxLength": 20, "format": "date-time"},
)
SURFACES = {
    "grammar": Surface(
        read=_read,
        seeds=(
            *(b"j" + json.dumps(schema).encode() for schema in _SCHEMAS),
            rb"r(a|b)*[^c-f]{2,5}\d+\.(?i:x)?",
            b'gstart: greeting " " /[a-z]+/\ngreeting: "hi" | "ho"+',
            b'groot ::= greeting " " [a-z]+\ngreeting ::= "hi" | ("ho" "!")*',
            b'gstart: %json {"type": "object"}',
            b"cyes\nno\n\xc3\xa4",
        ),
    )
}
