"""Define the record of one request that has ended, and the interface of its observers.

A record holds no text of the prompt or of the output."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from tandem.gateway.telemetry.usage import Usage
from tandem.orchestration.phase_ledger import StageSeconds

FINISHED, CANCELLED, INTERNAL = "finished", "cancelled", "internal"


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestRecord:
    """Everything that the gateway remembers of one HTTP exchange or RPC that has ended, over all its prompts.

    `id`: the gateway's own. `label`: the client's `x-request-id`. `endpoint`: "chat" or "completion".
    `outcome`: "finished", "cancelled", or the kind of the error that ended the request, whose message is `error`.
    `reason`: the limit that refused the request, or why it took its `path`; empty where there is none.
    `model`: the served name; empty where no such model is served. `path`: "remote", "local" or "fallback"; empty where
    the request was never placed. `workers`: ids of the workers of its last placement, the one that computed the prompt
    first; a single id where one worker did everything, none where the request was never placed.

    `received_at`: seconds since the epoch. `first_token_s`: seconds from arrival to the first token sent; None: none
    was. `token_s`: mean seconds between two tokens of a choice; None: there were no two. A gap is the time between two
    tokens of a choice; a late one is longer than the target of the request's lane.
    `stages` add up to `total_s`; with several prompts they are those of the prompt that ended last.
    `trace`: id of the trace in hexadecimal; empty where the trace is not sampled. `traceparent`: the header as passed
    on to workers, also where the trace is not sampled; empty: there was none.
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
    """Receive the records of requests that have ended, admitted ones and those refused after their body was read.

    Called on the event loop, once for each record. It must not block. Where it raises, the observer loses that
    record."""

    def answered(self, record: RequestRecord) -> None: ...
