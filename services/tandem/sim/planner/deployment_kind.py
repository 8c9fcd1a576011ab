"""Describe a deployment except for its numbers of workers: machine, mixed or split, tensor-parallel degrees, token
budget."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from tandem.core.config import Config, Pool
from tandem.core.slo import Slo
from tandem.sim.machines.deployment import Deployment, PoolSize
from tandem.sim.machines.machine import Machine
from tandem.sim.planner.workload_demand import WorkloadDemand, least_workers, why_never

Kind = Literal["mixed", "split"]


@dataclass(frozen=True, slots=True)
class DeploymentKind:
    """Describe a deployment except for its numbers of workers: a recipe.

    `degrees`: the tensor-parallel degree of a mixed worker, or the degrees of a prefill and of a decode worker.
    `budget`: the most tokens of a step. `itl_ms`: the inter-token latency by which schedulers limit their steps; 0 for
    no limit. `link_bandwidth`: as in `Deployment`."""

    machine: Machine
    degrees: tuple[int, ...]
    budget: int
    itl_ms: float
    config: Config
    link_bandwidth: float | None = None

    @property
    def kind(self) -> Kind:
        return "mixed" if len(self.degrees) == 1 else "split"

    @property
    def prices(self) -> tuple[float, ...]:
        """Return the price per hour of one worker of each pool; its number of accelerators where no price is set."""
        return tuple(degree * (self.machine.price_per_hour or 1.0) for degree in self.degrees)

    def cost(self, numbers: Sequence[int]) -> float:
        return sum(number * price for number, price in zip(numbers, self.prices, strict=True))

    def num_gpus(self, numbers: Sequence[int]) -> int:
        return sum(number * degree for number, degree in zip(numbers, self.degrees, strict=True))

    def deployment(self, numbers: Sequence[int]) -> Deployment:
        pools: tuple[Pool, ...] = ("mixed",) if self.kind == "mixed" else ("prefill", "decode")
        sizes = tuple(PoolSize(*size) for size in zip(pools, numbers, self.degrees, strict=True))
        return Deployment(machine=self.machine, pools=sizes, config=self._config(), link_bandwidth=self.link_bandwidth)

    def least(self, found: WorkloadDemand, slo: Slo, percentile: float) -> tuple[int, ...] | str:
        """Return a lower bound of each pool's number of workers, or a text that says why no numbers meet the targets.

        `found`: the demand of the workload. `slo`: the targets, which `percentile` percent of each class must meet.
        """
        try:
            specs = [self.machine.worker("mixed", degree, self._config()) for degree in self.degrees]
        except ValueError as error:
            return str(error)
        if (reason := why_never(specs[0], specs[-1], found, slo, percentile)) is not None:
            return reason
        if self.kind == "mixed":
            return (least_workers(specs[0], specs[0], found, slo, percentile),)
        return (
            least_workers(specs[0], None, found, slo, percentile),
            least_workers(None, specs[1], found, slo, percentile),
        )

    def __str__(self) -> str:
        degrees = "+".join(map(str, self.degrees))
        paced = f", paced to {self.itl_ms:g} ms" if self.itl_ms else ""
        return f"{self.kind}, tp {degrees}, {self.machine.name}, budget {self.budget}{paced}"

    def _config(self) -> Config:
        engine = replace(
            self.config.engine,
            max_num_batched_tokens=self.budget,
            max_num_seqs=min(self.config.engine.max_num_seqs, self.budget),
        )
        return replace(self.config, engine=engine, slo=replace(self.config.slo, itl_ms=self.itl_ms))


def recipes(
    machine: Machine,
    degrees: Sequence[int],
    budgets: Sequence[int],
    config: Config,
    slo: Slo,
    link_bandwidth: float | None = None,
) -> Iterator[DeploymentKind]:
    """Yield all recipes (`DeploymentKind`) for one kind of machine that are worth a search: mixed ones, whose workers
    prefill and decode, and split ones, with prefill workers and decode workers.

    - `degrees`: tensor-parallel degrees of a worker to try. `budgets`: token budgets of a step to try.
    - `config`: all other settings of the recipes. `link_bandwidth`: as in `Deployment`.

    For each degree there is a mixed recipe with every budget. If `slo` has an ITL target, there is one more with the
    largest budget, whose schedulers limit the duration of their steps by that target. For each degree of the prefill
    workers and each degree of the decode workers there is a split recipe with every budget but the smallest, unless it
    is the only one: it would slow prompts down without protecting any decode.
    """
    paced = 1e3 * slo.itl_s if slo.itl_s is not None else 0.0
    ordered = sorted(budgets)
    for degree in sorted(degrees):
        for budget in ordered:
            yield DeploymentKind(machine, (degree,), budget, 0.0, config, link_bandwidth)
        if paced:
            yield DeploymentKind(machine, (degree,), ordered[-1], paced, config, link_bandwidth)
        for other in sorted(degrees):
            for budget in ordered[1:] or ordered:
                yield DeploymentKind(machine, (degree, other), budget, 0.0, config, link_bandwidth)
