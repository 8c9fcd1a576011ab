"""Reject client JSON that is nested too deeply, with a check that does not recurse itself."""

from __future__ import annotations

from typing import Any

from tandem.core.errors import ErrorKind, TandemError

MAX_DEPTH = 128
"""Largest number of nesting levels: the grammar compiler refuses deeper schemas, and the JSON encoders of the gateway
recurse."""


def check_depth(value: Any, param: str) -> None:
    """Raise TandemError(INVALID_REQUEST) for the field `param` where the JSON value is nested deeper than MAX_DEPTH
    levels."""
    level = [value]
    for _ in range(MAX_DEPTH):
        inner: list[Any] = []
        for each in level:
            inner += each.values() if isinstance(each, dict) else each if isinstance(each, list) else ()
        if not inner:
            return
        level = inner
    raise TandemError(ErrorKind.INVALID_REQUEST, f"{param} is nested more than {MAX_DEPTH} levels deep", param=param)
