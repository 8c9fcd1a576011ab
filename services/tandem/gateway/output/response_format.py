"""Read the structured output that a request body demands."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from tandem.core.errors import invalid_request
from tandem.core.grammar import MAX_ENUM_VALUES, MAX_SOURCE_CHARS, Grammar
from tandem.gateway.output.json_limits import SchemaLimits, check_size

MAX_GBNF_CHARS = 64 * 1024
"""Largest number of characters of a GBNF grammar, whose conversion to Lark takes 0.1 s of processor time for these."""
_ANY_OBJECT = Grammar("json_schema", '{"type":"object"}')


class JsonSchemaFormat(msgspec.Struct):
    """`response_format.json_schema` of the OpenAI API. With `strict: false` keywords that cannot be enforced are
    ignored, otherwise they are refused."""

    name: str
    schema: dict[str, Any] | None = None
    strict: bool | None = None
    description: str | None = None


class ResponseFormat(msgspec.Struct):
    """`response_format` of the OpenAI API. `json_schema`: required for the `type` of that name, unused for the
    others."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None


class StructuredOutputs(msgspec.Struct):
    """`structured_outputs` of vLLM: exactly one field is set.

    `json`: a JSON schema or its text. `choice`: the output is one of these texts. `grammar`: in Lark or GBNF notation.
    `json_object`: the output is any JSON object."""

    json: str | dict[str, Any] | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None


@dataclass(frozen=True, slots=True)
class StructuredOutput:
    """Grammar that a body requests for its output. `param`: the body field that requests it, for errors. `is_gbnf`: the
    source is in GBNF notation, and is converted to Lark before anything else reads it."""

    grammar: Grammar
    param: str
    is_gbnf: bool = False


def requested_structured_output(
    response_format: ResponseFormat | None, structured: StructuredOutputs | None, guided: Mapping[str, Any]
) -> StructuredOutput | None:
    """Return the structured output that a body requests; None where it requests none.

    `guided`: values of vLLM's older fields `guided_json`, `guided_regex`, `guided_choice` and `guided_grammar`, with
    the part after the underscore as key. Raises INVALID_REQUEST naming the field, also where several fields request a
    structured output."""
    outputs = [_of_response_format(response_format)] if response_format is not None else []
    if structured is not None:
        outputs += _guided("structured_outputs.", msgspec.structs.asdict(structured))
        if len(outputs) - (response_format is not None) != 1:
            raise invalid_request(
                "structured_outputs must have exactly one of json, json_object, regex, choice and grammar",
                "structured_outputs",
            )
    outputs += _guided("guided_", guided)
    requested = [output for output in outputs if output is not None]
    if len(requested) > 1:
        second = requested[1].param
        raise invalid_request(f"{second} and {requested[0].param} must not be used together", second)
    return requested[0] if requested else None


def schema_source(schema: Mapping[str, Any], *, lenient: bool = False, options: Mapping[str, object] = {}) -> str:
    """Return a JSON schema as the source text of a grammar. `lenient`: keywords that cannot be enforced are ignored.
    `options`: further options of the grammar compiler. All options are written into the schema's field `x-guidance`."""
    own = schema.get("x-guidance")
    known = {**(own if isinstance(own, dict) else {}), **({"lenient": True} if lenient else {}), **options}
    return _text({**schema, "x-guidance": known} if known else schema)


def _of_response_format(response_format: ResponseFormat) -> StructuredOutput | None:
    if response_format.type == "text":
        return None
    if response_format.type == "json_object":
        return StructuredOutput(_ANY_OBJECT, "response_format")
    json_schema = response_format.json_schema
    if json_schema is None or json_schema.schema is None:
        param = "response_format.json_schema" + ("" if json_schema is None else ".schema")
        raise invalid_request(f"{param} is required and missing", param)
    param = "response_format.json_schema.schema"
    SchemaLimits().add(json_schema.schema, param)
    return StructuredOutput(
        Grammar("json_schema", schema_source(json_schema.schema, lenient=json_schema.strict is False)), param
    )


def _guided(prefix: str, fields: Mapping[str, Any]) -> list[StructuredOutput | None]:
    return [
        _guided_output(name, value, prefix + name)
        for name, value in fields.items()
        if value is not None and value is not False
    ]


def _guided_output(name: str, value: Any, param: str) -> StructuredOutput:
    match name:
        case "json":
            return StructuredOutput(Grammar("json_schema", schema_source(_schema(value, param))), param)
        case "json_object":
            return StructuredOutput(_ANY_OBJECT, param)
        case "regex":
            return StructuredOutput(Grammar("regex", value), param)
        case "choice":
            if not value or not all(value):
                raise invalid_request(f"{param} must hold at least one text, and no empty one", param)
            if len(value) > MAX_ENUM_VALUES:
                raise invalid_request(f"{param} must hold at most {MAX_ENUM_VALUES} texts, has {len(value)}", param)
            # Not in Lark: each text would be an Earley item, of which a worker accepts some hundred.
            return StructuredOutput(Grammar("regex", "|".join(map(re.escape, value))), param)
        case _:
            return _of_grammar(value, param)


def _schema(value: str | dict[str, Any], param: str) -> dict[str, Any]:
    if isinstance(value, str):
        check_size(len(value), MAX_SOURCE_CHARS, "characters", param)
        try:
            value = msgspec.json.decode(value)
        except (ValueError, RecursionError) as error:
            raise invalid_request(f"{param} is not valid JSON: {error}", param) from None
    if not isinstance(value, dict):
        raise invalid_request(f"{param} must be a JSON schema", param)
    SchemaLimits().add(value, param)
    return value


def _of_grammar(source: str, param: str) -> StructuredOutput:
    """Return the output of a grammar in Lark or GBNF notation; the latter is recognized by `::=`."""
    is_gbnf = "::=" in source
    if is_gbnf and len(source) > MAX_GBNF_CHARS:
        limit = f"must have at most {MAX_GBNF_CHARS} characters in GBNF"
        raise invalid_request(f"{param} {limit}, has {len(source)}; Lark may be longer", param)
    return StructuredOutput(Grammar("lark", source), param, is_gbnf)


def _text(value: Any) -> str:
    return msgspec.json.encode(value).decode()
