"""Write formatted log records to a stream, in whole lines."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from select import PIPE_BUF


class LineHandler(logging.StreamHandler):  # type: ignore[type-arg]  # it is generic for type checkers only
    """Write log records to a stream so that lines of several programs on one pipe do not mix.

    A pipe takes up to PIPE_BUF (4,096) bytes in one piece: as many lines as fit are written together, a longer line by
    itself."""

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
    """Split `text` into pieces of whole lines, each at most `num_bytes` bytes long including its last line end; a line
    that is longer is a piece by itself."""
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
