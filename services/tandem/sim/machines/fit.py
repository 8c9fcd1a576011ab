"""Fit a step cost and its residuals to the step logs of real workers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tandem.core.errors import ErrorKind, TandemError
from tandem.core.step_cost import StepCost, StepFeatures
from tandem.engine.step_log import StepLog
from tandem.sched.budget.step_time_model import GENERIC, fit
from tandem.sim.cost.residuals import residuals_of
from tandem.sim.machines.profile import WorkerProfile

RIDGE = 1e-3
"""Weight of the generic step cost that fills in where the steps do not determine a coefficient: a thousandth of one
step. A log has thousands of steps, of which few may have prompt tokens."""
LEAST_STEPS = 100
"""Steps below which a worker's step times cannot be fitted."""


@dataclass(frozen=True, slots=True)
class FitQuality:
    """Quality of a fit on the steps that it was fitted to.

    `total`: predicted time of all steps divided by their measured time. `median`, `p99`: percentiles over the steps of
    `|measured / predicted - 1|`."""

    total: float
    median: float
    p99: float


def fit_worker(logs: Sequence[StepLog]) -> tuple[WorkerProfile, FitQuality]:
    """Fit the step times of one kind of worker to the step logs of one or several such workers; return the profile and
    the quality of the fit.

    The first `LEAST_STEPS // 5` steps of each log are left out, because caches and estimates were cold. Raises
    TandemError when the logs are too short or come from workers with different models or settings."""
    head = logs[0].head
    for log in logs[1:]:
        if (log.head.model, log.head.layout, log.head.settings) != (head.model, head.layout, head.settings):
            message = f"{log.head.worker} and {head.worker} ran with different models or settings: fit them apart"
            raise TandemError(ErrorKind.INVALID_REQUEST, message)
    samples = [sample for log in logs for sample in _samples(log)]
    if len(samples) < LEAST_STEPS:
        message = f"{len(samples)} steps of {head.pool} workers are too few to fit on: at least {LEAST_STEPS}"
        raise TandemError(ErrorKind.INVALID_REQUEST, message)
    cost = fit(samples, GENERIC, RIDGE)
    profile = WorkerProfile(
        layout=head.layout,
        num_blocks=min(log.head.num_blocks for log in logs),
        num_steps=len(samples),
        cost=cost,
        residuals=residuals_of((step, seconds / cost.predict(step)) for step, seconds in samples),
        settings=head.settings,
    )
    return profile, _quality(cost, samples)


def _samples(log: StepLog) -> list[tuple[StepFeatures, float]]:
    warm = log.steps[LEAST_STEPS // 5 :]
    return [(step.record.features, step.record.measured_s) for step in warm if not step.record.has_failed]


def _quality(cost: StepCost, samples: Sequence[tuple[StepFeatures, float]]) -> FitQuality:
    distances = sorted(abs(seconds / cost.predict(step) - 1) for step, seconds in samples)
    total = sum(cost.predict(step) for step, _ in samples) / sum(seconds for _, seconds in samples)
    return FitQuality(total, distances[len(distances) // 2], distances[int(0.99 * (len(distances) - 1))])
