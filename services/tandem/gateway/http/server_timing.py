"""Format the stages of a request for its client, in milliseconds with three decimals."""

from __future__ import annotations

from tandem.core.events import Pauses
from tandem.gateway.telemetry.request_recorder import RequestTiming


def timing_ms(timing: RequestTiming) -> dict[str, float]:
    """Return a request's times in milliseconds by field name of TimingFacts; `first_token_ms` is missing while no token
    was sent."""
    found = {f"{name}_ms": _ms(seconds) for name, seconds in timing.stages._asdict().items()}
    found["total_ms"] = _ms(timing.total_s)
    if timing.first_token_s is not None:
        found["first_token_ms"] = _ms(timing.first_token_s)
    return found


def server_timing(timing: RequestTiming) -> str:
    """Format the stages and their `total` in milliseconds as the value of the header Server-Timing
    (https://www.w3.org/TR/server-timing/)."""
    named = {**timing.stages._asdict(), "total": timing.total_s}
    return ", ".join(f"{name};dur={_ms(seconds)}" for name, seconds in named.items())


def paused_ms(pauses: Pauses) -> float:
    """Return the sum of a request's pauses in milliseconds."""
    return _ms(pauses.seconds)


def _ms(seconds: float) -> float:
    return round(1e3 * seconds, 3)
