"""Test the requested response formats, and that unusable grammars are refused by field in bounded time."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from tandem.core.errors import ErrorKind, TandemError
from tandem.core.grammar import MAX_SOURCE_CHARS, Grammar
from tandem.gateway.output import response_format as module
from tandem.gateway.output.json_depth import check_depth
from tandem.gateway.output.response_format import (
    GrammarCheck,
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
        ("choice", ["yes", 'n"o'], Grammar("lark", 'start: "yes" | "n\\"o"')),
        ("grammar", 'start: "a"', Grammar("lark", 'start: "a"')),
    ],
)
def test_the_formats_of_vllm(name: str, kind: str, value: Any, grammar: Grammar) -> None:
    found = form(structured={kind: value}) if name == "structured" else form(**{kind: value})
    assert found is not None
    assert found.grammar == grammar
    assert found.param == {"structured": f"structured_outputs.{kind}", "guided": f"guided_{kind}"}[name]
    GrammarCheck().check(found)


def test_gbnf_is_taken_too() -> None:
    found = form(grammar='root ::= "yes" | "no"')
    assert found is not None
    GrammarCheck().check(found)


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
        (None, None, {"grammar": "root ::= ("}, "guided_grammar"),
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
        ({"enum": ["x" * MAX_SOURCE_CHARS]}, "at most"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_schema_that_cannot_be_used_is_refused_with_the_reason(schema: Any, reason: str) -> None:
    with pytest.raises(TandemError) as caught:
        GrammarCheck().check(schema_form(schema, strict=True))
    assert (caught.value.kind, caught.value.param) == (ErrorKind.INVALID_REQUEST, FIELD)
    assert reason in caught.value.message


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
    GrammarCheck().check(schema_form(schema, strict=False))
    with pytest.raises(TandemError, match="nonsense"):
        GrammarCheck().check(schema_form({"type": "nonsense"}, strict=False))


def test_good_grammars_are_remembered_within_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_CHECKED", 2)
    check = GrammarCheck()
    grammars = [Grammar("regex", text) for text in ("a", "b", "c")]
    for grammar in grammars:
        check.check(StructuredOutput(grammar, "guided_regex"))
    assert [check.knows(grammar) for grammar in grammars] == [False, True, True]
    with pytest.raises(TandemError):
        check.check(StructuredOutput(Grammar("regex", "("), "guided_regex"))
    assert not check.knows(Grammar("regex", "("))
