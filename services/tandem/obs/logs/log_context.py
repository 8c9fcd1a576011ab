"""Which request the code that runs works for, so that log lines can name it; never decides what is logged.

What a request starts names it too, but only while it is answered: a task that a request happened to start and that
goes on for others names nobody's request once that one is over.
"""

from __future__ import annotations

from contextvars import ContextVar
from types import TracebackType


class InRequest:
    """A context around what answers one request. `request_id`: the client's label for it. `trace_id` and `span_id`, in
    hexadecimal, are set when they are known; empty: there are none."""

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
        # Not only here: the tasks that began in between have copies of the variable.
        self.request_id = self.trace_id = self.span_id = ""


_current: ContextVar[InRequest | None] = ContextVar("tandem_request", default=None)


def traced(traceparent: str) -> None:
    """What the running request is called in traces, by a valid header value. Nothing happens where none runs any more,
    or where it is empty."""
    current = _current.get()
    if current is not None and current.request_id and traceparent:
        _, current.trace_id, current.span_id, *_ = traceparent.split("-")


def request_fields() -> dict[str, str]:
    """Of the running request, what is known."""
    current = _current.get()
    if current is None:
        return {}
    known = {"request_id": current.request_id, "trace_id": current.trace_id, "span_id": current.span_id}
    return {name: value for name, value in known.items() if value}
