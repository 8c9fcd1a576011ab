"""How deep a client's JSON may be nested where it is written again; never recurses itself."""

from __future__ import annotations

from typing import Any

from tandem.core.errors import ErrorKind, TandemError

MAX_DEPTH = 128
"""What compiles schemas goes no deeper; and every writer of JSON here recurses."""


def check_depth(value: Any, param: str) -> None:
    """Raises INVALID_REQUEST naming `param`."""
    level = [value]
    for _ in range(MAX_DEPTH):
        inner: list[Any] = []
        for each in level:
            inner += each.values() if isinstance(each, dict) else each if isinstance(each, list) else ()
        if not inner:
            return
        level = inner
    raise TandemError(ErrorKind.INVALID_REQUEST, f"{param} is nested deeper than {MAX_DEPTH}", param=param)
