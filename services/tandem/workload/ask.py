"""A request and when it is due, frozen; never sends one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tandem.core.request import Request

MODEL = "workload"
"""Of every request: whoever sends it knows the one model that is meant."""

Follow = Callable[[Sequence[int], float], "ScheduledRequest"]
"""What the same client asks next, from the token ids of its answer and the time at which that ended."""


@dataclass(frozen=True, slots=True)
class ScheduledRequest:
    """To be sent `due_s` after the beginning, whatever became of others. `group` is its class in reports. `follow`
    makes the next turn of its conversation, due after this one's end; None: it is the last."""

    request: Request
    group: str
    due_s: float
    tenant: str = ""
    follow: Follow | None = None
