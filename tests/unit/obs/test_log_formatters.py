"""Test the log formatters: one record is one line of bounded length with the fields of its request."""

from __future__ import annotations

import json
import logging
import sys
from typing import Any

import pytest

from tandem.obs.logs.log_context import in_request, traced
from tandem.obs.logs.log_formatters import (
    MAX_EXCEPTION,
    MAX_MESSAGE,
    JsonFormatter,
    TextFormatter,
    fields,
)

HOSTILE = (
    'a\nb\r\nc\x1b[2J\x00\x85\u2028\u2029\ud800"\\ é\t2026-11-22T00:00:00Z',
    '"}\n{"severity": "CRITICAL"}',
    "\n2026-11-22 13:27:45,123 ERROR tandem.worker forged",
)
ORIGIN = {"service": "tandem-gateway", "instance": "g-1", "pid": 7}
JSON, TEXT = JsonFormatter(ORIGIN), TextFormatter()


def record(message: str, *args: object, error: BaseException | None = None, **extra: Any) -> logging.LogRecord:
    raised = None if error is None else (type(error), error, error.__traceback__)
    made = logging.getLogger("tandem.test").makeRecord(
        "tandem.test", logging.WARNING, __file__, 1, message, args, raised, extra=extra
    )
    made.created, made.msecs = 1763818065.25, 250.0
    return made


def raised(message: str) -> BaseException:
    try:
        raise ValueError(message)
    except ValueError as error:
        return error


@pytest.mark.parametrize("text", HOSTILE)
def test_a_json_line_stays_one_line_whatever_text_it_holds(text: str) -> None:
    with in_request(text):
        line = JSON.format(record("label %s", text, error=raised(text), **fields(tenant=text)))
    assert line.isascii() and len(line.splitlines()) == 1
    parsed = json.loads(line)
    assert parsed["message"] == f"label {text}"
    assert parsed["request_id"] == parsed["tenant"] == text
    assert parsed["exception"].startswith("Traceback (most recent call last):\n") and text in parsed["exception"]


@pytest.mark.parametrize("text", HOSTILE)
def test_what_a_line_of_text_holds_begins_no_other(text: str) -> None:
    with in_request(text):
        line = TEXT.format(record("label %s", text, **fields(tenant=text)))
        with_error = TEXT.format(record("failed", error=raised(text)))
    assert len(line.splitlines()) == 1 and "\x1b" not in line
    first, *rest = with_error.splitlines()
    assert " WARNING tandem.test failed" in first
    assert len(rest) >= 3 and all(each.startswith("  ") for each in rest)
    assert rest[0] == "  Traceback (most recent call last):"


def test_a_line_of_json_has_its_facts_in_fields_of_their_own() -> None:
    with in_request("r-1"):
        traced(f"00-{'ab' * 16}-{'cd' * 8}-01")
        parsed = json.loads(JSON.format(record("worker %s is lost", "w", **fields(worker="w", seconds=0.5, gone=None))))
    assert parsed == {
        "timestamp": "2025-11-22T13:27:45.250000Z",
        "severity": "WARNING",
        "logger": "tandem.test",
        "message": "worker w is lost",
        "service": "tandem-gateway",
        "instance": "g-1",
        "pid": 7,
        "thread": "MainThread",
        "request_id": "r-1",
        "trace_id": "ab" * 16,
        "span_id": "cd" * 8,
        "worker": "w",
        "seconds": 0.5,
    }


def test_fields_override_the_request_context_and_no_other_key() -> None:
    with in_request("r-1"):
        parsed = json.loads(JSON.format(record("m", **fields(request_id="r-2", message="forged", severity="INFO"))))
    assert (parsed["request_id"], parsed["message"], parsed["severity"]) == ("r-2", "m", "WARNING")


def test_a_line_of_text_ends_with_its_fields() -> None:
    with in_request("r-1"):
        assert TEXT.format(record("m", **fields(a="x", b="x y", c=1, d={"e": 0.5}))).endswith(
            ' WARNING tandem.test m request_id=r-1 a=x b="x y" c=1 d={"e": 0.5}'
        )
        assert TEXT.format(record("request r-1 failed")).endswith(" WARNING tandem.test request r-1 failed")
    assert TEXT.format(record("m", **fields(a="", b="k=v", c='"'))).endswith(' m a="" b="k=v" c="\\""')


def test_too_much_is_cut_off() -> None:
    error = raised("x" * 100_000 + " the end")
    line = JSON.format(record("y" * 100_000, error=error, **fields(z="z" * 100_000)))
    parsed = json.loads(line)
    assert parsed["message"] == "y" * MAX_MESSAGE + " ..." and parsed["z"] == "z" * MAX_MESSAGE + " ..."
    assert parsed["exception"].endswith(" the end") and len(parsed["exception"]) == MAX_EXCEPTION + 4
    assert len(TEXT.format(record("y" * 100_000, error=error))) < MAX_MESSAGE + 2 * MAX_EXCEPTION


def test_wrong_arguments_lose_no_line() -> None:
    for formatter in (JSON, TEXT):
        assert "%d of 3 ('many',)" in formatter.format(record("%d of 3", "many"))


def test_no_exception_is_none() -> None:
    made = record("m")
    made.exc_info = sys.exc_info()
    assert "exception" not in json.loads(JSON.format(made)) and "\n" not in TEXT.format(made)
