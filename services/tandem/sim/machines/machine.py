"""Describe the machine of a simulated worker: its speed, size and price, and how accurate its predictions were."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol

from tandem.core.config import Config
from tandem.routing.worker_view import Pool
from tandem.sim.cluster.worker import WorkerSpec
from tandem.sim.cost.roofline import Roofline
from tandem.sim.machines.profile import Profile
from tandem.sim.report.fidelity import fidelity


class Machine(Protocol):
    """Machine that builds simulated workers.

    `price_per_hour`: of one accelerator; 0 when it is not set.
    `about`: (heading, text) pairs for reports: the profile, the sources of its figures, and its prediction errors.
    `latency_s`, `delivery_s`: as in `ClusterSpec`.
    """

    @property
    def name(self) -> str: ...
    @property
    def price_per_hour(self) -> float: ...
    @property
    def about(self) -> tuple[tuple[str, str], ...]: ...
    @property
    def latency_s(self) -> float: ...
    @property
    def delivery_s(self) -> tuple[float, ...]: ...
    def worker(self, pool: Pool, degree: int, config: Config) -> WorkerSpec:
        """Return the spec of one worker of `degree` accelerators. Raises ValueError when it cannot be built."""
        ...


@dataclass(frozen=True, slots=True)
class RooflineMachine:
    """A model on an accelerator of which only the data sheets are known. Each worker replaces `roofline.degree` by its
    own degree."""

    roofline: Roofline
    latency_s: float = 2e-4
    delivery_s: tuple[float, ...] = (0.0,)

    @property
    def name(self) -> str:
        return self.roofline.hardware.name

    @property
    def price_per_hour(self) -> float:
        return self.roofline.hardware.price_per_hour

    @property
    def about(self) -> tuple[tuple[str, str], ...]:
        roofline, reached = self.roofline, self.roofline.efficiency
        hardware, shape = roofline.hardware, roofline.shape
        share = f"{reached.memory:.0%} of memory, {reached.compute:.0%} of compute, {reached.link:.0%} of links"
        price = f"{hardware.price_per_hour:.2f} per GPU and hour, {hardware.price_provenance}"
        return (
            ("profile", f"roofline of {shape.name} ({roofline.weights}, KV {roofline.kv}) on {hardware.name}: reaches "
                        f"{share}, and {1e3 * reached.overhead_s:.2f} ms on top of each step"),
            ("figures", f"{hardware.provenance}; {shape.provenance}"),
            ("fidelity", fidelity(roofline)),
            ("price", price if hardware.price_per_hour else "not set"),
        )  # fmt: skip

    def worker(self, pool: Pool, degree: int, config: Config) -> WorkerSpec:
        return WorkerSpec.of(pool, replace(self.roofline, degree=degree), config)


@dataclass(frozen=True, eq=False)
class ProfileMachine:
    """A machine with a profile, fitted to measured steps of real workers.

    `price_per_hour` is of one worker, because the profile cannot be split by accelerator."""

    profile: Profile
    price_per_hour: float = 0.0

    @property
    def name(self) -> str:
        return "what was measured"

    @property
    def about(self) -> tuple[tuple[str, str], ...]:
        price = f"{self.price_per_hour:.2f} per worker and hour, as given" if self.price_per_hour else "not set"
        return (
            ("profile", f"fitted on steps of {self.profile.model}: {self.profile.provenance}"),
            ("fidelity", self.profile.fidelity),
            ("price", price),
        )

    @property
    def latency_s(self) -> float:
        return self.profile.latency_s

    @property
    def delivery_s(self) -> tuple[float, ...]:
        return self.profile.delivery_s

    def worker(self, pool: Pool, degree: int, config: Config) -> WorkerSpec:
        if degree != 1:
            raise ValueError(f"a profile is of whole workers and cannot be cut into {degree}")
        return replace(self.profile.worker(pool, config), price_per_hour=self.price_per_hour)
