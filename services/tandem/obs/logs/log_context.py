"""Track which request the running code works for, so that log lines can name it.

Tasks that a request starts inherit it, but only until the request ends: a task that outlives the request names none
afterwards."""

from __future__ import annotations

from contextvars import ContextVar
from types import TracebackType


class InRequest:
    """Name one request in all log lines that are written within a `with` block, or by tasks started in it, until the
    block ends.

    `request_id` is the client's label of the request. `trace_id` and `span_id` are hexadecimal; empty until `traced`
    sets them.
    """

    __slots__ = ("request_id", "span_id", "trace_id")

    def __init__(self, request_id: str) -> None:
        self.request_id = request_id
        self.trace_id = ""
        self.span_id = ""

    def __enter__(self) -> InRequest:
        _current.set(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # Clear the fields instead of the variable: tasks that were started meanwhile have copies of the variable.
        self.request_id = ""
        self.trace_id = ""
        self.span_id = ""


_current: ContextVar[InRequest | None] = ContextVar("tandem_request", default=None)


def traced(traceparent: str) -> None:
    """Add the trace id and span id in a traceparent header to all further log lines of the running request.

    `traceparent`: a valid value of the header. Does nothing where no request runs or `traceparent` is empty."""
    current = _current.get()
    if current is not None and current.request_id and traceparent:
        _, current.trace_id, current.span_id, *_ = traceparent.split("-")


def request_fields() -> dict[str, str]:
    """Return the `request_id`, `trace_id` and `span_id` of the running request, as fields of a log line; fields that
    are not known are left out."""
    current = _current.get()
    if current is None:
        return {}
    known = {"request_id": current.request_id, "trace_id": current.trace_id, "span_id": current.span_id}
    return {name: value for name, value in known.items() if value}
