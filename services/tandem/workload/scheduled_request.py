"""Define a request with its due time, as a frozen value."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tandem.core.request import Request

MODEL = "workload"
"""Placeholder model of every request; the sender substitutes the real one."""

Follow = Callable[[Sequence[int], float], "ScheduledRequest"]
"""Makes the client's next request from the token ids of the output and the time at which it ended."""


@dataclass(frozen=True, slots=True)
class ScheduledRequest:
    """A request to be sent `due_s` seconds after the start, regardless of other requests.

    `group` is its class in reports. `follow` makes the next turn of its conversation, due after this one's end; None:
    it is the last. `session`: requests of one session prefer one worker. `timeout_s`: the client's deadline, counted
    from the arrival; None without one.
    """

    request: Request
    group: str
    due_s: float
    tenant: str = ""
    follow: Follow | None = None
    session: str = ""
    timeout_s: float | None = None
