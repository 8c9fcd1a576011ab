"""Where an answer's time went, as clients read it: in milliseconds, to the microsecond; never measures it."""

from __future__ import annotations

from tandem.gateway.http.openai_schema import TimingFacts
from tandem.gateway.telemetry.request_recorder import RequestTiming


def timing_ms(timing: RequestTiming) -> dict[str, float]:
    """The stages by the names of their fields; all of it."""
    found = {f"{name}_ms": _ms(seconds) for name, seconds in timing.stages._asdict().items()}
    found["total_ms"] = _ms(timing.total_s)
    if timing.first_token_s is not None:
        found["first_token_ms"] = _ms(timing.first_token_s)
    return found


def timing_facts(timing: RequestTiming) -> TimingFacts:
    return TimingFacts(**timing_ms(timing))


def server_timing(timing: RequestTiming) -> bytes:
    """As the header Server-Timing is written (https://www.w3.org/TR/server-timing/), the whole as `total`."""
    named = {**timing.stages._asdict(), "total": timing.total_s}
    return ", ".join(f"{name};dur={_ms(seconds)}" for name, seconds in named.items()).encode()


def _ms(seconds: float) -> float:
    return round(1e3 * seconds, 3)
