"""What was measured of one way to run a model, so that it can be simulated: sizes and step times of its workers; never
measures, and never guesses what was not measured."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, cast

from tandem.core.config import Config
from tandem.core.errors import ErrorKind, TandemError
from tandem.core.settings import build
from tandem.core.step_cost import StepCost
from tandem.kv.layout import KVLayout
from tandem.routing.worker_view import Pool
from tandem.sim.cluster.worker import WorkerSpec
from tandem.sim.cost.residuals import Kind, Residuals

FORMAT = "tandem-profile-1"
UNKNOWN = "unknown: no other run was predicted with it yet"


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerProfile:
    """One kind of worker. `settings` are the sections of `Config` that it ran with, `num_steps` how many steps its
    times were fitted on."""

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
    """`workers` by pool. `latency_s`: one way between two processes. `delivery_s`: times that a token takes beyond
    that to its client, each as likely as any other. `bandwidth` of a worker's link in bytes per second. `provenance`
    says what was measured where, `fidelity` how far predictions were off."""

    model: str
    workers: Mapping[Pool, WorkerProfile]
    latency_s: float
    delivery_s: tuple[float, ...] = (0.0,)
    bandwidth: float
    provenance: str
    fidelity: str = UNKNOWN

    def worker(self, pool: Pool, config: Config | None = None) -> WorkerSpec:
        """A worker of a pool, with the settings that it ran with or others. A pool that was not measured is taken for
        a mixed one where that was. Raises TandemError when neither was."""
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


def encode_profile(profile: Profile) -> str:
    """As JSON, indented."""
    told = {
        "format": FORMAT,
        "model": profile.model,
        "provenance": profile.provenance,
        "fidelity": profile.fidelity,
        "latency_s": profile.latency_s,
        "delivery_s": [round(seconds, 6) for seconds in profile.delivery_s],
        "bandwidth": profile.bandwidth,
        "workers": {pool: _encode_worker(worker) for pool, worker in sorted(profile.workers.items())},
    }
    return json.dumps(told, indent=1) + "\n"


def decode_profile(text: str, name: str) -> Profile:
    """Raises TandemError that says `name` when the text is no profile."""
    try:
        told = json.loads(text)
        if told.get("format") != FORMAT:
            raise ValueError(f"format {told.get('format')!r}, expected {FORMAT!r}")
        return Profile(
            model=str(told["model"]),
            workers={pool_named(pool): _decode_worker(worker) for pool, worker in told["workers"].items()},
            latency_s=float(told["latency_s"]),
            delivery_s=tuple(map(float, told["delivery_s"])),
            bandwidth=float(told["bandwidth"]),
            provenance=str(told["provenance"]),
            fidelity=str(told["fidelity"]),
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


def _decode_worker(told: Mapping[str, Any]) -> WorkerProfile:
    factors = {_kind(row["kind"]): tuple(map(float, row["factors"])) for row in told["residuals"]}
    worker = WorkerProfile(
        layout=KVLayout.from_dict(told["layout"]),
        num_blocks=int(told["num_blocks"]),
        num_steps=int(told["num_steps"]),
        cost=StepCost(**told["cost"]),
        residuals=Residuals(factors),
        settings=told["settings"],
    )
    if worker.num_blocks < 1:
        raise ValueError(f"a pool of {worker.num_blocks} blocks")
    worker.config()
    return worker


def _kind(told: Sequence[int]) -> Kind:
    prefill, decode = told
    return int(prefill), int(decode)


def pool_named(name: str) -> Pool:
    """Raises ValueError."""
    if name not in ("prefill", "decode", "mixed"):
        raise ValueError(f"{name!r} is no pool")
    return cast(Pool, name)
