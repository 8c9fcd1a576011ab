"""How a log record looks, for people or as JSON; never decides which are logged, and never lets one look like two.

Whatever a message holds, names of clients' choice among it, it stays within its line: what would end a line or move a
terminal's cursor is written as an escape. Of what is too long the beginning is kept, of a traceback the end.
"""

from __future__ import annotations

import json
import logging
import re
import traceback
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any, NamedTuple

import msgspec

from tandem.obs.log_context import request_fields

MAX_MESSAGE = 8192
"""Characters; also of each field."""
MAX_EXCEPTION = 16384
_CONTROLS = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029]")
_JSON = json.JSONEncoder(default=str, separators=(",", ":"))
_FAST_JSON = msgspec.json.Encoder(enc_hook=str)
_OWN = frozenset(("timestamp", "severity", "logger", "message", "service", "instance", "pid", "thread", "exception"))
"""Names of what each line of JSON has."""
_WORD = re.compile(r"[!#-<>-~]+")


class Origin(NamedTuple):
    """Whose lines they are, by the names that traces and metrics have for it. `pid`: of its process."""

    service: str
    instance: str
    pid: int


def fields(**values: Any) -> dict[str, Any]:
    """What a line says beside its message, as the `extra` of a logging call: values that JSON knows. Those named
    `request_id` and the like take the place of the running request's own; None: there is none."""
    return {"fields": values}


class Fields(msgspec.Struct, omit_defaults=True, frozen=True):
    """As `fields`, and instead of it, of lines of which there are many: a type has its names once, not in each line.
    Nothing of the running request is added. None as a default: there is none. Texts have bounds of their own. TypeError
    refuses a type one of whose names a line has anyway."""

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if taken := _OWN.intersection(cls.__annotations__):
            raise TypeError(f"{cls.__name__} has what a line has anyway: {', '.join(sorted(taken))}")

    def extra(self) -> dict[str, Any]:
        return {"fields": self}


OF_ANOTHER = fields(request_id=None, trace_id=None, span_id=None)
"""Of a line that is not of the request that happens to run."""


def message_of(record: logging.LogRecord) -> str:
    """Never raises: a line with the wrong arguments is still a line."""
    try:
        return record.getMessage()
    except Exception:
        return f"{record.msg} {record.args!r}"


class TextFormatter(logging.Formatter):
    """A line for people; the lines of a traceback follow it, indented."""

    def format(self, record: logging.LogRecord) -> str:
        message = _one_line(_cut(message_of(record), MAX_MESSAGE))
        told = "".join(
            f" {name}={_shown(value)}"
            for name, value in _fields(record).items()
            if name != "request_id" or str(value) not in message
        )
        line = f"{self.formatTime(record)} {record.levelname} {record.name} {message}{told}"
        raised = _exception(record)
        return line if raised is None else "\n".join([line, *(f"  {_one_line(each)}" for each in raised.split("\n"))])


class JsonFormatter(logging.Formatter):
    """One JSON object per line, in ASCII."""

    def __init__(self, origin: Origin) -> None:
        super().__init__()
        self._origin = origin._asdict()

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
        given = getattr(record, "fields", None)
        if isinstance(given, Fields) and not record.exc_info:
            told = _json(own, given)
            if told is not None:
                return told
        line = {**own, **_fields(record), **own}  # in this order, and no field is taken for one of these
        raised = _exception(record)
        if raised is not None:
            line["exception"] = raised
        return _json(line) or _JSON.encode(line)


def _json(*parts: Mapping[str, Any] | Fields) -> str | None:
    """One object. The quick encoder knows fewer values than the other, and does not write all in ASCII: None."""
    try:
        told = b",".join(filter(None, (_FAST_JSON.encode(part)[1:-1] for part in parts)))
    except Exception:
        return None
    return f"{{{told.decode()}}}" if told.isascii() else None


def _fields(record: logging.LogRecord) -> dict[str, Any]:
    given: Mapping[str, Any] | Fields = getattr(record, "fields", {})
    known = msgspec.to_builtins(given) if isinstance(given, Fields) else {**request_fields(), **given}
    told = {name: value for name, value in known.items() if value is not None}
    for name in [name for name, value in told.items() if isinstance(value, str) and len(value) > MAX_MESSAGE]:
        told[name] = _cut(told[name], MAX_MESSAGE)
    return told


def _exception(record: logging.LogRecord) -> str | None:
    """With all that led to it, as the interpreter writes it."""
    if not record.exc_info or record.exc_info[0] is None:
        return None
    text = "".join(traceback.format_exception(*record.exc_info)).rstrip("\n")
    return text if len(text) <= MAX_EXCEPTION else f"... {text[-MAX_EXCEPTION:]}"


def _cut(text: str, num_chars: int) -> str:
    return text if len(text) <= num_chars else f"{text[:num_chars]} ..."


def _one_line(text: str) -> str:
    return _CONTROLS.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def _shown(value: Any) -> str:
    """Words as they are, all else as JSON."""
    return value if isinstance(value, str) and _WORD.fullmatch(value) else json.dumps(value, default=str)
