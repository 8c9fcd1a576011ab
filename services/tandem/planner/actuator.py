"""Define the interface through which the planner applies its decisions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from tandem.planner.pool_targets import PoolTargets
from tandem.planner.worker_state import WorkerState

Outcome = Literal["carried_out", "explained", "held_back", "standby", "failed"]


@dataclass(frozen=True, slots=True)
class ActuationResult:
    """What was done with a decision. `replicas`: requested workers by the role of their pool. `notes`: plain
    sentences."""

    outcome: Outcome
    replicas: Mapping[str, int]
    notes: tuple[str, ...] = ()


class ActuatorFailed(Exception):
    """Raised when a decision cannot be applied, or the cluster cannot be read, at the moment; a later try may
    succeed."""


class Actuator(Protocol):
    """Apply the decisions for one model.

    Methods raise ActuatorFailed, and the error of a store when Redis is not available.
    """

    @property
    def leads(self) -> bool:
        """Return whether this planner applies its decisions, as far as it knows."""
        ...

    async def starting(self, model: str, workers: Sequence[WorkerState]) -> Mapping[str, int]:
        """Count the requested workers that have not registered yet, by the role of their pool."""
        ...

    async def carry_out(
        self, model: str, targets: PoolTargets, reasons: tuple[str, ...], workers: Sequence[WorkerState]
    ) -> ActuationResult:
        """Apply `targets`. `reasons`: sentences of the decision; `workers`: those of all models."""
        ...

    async def close(self) -> None: ...
