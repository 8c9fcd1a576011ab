"""Define the types of the identities that packages exchange: of requests, jobs, sequences, workers and KV blocks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, NamedTuple, NewType

from msgspec import Meta

RequestId = NewType("RequestId", str)
SeqId = NewType("SeqId", int)
"""Identifies a sequence inside one engine; not sent to other processes, not reused within an incarnation."""
BlockId = NewType("BlockId", int)
"""Index of a physical KV block in one worker's pool."""
HostSlot = NewType("HostSlot", int)
"""Index of a block's slot in one worker's host memory."""
BlockHash = NewType("BlockHash", bytes)
"""16 bytes that identify a block's tokens and all tokens before them; equal in every process."""
WorkerId = NewType("WorkerId", str)
Incarnation = NewType("Incarnation", int)
"""Identifies one run of a worker process by the nanoseconds of its start, so a later run compares greater."""
HandoffId = NewType("HandoffId", str)
GatewayId = NewType("GatewayId", str)
PlannerId = NewType("PlannerId", str)
"""Identifies one run of a planner process."""
ServeId = NewType("ServeId", str)
"""Identifies one run of a Serve controller."""
TenantId = NewType("TenantId", str)
OPEN_TENANT = TenantId("open")
"""The tenant of all requests where no API key is required."""


class JobKey(NamedTuple):
    """Identify one attempt at one choice of a request.

    `request`: the id of the request. `attempt`: number of the attempt. `choice`: index of the choice. When a worker
    gets an attempt, it ends all attempts at the same choice with smaller numbers. The key is a tuple because it is
    hashed several times for every token, which is fast for a tuple.
    """

    request: RequestId
    attempt: int
    choice: int = 0

    def __str__(self) -> str:
        return f"{self.request}/{self.choice}#{self.attempt}"


@dataclass(frozen=True, slots=True, order=True)
class WorkerRef:
    """Identify one incarnation of a worker, and hold the gRPC address (host:port) at which it answers."""

    id: WorkerId
    incarnation: Annotated[Incarnation, Meta(ge=0)]
    address: str

    def __str__(self) -> str:
        return f"{self.id}@{self.address}"


@dataclass(frozen=True, slots=True, order=True)
class HandoffKey:
    """Identify one attempt at a hand-off of KV between two workers.

    When an attempt is opened, all attempts at the same hand-off with smaller numbers are ended.
    """

    handoff: HandoffId
    attempt: int

    def __str__(self) -> str:
        return f"{self.handoff}#{self.attempt}"
