"""Write formatted log records to a stream."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from select import PIPE_BUF


class LineHandler(logging.StreamHandler):  # type: ignore[type-arg]  # it is generic for type checkers only
    """Write records, each of which may have many lines.

    Several programs may write to one pipe, which takes PIPE_BUF (4,096) bytes without interleaving: as many lines as
    fit are written at once, and a longer line by itself."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            for lines in group_lines(self.format(record), PIPE_BUF):
                self.stream.write(lines)
                self.stream.flush()
        except RecursionError:  # as in logging.StreamHandler: reporting the error would recurse again
            raise
        except Exception:
            self.handleError(record)


def group_lines(text: str, num_bytes: int) -> Iterator[str]:
    """Split `text` into pieces of at most `num_bytes`, each of which ends with a line; a longer line is a piece of its
    own."""
    if text.isascii() and len(text) < num_bytes:
        yield text + "\n"
        return
    pending: list[str] = []
    num_left = num_bytes
    for line in text.split("\n"):
        num_own = (len(line) if line.isascii() else len(line.encode(errors="backslashreplace"))) + 1
        if pending and num_own > num_left:
            yield "\n".join((*pending, ""))
            pending, num_left = [], num_bytes
        pending.append(line)
        num_left -= num_own
    yield "\n".join((*pending, ""))
