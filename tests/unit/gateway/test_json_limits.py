"""Test that each limit of schemas lets as much pass as it says, and refuses one more by its name and value."""

from __future__ import annotations

from typing import Any

import pytest

from tandem.core.errors import ErrorKind, TandemError
from tandem.core.grammar import (
    MAX_CONSTRAINED_VALUES,
    MAX_ENUM_VALUES,
    MAX_OBJECTS,
    MAX_OPTIONAL_PROPERTIES,
    MAX_PATTERN_PROPERTIES,
    MAX_PROPERTIES,
    MAX_SOURCE_CHARS,
)
from tandem.gateway.output.json_limits import MAX_DEPTH, SchemaLimits


def properties(num: int, num_required: int = 0, name: str = "p", **value: Any) -> dict[str, Any]:
    names = [f"{name}{i}" for i in range(num)]
    return {"type": "object", "properties": dict.fromkeys(names, value), "required": names[:num_required]}


def refusal(schema: dict[str, Any], limits: SchemaLimits | None = None) -> str:
    with pytest.raises(TandemError) as caught:
        (limits or SchemaLimits()).add(schema, "field")
    assert (caught.value.kind, caught.value.param) == (ErrorKind.INVALID_REQUEST, "field")
    return caught.value.message


@pytest.mark.parametrize(
    ("most", "make", "what"),
    [
        (MAX_PROPERTIES, lambda n: properties(n, n), "properties"),
        (MAX_OPTIONAL_PROPERTIES, lambda n: properties(n + 3, 3), "properties in one object that are not required"),
        (MAX_PATTERN_PROPERTIES, lambda n: {"patternProperties": {f"^{i}": {} for i in range(n)}}, "patternProperties"),
        (MAX_ENUM_VALUES, lambda n: {"items": {"enum": list(range(n - 1))}, "enum": [1]}, "enum values"),
        (MAX_CONSTRAINED_VALUES, lambda n: properties(n, n, format="date", pattern="a"), "values with pattern"),
        (MAX_OBJECTS, lambda n: {"anyOf": [{}] * (n - 1)}, "objects"),
        (MAX_SOURCE_CHARS, lambda n: {"const": "ä" * (n - len('{"const":""}'))}, "characters"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_each_limit(most: int, make: Any, what: str) -> None:
    SchemaLimits().add(make(most), "field")
    message = refusal(make(most + 1))
    assert message.startswith(f"field must have at most {most} {what}") and message.endswith(f", has {most + 1}")


def test_the_schemas_of_all_tools_count_together() -> None:
    limits = SchemaLimits(" in all tools together")
    for tool in range(MAX_PROPERTIES // 100):
        limits.add(properties(100, name=f"t{tool}x"), "field")
    message = refusal(properties(1), limits)
    assert message == f"field must have at most {MAX_PROPERTIES} properties in all tools together, has 5001"


def test_properties_are_counted_at_any_depth() -> None:
    half = MAX_PROPERTIES // 2
    schema = {"$defs": {"a": properties(half, half)}, "anyOf": [{"items": properties(half + 1, half + 1, name="q")}]}
    assert f"at most {MAX_PROPERTIES} properties" in refusal(schema)


def test_properties_named_like_keywords_are_no_constraints() -> None:
    named = {"properties": {"format": {"type": "string"}, "minimum": {"type": "integer"}, "enum": {"type": "array"}}}
    SchemaLimits().add({"anyOf": [named] * MAX_CONSTRAINED_VALUES}, "field")


@pytest.mark.parametrize("required", [None, 3, {"a": 1}, [1, {}, "p0"]])
def test_what_is_no_list_of_names_requires_nothing(required: Any) -> None:
    num = MAX_OPTIONAL_PROPERTIES + 2
    assert "not required" in refusal(properties(num) | {"required": required})


def test_a_schema_that_is_too_deep() -> None:
    deep: dict[str, Any] = {}
    for _ in range(MAX_DEPTH):
        deep = {"a": deep}
    assert f"more than {MAX_DEPTH} levels" in refusal(deep)
