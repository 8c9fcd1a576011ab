"""What the planner needs from whoever carries its decisions out; owns no implementation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from tandem.planner.worker_state import WorkerState
from tandem.scaling.decision import Decision

Outcome = Literal["carried_out", "explained", "held_back", "standby", "failed"]


@dataclass(frozen=True, slots=True)
class ActuationResult:
    """What became of a decision. `replicas` were asked for, by the role of a pool. `notes` in plain sentences."""

    outcome: Outcome
    replicas: Mapping[str, int]
    notes: tuple[str, ...] = ()


class ActuatorFailed(Exception):
    """It cannot be done, or known, now. Trying again later is right."""


class Actuator(Protocol):
    """Of one model. Methods raise ActuatorFailed, and a store's own error where Redis is away."""

    @property
    def leads(self) -> bool:
        """Whether it carries out what is decided here, as far as it knows."""
        ...

    async def starting(self, model: str, workers: Sequence[WorkerState]) -> Mapping[str, int]:
        """Workers that were asked for and that nobody has met yet, by the role of a pool."""
        ...

    async def carry_out(
        self, model: str, decision: Decision, workers: Sequence[WorkerState], starting: Mapping[str, int]
    ) -> ActuationResult: ...

    async def close(self) -> None: ...
