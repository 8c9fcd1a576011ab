"""Writes what records say to a stream; never formats, filters or counts one."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from select import PIPE_BUF


class LineHandler(logging.StreamHandler):  # type: ignore[type-arg]  # it is generic for type checkers only
    """A record may stand for many lines. Several programs may write to one pipe, which takes so many bytes at a time
    without anything in between (PIPE_BUF, 4,096): lines go by as many together, and a longer one alone."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            for lines in together(self.format(record), PIPE_BUF):
                self.stream.write(lines)
                self.stream.flush()
        except RecursionError:  # as the library has it: telling of it would begin the same again
            raise
        except Exception:
            self.handleError(record)


def together(text: str, num_bytes: int) -> Iterator[str]:
    """Its lines in pieces of at most so many bytes, each of which ends one; a line that has more is a piece."""
    if text.isascii() and len(text) < num_bytes:
        yield text + "\n"
        return
    held: list[str] = []
    num_left = num_bytes
    for line in text.split("\n"):
        num_own = (len(line) if line.isascii() else len(line.encode(errors="backslashreplace"))) + 1
        if held and num_own > num_left:
            yield "\n".join((*held, ""))
            held, num_left = [], num_bytes
        held.append(line)
        num_left -= num_own
    yield "\n".join((*held, ""))
