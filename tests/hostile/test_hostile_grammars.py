"""Test schemas, regular expressions and grammars that are made to cost or to break their compiler: each is answered or
refused with a typed error, and requests of others are served meanwhile."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.effort import IS_NIGHTLY
from tests.unit.gateway.conftest import Front

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
BODY = {"model": "tiny", "prompt": [5, 6, 7], "max_tokens": 2}


def _schemas() -> Iterator[tuple[str, Any]]:
    text: dict[str, Any] = {"type": "string"}
    for number in (100, 1_000, 3_000):
        yield f"{number} properties", {"type": "object", "properties": {f"p{n}": text for n in range(number)}}
    for depth in (50, 126, 200, 2_000):
        yield f"{depth} levels", '{"type": "array", "items": ' * depth + '{"type": "string"}' + "}" * depth
    for number in (100, 20_000):
        yield f"enum of {number}", {"enum": [f"value {n}" for n in range(number)]}
    for keyword in ("anyOf", "oneOf", "allOf"):
        yield f"{keyword} of 300", {keyword: [{"const": n} for n in range(300)]}
        yield f"{keyword} of nothing", {keyword: []}
    yield "a reference to itself", {"$ref": "#"}
    yield (
        "two references in a circle",
        {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}},
    )
    yield "a reference to nowhere", {"$ref": "#/$defs/none"}
    yield "a reference to a stranger", {"$ref": "http://127.0.0.1:1/schema.json"}
    yield "a reference to a file", {"$ref": "file:///etc/passwd"}
    yield (
        "a tree that doubles",
        {
            "$ref": "#/$defs/d0",
            "$defs": {
                **{f"d{n}": {"type": "array", "prefixItems": [{"$ref": f"#/$defs/d{n + 1}"}] * 2} for n in range(20)},
                "d20": text,
            },
        },
    )
    for bounds in (
        {"minLength": 10**9},
        {"maxLength": 10**9},
        {"minLength": -1},
        {"maxLength": 1e300},
        {"minLength": 5, "maxLength": 1},
    ):
        yield f"text of {bounds}", {**text, **bounds}
    for bounds in ({"minItems": 10**6}, {"maxItems": 10**12}, {"minItems": 3, "maxItems": 1}):
        yield f"list of {bounds}", {"type": "array", "items": {"type": "integer"}, **bounds}
    for bounds in ({"minimum": 1e308}, {"minimum": 5, "maximum": 1}, {"multipleOf": 0}, {"multipleOf": 1e-300}):
        yield f"number of {bounds}", {"type": "number", **bounds}
    for pattern in (
        "(",
        "a{1000000}",
        "(a*)*b",
        "(a|a)*" * 50,
        "^(?=x)a",
        r"(a)\1",
        ".{0,5000}",
        "[^" + "a-z" * 5_000 + "]",
    ):
        yield f"pattern {pattern[:12]}", {**text, "pattern": pattern}
    yield "wrong keywords", {"type": "strange", "properties": 5, "required": "a", "items": True}
    yield (
        "other options of the compiler",
        {"x-guidance": {"item_separator": "(a*)*", "whitespace_pattern": "("}, **text},
    )
    yield "a key of 100 kB", {"type": "object", "properties": {"k" * 100_000: text}, "required": ["k" * 100_000]}


def _regexes() -> Iterator[tuple[str, str]]:
    for source in (
        "(a{1,500}){1,500}",
        "(((a{1,99}){1,99}){1,99}){1,99}",
        "(a|b|ab)*" * 30,
        "[a-z]{1,9999}",
        "(",
        ")",
        "[",
        "*",
        "a**",
    ):
        yield f"regex {source[:12]}", source
    yield "regex of 300 kB", "a" * 300_000
    yield "regex of 2,000 groups", "(" * 2_000 + "a" + ")" * 2_000
    yield "regex of 20,000 branches", "|".join(f"x{n}" for n in range(20_000))
    yield "regex of look-arounds", "(?=a)(?!b)(?<=c)a"
    yield "regex of all classes", r"\p{L}+\p{Greek}\w\W\d\D\s\S" * 20
    yield "regex of nothing", "[^\\s\\S]"


def _grammars() -> Iterator[tuple[str, str]]:
    yield "a rule of itself", "start: start"
    yield "left recursion", 'start: start "a" | "a"'
    yield "ambiguity", 'start: (a | b)+\na: "x"* \nb: "x"*'
    yield "a rule that is missing", "start: none"
    yield "no start", 'a: "b"'
    yield "no grammar", "this is no grammar"
    yield "an import", '%import .secrets.key\nstart: "a"'
    yield "a terminal of itself", "start: A\nA: A"
    yield "10,000 rules", "start: r0\n" + "\n".join(f'r{n}: "a" r{n + 1}' for n in range(10_000)) + '\nr10000: "b"'
    yield "3,000 groups", "start: " + "(" * 3_000 + '"a"' + ")" * 3_000
    yield "a text that has no end", 'start: "a'
    yield "control characters", 'start: "\0\1\x7f"'
    yield "an embedded schema that is none", "start: %json {"
    yield "an embedded grammar of llguidance", 'start: %llguidance {"no_forcing": true}'
    yield "a token that does not exist", "start: <[99999999]>"
    yield "GBNF of itself", "root ::= root"
    yield "GBNF without a root", 'other ::= "a"'
    yield "GBNF of 70 kB", 'root ::= "' + "a" * 70_000 + '"'
    yield "GBNF of 1,000 groups", "root ::= " + "(" * 1_000 + '"a"' + ")" * 1_000
    yield "GBNF of no sense", "root ::= ::= |||"


REQUESTS: dict[str, dict[str, Any]] = {
    **{name: {"guided_json": schema} for name, schema in _schemas()},
    **{name: {"guided_regex": source} for name, source in _regexes()},
    **{name: {"guided_grammar": source} for name, source in _grammars()},
    "no choice": {"guided_choice": []},
    "an empty choice": {"guided_choice": ["a", ""]},
    "5,000 choices": {"guided_choice": [f"choice {number}" for number in range(5_000)]},
    "a choice of quotes": {"guided_choice": ['"\n\\"', "\0", "\u2028"]},
    "a schema in a text": {"guided_json": '{"type": '},
    "a list in a text": {"guided_json": "[]"},
    "depth in a text": {"guided_json": "[" * 100_000},
    "two at once": {"guided_json": {"type": "string"}, "guided_regex": "a"},
    "nothing": {"structured_outputs": {}},
}
NUM_REQUESTS = 75
COST = {
    "3000 properties",
    "enum of 20000",
    "5,000 choices",
    "10,000 rules",
    "regex of 20,000 branches",
    "pattern (a|a)*(a|a)*",
}
"""Those that take the compiler longest, in `make nightly` only."""


def test_hostile_grammars_are_answered_or_refused(attacked: Front, http: httpx.Client) -> None:
    assert len(REQUESTS) >= NUM_REQUESTS
    refused = set()
    for name, fields in REQUESTS.items():
        if not IS_NIGHTLY and name in COST:
            continue
        response = http.post("/v1/completions", content=json.dumps({**BODY, **fields}), timeout=120)
        assert response.status_code in (200, 400), (name, response.status_code, response.text[:300])
        if response.status_code == 400:
            error = response.json()["error"]
            assert error["param"] and error["message"] and len(response.content) < 10_000, (name, error)
            refused.add(name)
    assert {"a reference to nowhere", "regex (", "a rule that is missing", "no choice", "two at once"} <= refused
