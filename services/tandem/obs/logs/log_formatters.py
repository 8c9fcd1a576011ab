"""Format log records, for people or as JSON, so that a record cannot look like two.

Whatever a message contains, including names that clients chose, stays on its line: line ends and terminal control
characters are escaped. Messages that are too long lose their end, tracebacks their beginning."""

from __future__ import annotations

import json
import logging
import re
import traceback
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

import msgspec

from tandem.obs.logs.log_context import request_fields

MAX_MESSAGE = 8192
"""Largest number of characters of a message, and of each field of a line."""
MAX_EXCEPTION = 16384
_CONTROLS = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029]")
_JSON = json.JSONEncoder(default=str, separators=(",", ":"))
_FAST_JSON = msgspec.json.Encoder(enc_hook=str)
_WORD = re.compile(r"[!#-<>-~]+")


def fields(**values: Any) -> dict[str, Any]:
    """Build the argument `extra` of a logging call, so that the log line has the fields `values`, by name; a JSON
    encoder must accept them.

    A field of this call replaces a field of the running request with the same name, such as `request_id`; the value
    None removes that field from the line.
    """
    return {"fields": values}


OF_ANOTHER = fields(request_id=None, trace_id=None, span_id=None)
"""Argument `extra` of a logging call whose line must not name the running request, because it concerns another."""


def message_of(record: logging.LogRecord) -> str:
    """Return the message of a log record with its arguments inserted.

    Where the arguments do not fit the message, both are returned unformatted, without an exception.
    """
    try:
        return record.getMessage()
    except Exception:
        return f"{record.msg} {record.args!r}"


class TextFormatter(logging.Formatter):
    """Format a record as one line for people, with its fields; a traceback follows in indented lines."""

    def format(self, record: logging.LogRecord) -> str:
        message = _one_line(_cut(message_of(record), MAX_MESSAGE))
        start = f"{self.formatTime(record)} {record.levelname} {record.name} {message}"
        raised = _exception(record)
        traceback_lines = [] if raised is None else [f"  {_one_line(each)}" for each in raised.split("\n")]
        fields_text = "".join(
            f" {name}={_to_text(value)}"
            for name, value in _line_fields(record).items()
            if name != "request_id" or str(value) not in message
        )
        return "\n".join([start + fields_text, *traceback_lines])


class JsonFormatter(logging.Formatter):
    """Format a record as one line with a JSON object, in ASCII.

    `origin`: fields that every line has: `service` and `instance`, with the same values as in traces and metrics, and
    `pid`."""

    def __init__(self, origin: Mapping[str, Any]) -> None:
        super().__init__()
        self._origin = origin

    def format(self, record: logging.LogRecord) -> str:
        at = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="microseconds")
        own: dict[str, Any] = {
            "timestamp": at.removesuffix("+00:00") + "Z",
            "severity": record.levelname,
            "logger": record.name,
            "message": _cut(message_of(record), MAX_MESSAGE),
            **self._origin,
            "thread": record.threadName,
        }
        raised = _exception(record)
        after = {} if raised is None else {"exception": raised}
        # `own` comes first for the order of the fields, and again so that no field of the line replaces one of its own.
        line = {**own, **_line_fields(record), **own, **after}
        return _json(line) or _JSON.encode(line)


def _json(line: Mapping[str, Any]) -> str | None:
    """Return the line as JSON; None where the fast encoder does not know a type, or writes non-ASCII."""
    try:
        encoded = _FAST_JSON.encode(line)
    except Exception:
        return None
    return encoded.decode() if encoded.isascii() else None


def _line_fields(record: logging.LogRecord) -> dict[str, Any]:
    """Return the fields of a record's line, each within MAX_MESSAGE."""
    every = {**request_fields(), **getattr(record, "fields", {})}
    return {
        name: _cut(value, MAX_MESSAGE) if isinstance(value, str) else value
        for name, value in every.items()
        if value is not None
    }


def _exception(record: logging.LogRecord) -> str | None:
    """Return the traceback with its causes, as the interpreter formats it; None where there is none."""
    if not record.exc_info or record.exc_info[0] is None:
        return None
    text = "".join(traceback.format_exception(*record.exc_info)).rstrip("\n")
    return text if len(text) <= MAX_EXCEPTION else f"... {text[-MAX_EXCEPTION:]}"


def _cut(text: str, num_chars: int) -> str:
    return text if len(text) <= num_chars else f"{text[:num_chars]} ..."


def _one_line(text: str) -> str:
    return _CONTROLS.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def _to_text(value: Any) -> str:
    """Return words as they are, other values as JSON."""
    return value if isinstance(value, str) and _WORD.fullmatch(value) else json.dumps(value, default=str)
