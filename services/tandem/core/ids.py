"""The identities that cross rooms; owns their types and never their meaning."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, NewType

RequestId = NewType("RequestId", str)
SeqId = NewType("SeqId", int)
"""A sequence inside one engine; never leaves the worker, never reused within an incarnation."""
BlockId = NewType("BlockId", int)
"""Index of a physical KV block in one worker's pool."""
HostSlot = NewType("HostSlot", int)
"""Index of a place for one block in one worker's host memory."""
BlockHash = NewType("BlockHash", bytes)
"""16 bytes naming a block's tokens and all tokens before them; equal in every process."""
WorkerId = NewType("WorkerId", str)
Incarnation = NewType("Incarnation", int)
"""One life of a worker process: nanoseconds of its start, so a later life compares greater."""
HandoffId = NewType("HandoffId", str)
GatewayId = NewType("GatewayId", str)
PlannerId = NewType("PlannerId", str)
"""One life of a planner."""
ServeId = NewType("ServeId", str)
"""One life of a Serve's controller."""
TenantId = NewType("TenantId", str)
OPEN_TENANT = TenantId("open")
"""Everybody's, where no key is asked for."""


class JobKey(NamedTuple):
    """Names one attempt at one choice of a request; a greater `attempt` fences the smaller ones.

    A tuple, because it is hashed several times for every token.
    """

    request: RequestId
    attempt: int
    choice: int = 0

    def __str__(self) -> str:
        return f"{self.request}/{self.choice}#{self.attempt}"


@dataclass(frozen=True, slots=True, order=True)
class WorkerRef:
    """One life of one worker, with the gRPC address (host:port) at which that life answers."""

    id: WorkerId
    incarnation: Incarnation
    address: str

    def __str__(self) -> str:
        return f"{self.id}@{self.address}"


@dataclass(frozen=True, slots=True, order=True)
class HandoffKey:
    """One grant of a hand-off; a greater attempt fences the smaller ones."""

    handoff: HandoffId
    attempt: int

    def __str__(self) -> str:
        return f"{self.handoff}#{self.attempt}"
