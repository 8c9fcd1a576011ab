"""Reject client JSON that is nested too deeply, without recursion, and JSON schemas that are too expensive to compile,
before anything is compiled."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from tandem.core.errors import invalid_request
from tandem.core.grammar import (
    MAX_CONSTRAINED_VALUES,
    MAX_ENUM_VALUES,
    MAX_OBJECTS,
    MAX_OPTIONAL_PROPERTIES,
    MAX_PATTERN_PROPERTIES,
    MAX_PROPERTIES,
    MAX_SOURCE_CHARS,
)

MAX_DEPTH = 128
"""Largest number of nested arrays and objects: the grammar compiler refuses deeper schemas, and the JSON encoders of
the gateway recurse."""
_NESTED = (dict, list)
_CONSTRAINTS = ("pattern", "format", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
_KEYWORDS = frozenset({"properties", "patternProperties", "enum", *_CONSTRAINTS})
_MOST: dict[str, int] = {
    "properties": MAX_PROPERTIES,
    "patternProperties": MAX_PATTERN_PROPERTIES,
    "enum values": MAX_ENUM_VALUES,
    f"values with {', '.join(_CONSTRAINTS[:-1])} or {_CONSTRAINTS[-1]}": MAX_CONSTRAINED_VALUES,
}
"""The limits of what is counted over all schemas, by its name in errors, in the order of `SchemaLimits._counts`."""


def check_depth(value: Any, param: str) -> None:
    """Raise TandemError(INVALID_REQUEST) for the field `param` where the JSON value is nested deeper than MAX_DEPTH
    levels."""
    for _ in nested_levels(value, param):
        pass


def nested_levels(value: Any, param: str) -> Iterator[list[Any]]:
    """Yield the arrays and objects of a JSON value, one list for each level of nesting, the outermost level first.
    Raises as `check_depth` does, once MAX_DEPTH levels were yielded."""
    level = [value] if isinstance(value, _NESTED) else []
    for _ in range(MAX_DEPTH):
        if not level:
            return
        yield level
        inner: list[Any] = []
        for each in level:
            if each:
                values = each.values() if isinstance(each, dict) else each
                inner += [item for item in values if isinstance(item, _NESTED)]
        level = inner
    if level:
        raise invalid_request(f"{param} is nested more than {MAX_DEPTH} levels deep", param)


class SchemaLimits:
    """Count the parts of JSON schemas that are expensive to compile, such as properties and enum values, and refuse a
    schema with which a count exceeds its limit. The counts cover one response format, or all tools of a request
    together.

    Keywords are recognized by name only, so a name that is no keyword at its place, such as within `const`, counts too.
    `scope`: text at the end of error messages that names what is counted together, such as " in all tools together".
    `max_optional`: the limit of properties in one object that are not required."""

    def __init__(self, scope: str = "", max_optional: int = MAX_OPTIONAL_PROPERTIES) -> None:
        self._num_objects = 0
        self._counts = [0] * len(_MOST)
        self._scope = scope
        self._max_optional = max_optional

    def add(self, schema: Mapping[str, Any], param: str) -> None:
        """Add the parts of a schema to the counts. Raises INVALID_REQUEST for the field `param`, naming the limit,
        where the schema alone or together with those added before exceeds a limit."""
        try:
            num_chars = len(msgspec.json.encode(schema).decode())
        except RecursionError:
            num_chars = 0  # the walk below finds it too deep
        check_size(num_chars, MAX_SOURCE_CHARS, "characters", param)
        for level in nested_levels(schema, param):
            objects = [each for each in level if isinstance(each, dict)]
            self._num_objects += len(objects)
            check_size(self._num_objects, MAX_OBJECTS, "objects" + self._scope, param)
            for each in objects:
                if not _KEYWORDS.isdisjoint(each):
                    self._count(each, param)
        for total, (what, most) in zip(self._counts, _MOST.items(), strict=True):
            check_size(total, most, what + self._scope, param)

    def _count(self, each: Mapping[str, Any], param: str) -> None:
        num_optional = _num_optional(each.get("properties"), each.get("required"))
        check_size(num_optional, self._max_optional, "properties in one object that are not required", param)
        counts = (
            _size(each.get("properties"), dict),
            _size(each.get("patternProperties"), dict),
            _size(each.get("enum"), list),
            int(any(isinstance(each.get(name), str | int | float) for name in _CONSTRAINTS)),
        )
        self._counts = [total + count for total, count in zip(self._counts, counts, strict=True)]


def _num_optional(properties: Any, required: Any) -> int:
    if not isinstance(properties, dict):
        return 0
    names = {name for name in required if isinstance(name, str)} if isinstance(required, list) else set[str]()
    return len(properties.keys() - names)


def _size(value: Any, kind: type[dict[Any, Any]] | type[list[Any]]) -> int:
    return len(value) if isinstance(value, kind) else 0


def check_size(number: int, most: int, what: str, param: str) -> None:
    """Raise INVALID_REQUEST for the field `param` where it has a number of `what`, such as characters, above `most`."""
    if number > most:
        raise invalid_request(f"{param} must have at most {most} {what}, has {number}", param)
