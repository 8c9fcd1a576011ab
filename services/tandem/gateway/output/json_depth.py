"""Reject client JSON that is nested too deeply, with a check that does not recurse itself."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tandem.core.errors import invalid_request

MAX_DEPTH = 128
"""Largest number of nested arrays and objects: the grammar compiler refuses deeper schemas, and the JSON encoders of
the gateway recurse."""
_NESTED = (dict, list)


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
