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
    """What an actuator did with a decision.

    `outcome`: see `Outcome`. `replicas`: number of workers that were requested, by the role of their pool; empty if
    none were. `notes`: sentences for the report."""

    outcome: Outcome
    replicas: Mapping[str, int]
    notes: tuple[str, ...] = ()


class ActuatorFailed(Exception):
    """Raised when a decision cannot be applied, or the cluster cannot be read, at the moment.

    The next decision tries again."""


class Actuator(Protocol):
    """Applies the planner's decisions for one model: starts and ends workers, and changes their roles.

    Methods raise ActuatorFailed, and StoreUnavailable when Redis does not answer."""

    @property
    def leads(self) -> bool:
        """Return whether this planner's decisions are applied, rather than another planner's, as far as it knows."""
        ...

    async def starting(self, model: str, workers: Sequence[WorkerState]) -> Mapping[str, int]:
        """Return how many workers of `model` were requested and have not registered yet, by the role of their pool.

        `workers`: all registered workers, of all models."""
        ...

    async def carry_out(
        self, model: str, targets: PoolTargets, reasons: tuple[str, ...], workers: Sequence[WorkerState]
    ) -> ActuationResult:
        """Request the numbers of workers and the role changes in `targets`, and return what was done.

        `reasons`: sentences of the decision, for people. `workers`: all registered workers, of all models. The outcome
        is "standby", with no replicas requested, while another planner leads."""
        ...

    async def close(self) -> None: ...
