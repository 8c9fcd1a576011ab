"""Read the structured output that a request body demands, and check that its grammar compiles."""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from threading import Lock
from typing import Any, Literal

import msgspec
from llguidance import LLMatcher, LLParserLimits

from tandem.core.errors import ErrorKind, TandemError
from tandem.core.grammar import (
    JSON_FORM,
    MAX_LEXER_STATES,
    MAX_SOURCE_CHARS,
    MAX_STEP_FUEL,
    MAX_STEP_ITEMS,
    MAX_SYMBOLS,
    Grammar,
)
from tandem.gateway.output.json_depth import check_depth

MAX_CHECKED = 256
"""Largest number of grammars that a GrammarCheck remembers as valid."""
MAX_GBNF_CHARS = 64 * 1024
"""Largest number of characters of a GBNF grammar, which is converted to Lark on the event loop: in under 0.1 s for
these."""
_LIMITS = LLParserLimits(
    max_grammar_size=MAX_SYMBOLS,
    max_lexer_states=MAX_LEXER_STATES,
    step_max_items=MAX_STEP_ITEMS,
    step_lexer_fuel=MAX_STEP_FUEL,
    verbose_errors=False,
)
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
    """Grammar that a body requests for its output. `param`: the body field that requests it, for errors."""

    grammar: Grammar
    param: str


def requested_structured_output(
    response_format: ResponseFormat | None, structured: StructuredOutputs | None, guided: Mapping[str, Any]
) -> StructuredOutput | None:
    """Return the structured output that a body requests; None where it requests none.

    `guided`: vLLM's older fields `guided_json`, `guided_regex`, `guided_choice` and `guided_grammar`, by the part of
    the name after the underscore. Raises INVALID_REQUEST naming the field, also where several fields request a
    structure."""
    outputs = [_of_response_format(response_format)] if response_format is not None else []
    if structured is not None:
        outputs += _guided("structured_outputs.", msgspec.structs.asdict(structured))
        if len(outputs) - (response_format is not None) != 1:
            raise _invalid(
                "structured_outputs must have exactly one of json, json_object, regex, choice and grammar",
                "structured_outputs",
            )
    outputs += _guided("guided_", guided)
    requested = [output for output in outputs if output is not None]
    if len(requested) > 1:
        raise _invalid(f"{requested[1].param} and {requested[0].param} must not be used together", requested[1].param)
    return requested[0] if requested else None


def schema_source(schema: Mapping[str, Any], *, lenient: bool = False, options: Mapping[str, object] = {}) -> str:
    """Return a JSON schema as the source text of a grammar. `lenient`: keywords that cannot be enforced are ignored.
    `options`: further options of the grammar compiler, which the schema holds in its field `x-guidance`."""
    own = schema.get("x-guidance")
    known = {**(own if isinstance(own, dict) else {}), **({"lenient": True} if lenient else {}), **options}
    return _text({**schema, "x-guidance": known} if known else schema)


class GrammarCheck:
    """Check whether grammars compile, and remember up to MAX_CHECKED that did. Thread-safe."""

    def __init__(self) -> None:
        self._good: OrderedDict[Grammar, None] = OrderedDict()
        self._lock = Lock()

    def knows(self, grammar: Grammar) -> bool:
        """Return whether the grammar was checked before and compiles."""
        return grammar in self._good

    def check(self, output: StructuredOutput) -> None:
        """Compile the grammar unless it is known to compile. Raises INVALID_REQUEST for `output.param`, with the
        compiler's reason, where it does not.

        Takes about a millisecond; the most expensive accepted grammar takes half a second."""
        if self.knows(output.grammar):
            return
        if len(output.grammar.source) > MAX_SOURCE_CHARS:
            limit = f"must have at most {MAX_SOURCE_CHARS} characters"
            raise _invalid(f"{output.param} {limit}, has {len(output.grammar.source)}", output.param)
        reason = _defect(output.grammar)
        if reason:
            raise _invalid(f"{output.param} does not compile: {reason}", output.param)
        with self._lock:
            self._good[output.grammar] = None
            if len(self._good) > MAX_CHECKED:
                self._good.popitem(last=False)


def _of_response_format(response_format: ResponseFormat) -> StructuredOutput | None:
    if response_format.type == "text":
        return None
    if response_format.type == "json_object":
        return StructuredOutput(_ANY_OBJECT, "response_format")
    json_schema = response_format.json_schema
    if json_schema is None or json_schema.schema is None:
        param = "response_format.json_schema" + ("" if json_schema is None else ".schema")
        raise _invalid(f"{param} is required and missing", param)
    param = "response_format.json_schema.schema"
    check_depth(json_schema.schema, param)
    return StructuredOutput(
        Grammar("json_schema", schema_source(json_schema.schema, lenient=json_schema.strict is False)), param
    )


def _guided(prefix: str, fields: Mapping[str, Any]) -> list[StructuredOutput | None]:
    return [
        StructuredOutput(_guided_grammar(name, value, prefix + name), prefix + name)
        for name, value in fields.items()
        if value is not None and value is not False
    ]


def _guided_grammar(name: str, value: Any, param: str) -> Grammar:
    match name:
        case "json":
            return Grammar("json_schema", schema_source(_schema(value, param)))
        case "json_object":
            return _ANY_OBJECT
        case "regex":
            return Grammar("regex", value)
        case "choice":
            if not value or not all(value):
                raise _invalid(f"{param} must hold at least one text, and no empty one", param)
            return Grammar("lark", "start: " + " | ".join(_text(text) for text in value))
        case _:
            return Grammar("lark", _lark(value, param))


def _schema(value: str | dict[str, Any], param: str) -> dict[str, Any]:
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise _invalid(f"{param} is not valid JSON: {error}", param) from None
    if not isinstance(value, dict):
        raise _invalid(f"{param} must be a JSON schema", param)
    check_depth(value, param)
    return value


def _lark(source: str, param: str) -> str:
    """Return a grammar in Lark notation. GBNF, recognized by `::=`, is converted: its start rule is `root`, Lark's
    `start`."""
    if "::=" not in source:
        return source
    if len(source) > MAX_GBNF_CHARS:
        limit = f"must have at most {MAX_GBNF_CHARS} characters in GBNF"
        raise _invalid(f"{param} {limit}, has {len(source)}; Lark may be longer", param)
    from llguidance.gbnf_to_lark import any_to_lark  # rarely used, so not imported at the top

    try:
        return str(any_to_lark(source))
    except Exception as error:  # the library's parser raises all kinds of exceptions
        raise _invalid(f"{param} does not compile: {error}", param) from None


def _defect(grammar: Grammar) -> str:
    """Return why a grammar does not compile; an empty string when it does."""
    try:
        match grammar.kind:
            case "json_schema":
                written = LLMatcher.grammar_from_json_schema(grammar.source, overrides=dict(JSON_FORM))  # type: ignore[arg-type]
            case "regex":
                written = LLMatcher.grammar_from_regex(grammar.source)
            case _:
                written = LLMatcher.grammar_from_lark(grammar.source)
    except ValueError as error:
        return str(error)
    return LLMatcher.validate_grammar(written, limits=_LIMITS).strip()


def _text(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def _invalid(message: str, param: str) -> TandemError:
    return TandemError(ErrorKind.INVALID_REQUEST, message, param=param)
