"""What a gateway remembers of one answer that has ended, as a frozen value, and who is told; never any of its text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from tandem.gateway.telemetry.usage import Usage
from tandem.orchestration.phase_ledger import StageSeconds

FINISHED, CANCELLED, INTERNAL = "finished", "cancelled", "internal"


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestRecord:
    """`id` is ours, `label` the client's `x-request-id`. `endpoint`: "chat" or "completion". `outcome`: "finished",
    "cancelled", or the kind of the error that ended it, whose message is `error`. `reason`: which limit refused it, or
    why it took its `path`; empty where there is none. `workers`: ids of those that it was placed at last, the one that
    computed its prompt first; one where that did all, none where it found no place.

    `model`: the name of what is served; empty where there is no such. `path`: "remote", "local" or "fallback"; empty
    where it found no place.

    `received_at`: seconds since the epoch. `first_token_s`: from its arrival to when its first token left; None: it had
    none. `token_s`: mean time between two tokens of a choice; None: there were none. Gaps are those times; late ones
    are longer than its lane's target.
    `stages` add up to `total_s`; of several prompts they are those of the one that ended last.
    `trace`: its trace's id in hexadecimal; empty: it has none that is sampled. `traceparent`: as it was passed on, of
    one that is not sampled too; empty: there was none.
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
    """Whoever looks at answers that have ended. Called on the event loop, for several of them together, and once for
    each that was admitted, or refused after its body was read. Must neither block nor raise: what raises loses all of
    them."""

    def answered(self, records: Sequence[RequestRecord]) -> None: ...
