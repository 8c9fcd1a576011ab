"""Format what a client receives about the time of its request: stages and waits, in milliseconds with three
decimals."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from tandem.core.events import LaneYield, Pauses
from tandem.core.request_stages import Wait, WaitCause
from tandem.gateway.telemetry.request_recorder import RequestTiming

MIN_WAIT_S = 0.001
"""Shortest wait that is reported to clients, in seconds."""


def timing_ms(timing: RequestTiming) -> dict[str, float]:
    """Return a request's times in milliseconds as a dictionary with the fields of TimingFacts; `first_token_ms` is
    missing while no token was sent."""
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
    """Return the total time in milliseconds between the preemptions of a request's choices and their resumptions."""
    return _ms(pauses.seconds)


def waits_ms(waits: Iterable[Wait]) -> list[dict[str, Any]]:
    """Return one dictionary with the fields of WaitFacts for each wait of at least MIN_WAIT_S seconds, with its
    duration in milliseconds."""
    found: list[dict[str, Any]] = []
    for wait in waits:
        if wait.seconds >= MIN_WAIT_S:
            entry = {"stage": wait.stage.value, "cause": wait.cause.value, "ms": _ms(wait.seconds)}
            tokens = {"tokens_ahead": wait.num_tokens_ahead} if wait.cause is WaitCause.PROMPTS_AHEAD else {}
            found.append(entry | tokens)
    return found


def yield_counts(yields: Iterable[LaneYield]) -> list[dict[str, Any]]:
    """Return one dictionary with the fields of YieldFacts for each lane in which sequences were preempted in favour of
    a request.

    `yields`: one entry for each such lane, with the number of the preempted sequences, the tokens that they have to
    compute again at most, and the KV blocks that they held."""
    return [
        {"lane": lane.label, "sequences": num_sequences, "tokens": num_tokens, "blocks": num_blocks}
        for lane, num_sequences, num_tokens, num_blocks in yields
    ]


def _ms(seconds: float) -> float:
    return round(1e3 * seconds, 3)
