"""Store the measured sizes and step times of a deployment's workers as a profile, and build simulated workers from it.

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
from tandem.core.step_cost import StepCost
from tandem.kv.layout import KVLayout
from tandem.sim.cluster.worker import WorkerSpec
from tandem.sim.cost.residuals import Kind, Residuals

FORMAT = "tandem-profile-1"
UNKNOWN = "unknown: no other run was predicted with it yet"


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
