"""Test the requested response formats, and that unusable ones are refused by field."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from tandem.core.errors import ErrorKind, TandemError
from tandem.core.grammar import MAX_ENUM_VALUES, MAX_SOURCE_CHARS, Grammar
from tandem.gateway.output.grammar_compiler import compile_grammar
from tandem.gateway.output.json_limits import check_depth
from tandem.gateway.output.response_format import (
    ResponseFormat,
    StructuredOutput,
    StructuredOutputs,
    requested_structured_output,
)

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
FIELD = "response_format.json_schema.schema"


def form(response_format: Any = None, structured: Any = None, **guided: Any) -> StructuredOutput | None:
    return requested_structured_output(
        None if response_format is None else msgspec.convert(response_format, ResponseFormat),
        None if structured is None else msgspec.convert(structured, StructuredOutputs),
        guided,
    )


def schema_form(schema: Any, **facts: Any) -> StructuredOutput:
    found = form({"type": "json_schema", "json_schema": {"name": "x", "schema": schema, **facts}})
    assert found is not None
    return found


def test_the_formats_of_openai() -> None:
    assert form() is None
    assert form({"type": "text"}) is None
    assert form({"type": "json_object"}) == StructuredOutput(
        Grammar("json_schema", '{"type":"object"}'), "response_format"
    )
    assert schema_form(SCHEMA, strict=True) == StructuredOutput(
        Grammar("json_schema", json.dumps(SCHEMA, separators=(",", ":"))), FIELD
    )


@pytest.mark.parametrize("name", ["structured", "guided"])
@pytest.mark.parametrize(
    ("kind", "value", "grammar"),
    [
        ("json", SCHEMA, Grammar("json_schema", json.dumps(SCHEMA, separators=(",", ":")))),
        ("json", json.dumps(SCHEMA), Grammar("json_schema", json.dumps(SCHEMA, separators=(",", ":")))),
        ("regex", "[a-z]+", Grammar("regex", "[a-z]+")),
        ("choice", ["yes", 'n"o.'], Grammar("regex", 'yes|n"o\\.')),
        ("grammar", 'start: "a"', Grammar("lark", 'start: "a"')),
    ],
)
def test_the_formats_of_vllm(name: str, kind: str, value: Any, grammar: Grammar) -> None:
    found = form(structured={kind: value}) if name == "structured" else form(**{kind: value})
    assert found is not None
    assert found.grammar == grammar
    assert found.param == {"structured": f"structured_outputs.{kind}", "guided": f"guided_{kind}"}[name]
    assert compile_grammar(found.grammar.kind, found.grammar.source) == (True, "")


def test_gbnf_is_converted() -> None:
    found = form(grammar='root ::= "yes" | "no"')
    assert found is not None and found.is_gbnf
    is_good, lark = compile_grammar("gbnf", found.grammar.source)
    assert is_good and 'start: "yes"' in lark and compile_grammar("lark", lark) == (True, "")
    assert compile_grammar("gbnf", "root ::= (")[0] is False


@pytest.mark.parametrize(
    ("response_format", "structured", "guided", "param"),
    [
        ({"type": "json_schema"}, None, {}, "response_format.json_schema"),
        ({"type": "json_schema", "json_schema": {"name": "x"}}, None, {}, FIELD),
        ({"type": "json_object"}, None, {"regex": "a"}, "guided_regex"),
        (None, {}, {}, "structured_outputs"),
        (None, {"regex": "a", "choice": ["a"]}, {}, "structured_outputs"),
        (None, {"json": "{"}, {}, "structured_outputs.json"),
        (None, {"json": "[" * 100_000}, {}, "structured_outputs.json"),
        (None, None, {"json": "[]"}, "guided_json"),
        (None, None, {"choice": []}, "guided_choice"),
        (None, None, {"choice": ["a", ""]}, "guided_choice"),
        (None, None, {"choice": ["a"] * (MAX_ENUM_VALUES + 1)}, "guided_choice"),
        (None, {"json": '"' + "a" * MAX_SOURCE_CHARS + '"'}, {}, "structured_outputs.json"),
        (None, None, {"json": '{"const": NaN}'}, "guided_json"),
    ],
)
def test_an_invalid_format_is_refused_by_field(response_format: Any, structured: Any, guided: Any, param: str) -> None:
    with pytest.raises(TandemError) as caught:
        form(response_format, structured, **guided)
    assert (caught.value.kind, caught.value.param) == (ErrorKind.INVALID_REQUEST, param)


@pytest.mark.parametrize(
    ("schema", "reason"),
    [
        ({"type": "nonsense"}, "Invalid type: nonsense"),
        ({"type": "object", "properties": 3}, "properties must be an object"),
        ({"$ref": "#/nowhere"}, "/nowhere"),
        ({"$ref": "https://example.com/x.json"}, "example.com"),
        ({"type": "string", "pattern": "("}, "unclosed group"),
        ({"type": "array", "uniqueItems": True}, "uniqueItems"),
        ({"type": "integer", "minimum": 5, "maximum": 3}, "Unsatisfiable"),
        ({"allOf": [{"anyOf": [{"properties": {f"p{i}{j}": {}}} for j in range(4)]} for i in range(9)]}, "too large"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_schema_that_cannot_be_used_does_not_compile_for_a_reason(schema: Any, reason: str) -> None:
    is_good, text = compile_grammar("json_schema", schema_form(schema, strict=True).grammar.source)
    assert not is_good and reason in text


@pytest.mark.slow
def test_depth_is_bounded_before_anything_recurses() -> None:
    for depth, is_fine in ((120, True), (129, False), (100_000, False)):
        deep: dict[str, Any] = {}
        for _ in range(depth):
            deep = {"a": deep}
        if is_fine:
            check_depth(deep, "x")
            continue
        with pytest.raises(TandemError, match="more than 128 levels"):
            check_depth(deep, "x")
        while deep:  # unlinked in a loop, because freeing so deep a value recurses too
            deep = deep["a"]


def test_keywords_that_nobody_enforces_pass_where_strictness_is_off() -> None:
    schema = {"type": "array", "items": {"type": "integer"}, "uniqueItems": True}
    assert compile_grammar("json_schema", schema_form(schema, strict=False).grammar.source) == (True, "")
    nonsense = schema_form({"type": "nonsense"}, strict=False).grammar.source
    assert "nonsense" in compile_grammar("json_schema", nonsense)[1]
