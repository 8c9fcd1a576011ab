"""Find the known name that an unknown one is probably meant to be, for error messages."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def near_name(name: str, known: Iterable[str]) -> str:
    """Return the known name that is most like `name`, or an empty string where none is like it."""
    return next(iter(difflib.get_close_matches(name, list(known), n=1)), "")
