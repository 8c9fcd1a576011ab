"""Reads what form a body wants its answer in, and has it checked; never walks a grammar."""

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
"""Grammars that are known to be good."""
MAX_GBNF_CHARS = 64 * 1024
"""What is rewritten here, where others wait: less than a tenth of a second."""
_LIMITS = LLParserLimits(
    max_grammar_size=MAX_SYMBOLS,
    max_lexer_states=MAX_LEXER_STATES,
    step_max_items=MAX_STEP_ITEMS,
    step_lexer_fuel=MAX_STEP_FUEL,
    verbose_errors=False,
)
_ANY_OBJECT = Grammar("json_schema", '{"type":"object"}')


class JsonSchemaFormat(msgspec.Struct):
    """OpenAI's. With `strict: false`, keywords that nothing here can enforce are ignored instead of refused."""

    name: str
    schema: dict[str, Any] | None = None
    strict: bool | None = None
    description: str | None = None


class ResponseFormat(msgspec.Struct):
    """`json_schema` goes with the type of that name."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None


class StructuredOutputs(msgspec.Struct):
    """vLLM's; one of the five. `json` is a schema or its text, `grammar` is in Lark's or in GBNF's notation."""

    json: str | dict[str, Any] | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None


@dataclass(frozen=True, slots=True)
class StructuredOutput:
    """The grammar that a body asks for and the field that asked."""

    grammar: Grammar
    param: str


def asked_form(
    response_format: ResponseFormat | None, structured: StructuredOutputs | None, guided: Mapping[str, Any]
) -> StructuredOutput | None:
    """`guided` holds vLLM's older `guided_json`, `guided_regex`, `guided_choice` and `guided_grammar` by the name
    behind the underscore. Raises INVALID_REQUEST naming the field, also when more than one asks."""
    forms = [_of_response_format(response_format)] if response_format is not None else []
    if structured is not None:
        forms += _guided("structured_outputs.", msgspec.structs.asdict(structured))
        if len(forms) - (response_format is not None) != 1:
            raise _invalid("structured_outputs must say exactly one of its forms", "structured_outputs")
    forms += _guided("guided_", guided)
    asked = [form for form in forms if form is not None]
    if len(asked) > 1:
        raise _invalid(f"{asked[1].param} and {asked[0].param} exclude each other", asked[1].param)
    return asked[0] if asked else None


def schema_source(schema: Mapping[str, Any], *, lenient: bool = False) -> str:
    """A JSON schema as a grammar's source. `lenient` ignores keywords that cannot be enforced."""
    options = schema.get("x-guidance")
    known = {**(options if isinstance(options, dict) else {}), **({"lenient": True} if lenient else {})}
    return _text({**schema, "x-guidance": known} if known else schema)


class GrammarCheck:
    """Says whether grammars compile, and remembers which did. May be used from several threads."""

    def __init__(self) -> None:
        self._good: OrderedDict[Grammar, None] = OrderedDict()
        self._lock = Lock()

    def knows(self, grammar: Grammar) -> bool:
        return grammar in self._good

    def check(self, form: StructuredOutput) -> None:
        """Mostly takes a millisecond, half a second for the worst that passes. Raises INVALID_REQUEST with the
        compiler's reason."""
        if self.knows(form.grammar):
            return
        if len(form.grammar.source) > MAX_SOURCE_CHARS:
            limit = f"must have at most {MAX_SOURCE_CHARS} characters"
            raise _invalid(f"{form.param} {limit}, has {len(form.grammar.source)}", form.param)
        reason = _defect(form.grammar)
        if reason:
            raise _invalid(f"{form.param} cannot be used: {reason}", form.param)
        with self._lock:
            self._good[form.grammar] = None
            if len(self._good) > MAX_CHECKED:
                self._good.popitem(last=False)


def _of_response_format(wanted: ResponseFormat) -> StructuredOutput | None:
    if wanted.type == "text":
        return None
    if wanted.type == "json_object":
        return StructuredOutput(_ANY_OBJECT, "response_format")
    given = wanted.json_schema
    if given is None or given.schema is None:
        param = "response_format.json_schema" + ("" if given is None else ".schema")
        raise _invalid(f"{param} is missing", param)
    param = "response_format.json_schema.schema"
    check_depth(given.schema, param)
    return StructuredOutput(Grammar("json_schema", schema_source(given.schema, lenient=given.strict is False)), param)


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
    """GBNF, which names its first rule `root`, is rewritten; Lark's is `start`."""
    if "::=" not in source:
        return source
    if len(source) > MAX_GBNF_CHARS:
        limit = f"must have at most {MAX_GBNF_CHARS} characters in GBNF"
        raise _invalid(f"{param} {limit}, has {len(source)}; Lark may be longer", param)
    from llguidance.gbnf_to_lark import any_to_lark  # only few ask for it

    try:
        return str(any_to_lark(source))
    except Exception as error:  # the library's own parser raises whatever it meets
        raise _invalid(f"{param} cannot be used: {error}", param) from None


def _defect(grammar: Grammar) -> str:
    """Why a grammar does not compile; empty when it does."""
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
