"""Test how the log handler splits records of many lines into writes."""

from __future__ import annotations

import io
import logging
import os
import subprocess
import sys
from select import PIPE_BUF

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.obs.logs.log_handler import LineHandler, group_lines

LINES = st.lists(st.text(st.characters(exclude_characters="\n"), max_size=30), min_size=1, max_size=12)


@given(LINES, st.integers(1, 64))
def test_pieces_are_whole_lines_and_as_many_as_fit(lines: list[str], most: int) -> None:
    text = "\n".join(lines)
    pieces = list(group_lines(text, most))
    assert "".join(pieces) == text + "\n" and all(piece.endswith("\n") for piece in pieces)
    sizes = [len(piece.encode(errors="backslashreplace")) for piece in pieces]
    for piece, size in zip(pieces, sizes, strict=True):
        assert size <= most or piece.count("\n") == 1
    for piece, size, after in zip(pieces, sizes, pieces[1:], strict=False):
        first = after.partition("\n")[0] + "\n"
        assert size + len(first.encode(errors="backslashreplace")) > most, f"{piece!r} could have had {first!r} too"


class Raw(io.RawIOBase):
    """Record the bytes of each write."""

    def __init__(self) -> None:
        self.written: list[bytes] = []

    def writable(self) -> bool:
        return True

    def write(self, data: bytes) -> int:  # type: ignore[override]
        self.written.append(bytes(data))
        return len(data)


def test_no_write_is_more_than_a_pipe_takes_whole() -> None:
    raw = Raw()
    handler = LineHandler(io.TextIOWrapper(io.BufferedWriter(raw), encoding="utf-8", errors="backslashreplace"))
    lines = [f"{number} {'x' * 700}" for number in range(32)]
    for text in ("\n".join(lines), "short", "\n".join(["\u00e9" * 2000, "\udc80" * 800, "last"])):
        handler.handle(logging.makeLogRecord({"msg": text}))
    lines_read = b"".join(raw.written).decode()
    assert lines_read.count("\n") == 32 + 1 + 3 and lines_read.startswith("\n".join(lines))
    assert all(len(each) <= PIPE_BUF or each.count(b"\n") == 1 for each in raw.written)
    assert len(raw.written) < 14


def test_lines_of_programs_that_share_a_pipe_stay_whole() -> None:
    code = (
        "import logging, sys; from tandem.obs.logs.log_handler import LineHandler; handler = LineHandler(sys.stderr);"
        "lines = '\\n'.join(sys.argv[1] * 699 for _ in range(32));"
        "[handler.handle(logging.makeLogRecord({'msg': lines})) for _ in range(50)]"
    )
    reading, writing = os.pipe()
    with open(reading, "rb") as pipe:
        programs = [subprocess.Popen([sys.executable, "-c", code, name], stderr=writing) for name in "ab"]
        os.close(writing)
        lines_read = pipe.read().decode().splitlines()
    assert [program.wait() for program in programs] == [0, 0]
    assert len(lines_read) == 2 * 50 * 32 and set(lines_read) == {"a" * 699, "b" * 699}


def test_a_write_error_is_reported_by_the_logging_library(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging, "raiseExceptions", True)  # a library may have turned it off
    closed = io.StringIO()
    closed.close()
    LineHandler(closed).handle(logging.makeLogRecord({"msg": "lost"}))
    assert "--- Logging error ---" in capsys.readouterr().err
