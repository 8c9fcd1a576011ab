"""Make what Tandem adds to responses: where the request ran, what it waited for and how long each stage took, in
milliseconds with three decimals."""

from __future__ import annotations

from collections.abc import Iterable

from msgspec import UNSET

from tandem.core.request_stages import Wait, WaitCause
from tandem.gateway.http.openai_schema import TandemFacts, TimingFacts, WaitFacts, YieldFacts
from tandem.gateway.serving.completions import CompletionStream
from tandem.gateway.telemetry.request_recorder import RequestTiming

MIN_WAIT_S = 0.001
"""Shortest wait that is reported to clients, in seconds."""


def tandem_facts(answer: CompletionStream, timing: RequestTiming | None) -> TandemFacts:
    """Return the content of the field `tandem` of a response. `timing`: the times of the request; None where the client
    did not request them."""
    pauses, explanation = answer.pauses, answer.explanation
    return TandemFacts(
        answer.path,
        answer.num_attempts,
        pauses.num or UNSET,
        _ms(pauses.seconds) if pauses.num else UNSET,
        UNSET if answer.reasons is None else answer.reasons,
        UNSET if explanation is None else [_wait_facts(waits) for waits in explanation.waits],
        UNSET if explanation is None else [YieldFacts(lane.label, *counts) for lane, *counts in explanation.yields],
        UNSET if timing is None else _timing_facts(timing),
    )


def server_timing(timing: RequestTiming) -> str:
    """Format the stages and their `total` in milliseconds as the value of the header Server-Timing
    (https://www.w3.org/TR/server-timing/)."""
    named = {**timing.stages._asdict(), "total": timing.total_s}
    return ", ".join(f"{name};dur={_ms(seconds)}" for name, seconds in named.items())


def _timing_facts(timing: RequestTiming) -> TimingFacts:
    stages = {f"{name}_ms": _ms(seconds) for name, seconds in timing.stages._asdict().items()}
    first_token_ms = UNSET if timing.first_token_s is None else _ms(timing.first_token_s)
    return TimingFacts(total_ms=_ms(timing.total_s), first_token_ms=first_token_ms, **stages)


def _wait_facts(waits: Iterable[Wait]) -> list[WaitFacts]:
    """Make one entry for each wait of at least MIN_WAIT_S seconds."""
    found: list[WaitFacts] = []
    for stage, cause, seconds, num_tokens in waits:
        if seconds >= MIN_WAIT_S:
            tokens_ahead = num_tokens if cause is WaitCause.PROMPTS_AHEAD else UNSET
            found.append(WaitFacts(stage.value, cause.value, _ms(seconds), tokens_ahead))
    return found


def _ms(seconds: float) -> float:
    return round(1e3 * seconds, 3)
