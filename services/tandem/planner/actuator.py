"""Define the interface through which the planner applies its decisions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from tandem.planner.pool_targets import PoolTargets
from tandem.scaling.worker_state import WorkerState

Outcome = Literal["carried_out", "explained", "held_back", "standby", "failed"]


@dataclass(frozen=True, slots=True)
class ActuationResult:
    """Describe what an actuator did with a decision.

    `outcome`: "carried_out", or "standby" if another planner leads. `replicas`: number of workers that were requested,
    by the role of their pool; empty if none were. `notes`: sentences for the report."""

    outcome: Outcome
    replicas: Mapping[str, int]
    notes: tuple[str, ...] = ()


class ActuatorFailed(Exception):
    """Raised when a decision cannot be applied at the moment, or the cluster cannot be read.

    The planner tries again with its next decision."""


class Actuator(Protocol):
    """Applies the planner's decisions for one model: starts and ends workers, and changes their roles.

    Methods raise ActuatorFailed, and StoreUnavailable when Redis does not answer."""

    @property
    def leads(self) -> bool:
        """Return whether this planner leads, so that its decisions are applied and not those of another planner.

        The answer is what this planner knows at the moment; no server is asked."""
        ...

    async def starting(self, model: str, workers: Sequence[WorkerState]) -> Mapping[str, int]:
        """Return how many workers were requested and have not registered yet, by the role of their pool.

        `model`: name of the model that these workers serve. `workers`: all registered workers, of all models."""
        ...

    async def carry_out(
        self, model: str, targets: PoolTargets, reasons: tuple[str, ...], workers: Sequence[WorkerState]
    ) -> ActuationResult:
        """Request the numbers of workers and the role changes in `targets`, and return what was done.

        `model`: name of the model whose workers are scaled. `reasons`: sentences of the decision, for people.
        `workers`: all registered workers, of all models. While another planner leads, nothing is requested and the
        outcome is "standby"."""
        ...

    async def close(self) -> None: ...
