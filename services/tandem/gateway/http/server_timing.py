"""Format the stages of a request and its waits for its client, in milliseconds with three decimals."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from tandem.core.events import LaneYield, Pauses
from tandem.core.request_stages import Wait, WaitCause
from tandem.gateway.telemetry.request_recorder import RequestTiming

MIN_WAIT_S = 0.001
"""Shortest wait that clients see, in seconds."""


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


def waits_ms(waits: Iterable[Wait]) -> list[dict[str, Any]]:
    """Return the waits of at least MIN_WAIT_S by field name of WaitFacts, in milliseconds."""
    found: list[dict[str, Any]] = []
    for wait in waits:
        if wait.seconds >= MIN_WAIT_S:
            entry = {"stage": wait.stage.value, "cause": wait.cause.value, "ms": _ms(wait.seconds)}
            tokens = {"tokens_ahead": wait.num_tokens_ahead} if wait.cause is WaitCause.PROMPTS_AHEAD else {}
            found.append(entry | tokens)
    return found


def yield_counts(yields: Iterable[LaneYield]) -> list[dict[str, Any]]:
    """Return what was preempted for a request by field name of YieldFacts, one entry for each lane."""
    return [
        {"lane": lane.label, "sequences": num_sequences, "tokens": num_tokens, "blocks": num_blocks}
        for lane, num_sequences, num_tokens, num_blocks in yields
    ]


def _ms(seconds: float) -> float:
    return round(1e3 * seconds, 3)
