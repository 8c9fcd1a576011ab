"""Track which request the running code works for, so that log lines can name it.

Tasks that a request starts inherit it, but only until the request ends: a task that outlives the request names none
afterwards."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_current: ContextVar[dict[str, str] | None] = ContextVar("tandem_request", default=None)
"""The fields of the running request; empty once it has ended."""


@contextmanager
def in_request(request_id: str) -> Iterator[None]:
    """Name one request in all log lines that are written within a `with` block, or by tasks started in it, until the
    block ends. `request_id`: the client's label of the request."""
    fields = {"request_id": request_id}
    _current.set(fields)
    try:
        yield
    finally:
        fields.clear()  # instead of the variable, of which tasks that were started meanwhile have copies


def traced(traceparent: str) -> None:
    """Add the trace id and span id in a traceparent header to all further log lines of the running request.

    `traceparent`: a valid value of the header. Does nothing where no request runs or `traceparent` is empty."""
    fields = _current.get()
    if fields and traceparent:
        _, fields["trace_id"], fields["span_id"], *_ = traceparent.split("-")


def request_fields() -> dict[str, str]:
    """Return the `request_id`, and once `traced` was called the `trace_id` and `span_id`, of the running request, as
    fields of a log line; empty where no request runs."""
    return dict(_current.get() or {})
