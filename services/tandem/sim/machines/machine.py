"""Describe the machine of a simulated worker: its speed, size and price, and how accurate its predictions were."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from tandem.core.config import Config, Pool
from tandem.sim.cluster.worker import WorkerSpec
from tandem.sim.cost.roofline import Roofline, fidelity
from tandem.sim.machines.profile import Profile


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class Machine:
    """A machine model that builds simulated workers, with its price and the sources of its figures.

    - `price_per_hour`: of one accelerator; 0 when it is not set.
    - `about`: (heading, text) pairs for reports: the profile, the sources of its figures, and its prediction errors.
    - `worker`: function that returns the spec of one worker, from the pool, the number of its accelerators and the
      settings; raises ValueError when the worker cannot be built.
    - `latency_s`, `delivery_s`: as in `ClusterSpec`.
    """

    name: str
    price_per_hour: float
    about: tuple[tuple[str, str], ...]
    worker: Callable[[Pool, int, Config], WorkerSpec]
    latency_s: float = 2e-4
    delivery_s: tuple[float, ...] = (0.0,)


def roofline_machine(roofline: Roofline) -> Machine:
    """Return the machine of a model on an accelerator of which only the data sheet is known.

    Each worker has a tensor-parallel degree of its own, which replaces `roofline.degree`.
    """
    hardware, shape, reached = roofline.hardware, roofline.shape, roofline.efficiency
    share = f"{reached.memory:.0%} of memory, {reached.compute:.0%} of compute, {reached.link:.0%} of links"
    price = f"{hardware.price_per_hour:.2f} per GPU and hour, {hardware.price_provenance}"

    def worker(pool: Pool, degree: int, config: Config) -> WorkerSpec:
        return WorkerSpec.of(pool, replace(roofline, degree=degree), config)

    return Machine(
        name=hardware.name,
        price_per_hour=hardware.price_per_hour,
        about=(
            ("profile", f"roofline of {shape.name} ({roofline.weights}, KV {roofline.kv}) on {hardware.name}: reaches "
                        f"{share}, and {1e3 * reached.overhead_s:.2f} ms on top of each step"),
            ("figures", f"{hardware.provenance}; {shape.provenance}"),
            ("fidelity", fidelity(roofline)),
            ("price", price if hardware.price_per_hour else "not set"),
        ),
        worker=worker,
    )  # fmt: skip


def profile_machine(profile: Profile, price_per_hour: float = 0.0) -> Machine:
    """Return the machine of a measured profile, which was fitted to the steps of real workers.

    `price_per_hour` is of one worker, because the profile cannot be split by accelerator.
    """
    price = f"{price_per_hour:.2f} per worker and hour, as given" if price_per_hour else "not set"

    def worker(pool: Pool, degree: int, config: Config) -> WorkerSpec:
        if degree != 1:
            raise ValueError(f"a profile is of whole workers and cannot be cut into {degree}")
        return replace(profile.worker(pool, config), price_per_hour=price_per_hour)

    return Machine(
        name="what was measured",
        price_per_hour=price_per_hour,
        about=(
            ("profile", f"fitted on steps of {profile.model}: {profile.provenance}"),
            ("fidelity", profile.fidelity),
            ("price", price),
        ),
        worker=worker,
        latency_s=profile.latency_s,
        delivery_s=profile.delivery_s,
    )
