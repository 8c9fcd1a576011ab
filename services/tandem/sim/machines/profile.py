"""Fit the measured sizes and step times of a deployment's workers as a profile, store it, and build simulated workers
from it.

Sizes and step times that were not measured are not estimated: a pool without measurements uses those of the mixed pool.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, cast

from tandem.core.config import Config, Pool
from tandem.core.errors import ErrorKind, TandemError
from tandem.core.settings import build
from tandem.core.step_cost import StepCost, StepFeatures
from tandem.engine.step_log import StepLog
from tandem.kv.layout import KVLayout
from tandem.sched.budget.step_time_model import GENERIC, fit
from tandem.sim.cluster.worker import WorkerSpec
from tandem.sim.cost.residuals import Kind, Residuals, residuals_of

FORMAT = "tandem-profile-1"
UNKNOWN = "unknown: no other run was predicted with it yet"
RIDGE = 1e-3
"""Weight of the generic step cost that fills in where the steps do not determine a coefficient: a thousandth of one
step. A log has thousands of steps, of which few may have prompt tokens."""
LEAST_STEPS = 100
"""Steps below which a worker's step times cannot be fitted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerProfile:
    """Measured profile of one kind of worker.

    `layout`, `num_blocks`: layout and number of its KV blocks. `cost`, `residuals`: its step times, fitted to
    `num_steps` measured steps. `settings`: the sections of `Config` with which it ran."""

    layout: KVLayout
    num_blocks: int
    num_steps: int
    cost: StepCost
    residuals: Residuals
    settings: Mapping[str, Mapping[str, Any]]

    def config(self) -> Config:
        return build([("the profile", self.settings)])


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """Measured profile of one model's workers, by pool.

    - `latency_s`: seconds of a message between two processes, in one direction.
    - `delivery_s`: equally likely seconds that a token takes beyond `latency_s` to its client.
    - `bandwidth`: of a worker's link, in bytes per second.
    - `provenance`: what was measured and on which machine. `fidelity`: how far predictions were off.
    """

    model: str
    workers: Mapping[Pool, WorkerProfile]
    latency_s: float
    delivery_s: tuple[float, ...] = (0.0,)
    bandwidth: float
    provenance: str
    fidelity: str = UNKNOWN

    def worker(self, pool: Pool, config: Config | None = None) -> WorkerSpec:
        """Return the spec of a worker of a pool, with `config` or else the settings that it was measured with.

        A pool that was not measured uses the profile of the mixed pool. Raises TandemError when neither was
        measured."""
        found = self.workers.get(pool) or self.workers.get("mixed")
        if found is None:
            known = ", ".join(sorted(self.workers))
            raise TandemError(ErrorKind.INVALID_REQUEST, f"the profile has no {pool} worker, but {known}")
        return WorkerSpec(
            pool=pool,
            layout=found.layout,
            num_blocks=found.num_blocks,
            step_time=found.cost.predict,
            bandwidth=self.bandwidth,
            config=config or found.config(),
            calibration=found.cost,
            residuals=found.residuals,
        )


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


def encode_profile(profile: Profile) -> str:
    """Return the profile as indented JSON."""
    document = {
        "format": FORMAT,
        "model": profile.model,
        "provenance": profile.provenance,
        "fidelity": profile.fidelity,
        "latency_s": profile.latency_s,
        "delivery_s": [round(seconds, 6) for seconds in profile.delivery_s],
        "bandwidth": profile.bandwidth,
        "workers": {pool: _encode_worker(worker) for pool, worker in sorted(profile.workers.items())},
    }
    return json.dumps(document, indent=1) + "\n"


def decode_profile(text: str, name: str) -> Profile:
    """Parse a profile from JSON. Raises TandemError when the text is not a profile; `name` is how its message calls the
    text, such as a file name."""
    try:
        document = json.loads(text)
        if document.get("format") != FORMAT:
            raise ValueError(f"format {document.get('format')!r}, expected {FORMAT!r}")
        return Profile(
            model=str(document["model"]),
            workers={pool_named(pool): _decode_worker(worker) for pool, worker in document["workers"].items()},
            latency_s=float(document["latency_s"]),
            delivery_s=tuple(map(float, document["delivery_s"])),
            bandwidth=float(document["bandwidth"]),
            provenance=str(document["provenance"]),
            fidelity=str(document["fidelity"]),
        )
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError, TandemError) as error:
        message = f"{name} is no profile: {type(error).__name__} {error}"
        raise TandemError(ErrorKind.INVALID_REQUEST, message) from error


def _encode_worker(worker: WorkerProfile) -> dict[str, Any]:
    kinds = [
        {"kind": list(kind), "factors": [round(factor, 4) for factor in factors]}
        for kind, factors in sorted(worker.residuals.by_kind.items())
    ]
    return {
        "num_blocks": worker.num_blocks,
        "num_steps": worker.num_steps,
        "layout": worker.layout.to_dict(),
        "cost": asdict(worker.cost),
        "residuals": kinds,
        "settings": worker.settings,
    }


def _decode_worker(document: Mapping[str, Any]) -> WorkerProfile:
    factors = {_kind(row["kind"]): tuple(map(float, row["factors"])) for row in document["residuals"]}
    worker = WorkerProfile(
        layout=KVLayout.from_dict(document["layout"]),
        num_blocks=int(document["num_blocks"]),
        num_steps=int(document["num_steps"]),
        cost=StepCost(**document["cost"]),
        residuals=Residuals(factors),
        settings=document["settings"],
    )
    if worker.num_blocks < 1:
        raise ValueError(f"a pool of {worker.num_blocks} blocks")
    worker.config()
    return worker


def _kind(document: Sequence[int]) -> Kind:
    prefill, decode = document
    return int(prefill), int(decode)


def pool_named(name: str) -> Pool:
    """Return the pool with this name. Raises ValueError for an unknown name."""
    if name not in ("prefill", "decode", "mixed"):
        raise ValueError(f"{name!r} is no pool")
    return cast(Pool, name)
