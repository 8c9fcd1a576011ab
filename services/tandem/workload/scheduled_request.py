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

    `group`: name of its class in reports. `tenant`: empty for the open tenant. `follow`: function that builds the
    client's next request in the same conversation from the output of this one and the time of its end; None if this is
    the last. `session`: name of the client's session, whose requests prefer the same worker; empty: none. `timeout_s`:
    seconds from its arrival after which the client gives up; None: never."""

    request: Request
    group: str
    due_s: float
    tenant: str = ""
    follow: Follow | None = None
    session: str = ""
    timeout_s: float | None = None
