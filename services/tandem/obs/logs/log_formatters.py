"""How a log record looks, for people or as JSON; never decides which are logged, and never lets one look like two.

Whatever a message holds, names of clients' choice among it, it stays within its line: what would end a line or move a
terminal's cursor is written as an escape. Of what is too long the beginning is kept, of a traceback the end.
"""

from __future__ import annotations

import json
import logging
import re
import traceback
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, NamedTuple

import msgspec

from tandem.obs.logs.log_context import request_fields

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
        return batch_record([self])


def batch_record(lines: Iterable[Fields]) -> dict[str, Any]:
    """The `extra` of a record that stands for one line or several, at least one, alike in all but these."""
    return {"fields": tuple(lines)}


OF_ANOTHER = fields(request_id=None, trace_id=None, span_id=None)
"""Of a line that is not of the request that happens to run."""


Given = Mapping[str, Any] | Fields
"""What one line says beside its message."""


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
        start = f"{self.formatTime(record)} {record.levelname} {record.name} {message}"
        lines = [start + _after(message, told) for told in map(_told, _given(record))]
        raised = _exception(record)
        return "\n".join([*lines, *(f"  {_one_line(each)}" for each in (raised.split("\n") if raised else ()))])


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
        raised = _exception(record)
        after = {} if raised is None else {"exception": raised}
        given = _given(record)
        start = _json(own) if raised is None and isinstance(given[0], Fields) else None
        return "\n".join(_quick_line(start, each) or _line(own, each, after) for each in given)


def _quick_line(start: str | None, given: Given) -> str | None:
    """What begins with `start`, one object; None: it cannot be done so."""
    told = None if start is None else _json(given)
    if start is None or told is None:
        return None
    return start if told == "{}" else f"{start[:-1]},{told[1:]}"


def _line(own: Mapping[str, Any], given: Given, after: Mapping[str, Any]) -> str:
    line = {**own, **_told(given), **own, **after}  # in this order, and no field is taken for one of these
    return _json(line) or _JSON.encode(line)


def _json(value: Mapping[str, Any] | Fields) -> str | None:
    """The quick encoder knows fewer values than the other, and does not write all in ASCII: None."""
    try:
        told = _FAST_JSON.encode(value)
    except Exception:
        return None
    return told.decode() if told.isascii() else None


def _given(record: logging.LogRecord) -> Sequence[Given]:
    """Of each of its lines, of which there is at least one."""
    given: Mapping[str, Any] | tuple[Fields, ...] = getattr(record, "fields", {})
    return given if isinstance(given, tuple) else ({**request_fields(), **given},)


def _told(given: Given) -> dict[str, Any]:
    known = msgspec.to_builtins(given) if isinstance(given, Fields) else given
    told = {name: value for name, value in known.items() if value is not None}
    for name in [name for name, value in told.items() if isinstance(value, str) and len(value) > MAX_MESSAGE]:
        told[name] = _cut(told[name], MAX_MESSAGE)
    return told


def _after(message: str, told: Mapping[str, Any]) -> str:
    """Of a line for people, what it says beside its message."""
    return "".join(
        f" {name}={_shown(value)}" for name, value in told.items() if name != "request_id" or str(value) not in message
    )


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
