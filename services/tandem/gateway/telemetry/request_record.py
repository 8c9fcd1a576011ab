"""Define the record of one request that has ended, and the interface of its observers.

A record holds no text of the prompt or of the output."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from tandem.core.events import LaneYield, Pauses
from tandem.gateway.telemetry.usage import Usage
from tandem.orchestration.phase_ledger import StageSeconds

FINISHED, CANCELLED, INTERNAL = "finished", "cancelled", "internal"
MAX_ERROR_CHARS = 500
"""Largest number of characters of a record's error: messages quote the client's input, which may have megabytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestRecord:
    """Everything that the gateway keeps of one HTTP exchange or RPC that has ended, over all its prompts.

    - `id`: the gateway's own id. `label`: the client's `x-request-id`. `endpoint`: "chat" or "completion". `model`: the
      served name; empty where no such model is served.
    - `outcome`: "finished", "cancelled", or the kind of the error that ended the request. `error`: the beginning of the
      error's message.
    - `path`: "remote" (two workers), "local" (one worker) or "fallback" (one worker, because the request could not be
      split); empty where the request was not placed. `reason`: why the request took that path, or the limit that
      refused it; may be empty.
    - `num_attempts`: 1 plus the retries, the maximum over the prompts; 0 where the request was not admitted.
      `num_retries`: the retries of all prompts. `workers`: ids of the workers of the last placement, the one that
      computed the prompt first; empty where the request was not placed.
    - `pauses`: number and seconds of the preemptions after which a choice was resumed, over all prompts and choices.
    - `yields`: number and losses of the sequences that were preempted in favour of the request, by lane.
    - `received_at`: seconds since the epoch. `first_token_s`: seconds from arrival to the first token sent; None where
      no token was sent.
    - `token_s`: mean gap (time between two tokens of a choice) in seconds; None where there was no gap.
      `longest_gap_s`: the longest gap. `num_gaps`: all gaps. `num_late_gaps`: the gaps longer than the target of the
      request's lane.
    - `stages`: seconds by stage, which add up to `total_s`; with several prompts, those of the prompt that ended last.
    - `trace`: hexadecimal id of the trace; empty where the trace is not sampled. `traceparent`: the header as passed on
      to workers, also where the trace is not sampled; empty where there was none.
    """

    id: str
    label: str
    trace: str
    traceparent: str
    endpoint: str
    model: str
    tenant: str
    lane: str
    outcome: str
    error: str
    path: str
    reason: str
    num_attempts: int
    num_retries: int
    pauses: Pauses
    yields: tuple[LaneYield, ...]
    workers: tuple[str, ...]
    is_streamed: bool
    usage: Usage
    received_at: float
    total_s: float
    first_token_s: float | None
    token_s: float | None
    longest_gap_s: float
    num_gaps: int
    num_late_gaps: int
    stages: StageSeconds


class RequestObserver(Protocol):
    """Receive the record of each ended request: of admitted requests, and of requests refused after their body was
    read."""

    def answered(self, record: RequestRecord) -> None:
        """Receive one record, on the event loop and without blocking.

        An exception is logged, and the record is then lost for this observer only.
        """
        ...
