"""Show the progress of a load test as one line in a terminal; write nothing when the output is not a terminal."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TextIO

EVERY_S = 1.0


async def show(line: Callable[[], str], out: TextIO) -> None:
    """Rewrite a line with the result of `line` until cancelled; the last line stays.

    Writes nothing when `out` is not a terminal.
    """
    if not out.isatty():
        return
    try:
        while True:
            _write(line(), out)
            await asyncio.sleep(EVERY_S)
    finally:
        _write(line() + "\n", out)


def _write(text: str, out: TextIO) -> None:
    out.write(f"\r\x1b[2K{text}")
    out.flush()
