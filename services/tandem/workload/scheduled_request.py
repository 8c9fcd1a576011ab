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
    """A request to be sent `due_s` seconds after the start of a load test or simulation, whether or not earlier
    requests have ended.

    `group`: its class in reports. `tenant`: empty for the open tenant. `follow`: builds the client's next request in
    the same conversation, due after the end of this one; None if this is the last. `session`: requests of one session
    prefer one worker. `timeout_s`: seconds from its arrival after which the client gives up; None if it does not.
    """

    request: Request
    group: str
    due_s: float
    tenant: str = ""
    follow: Follow | None = None
    session: str = ""
    timeout_s: float | None = None
