"""Describe a deployment, a model on accelerators in pools of workers, and turn it into a cluster to simulate."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import cast

from tandem.admission.tenant import Tenant
from tandem.core.config import Config, Pool
from tandem.core.errors import ErrorKind, TandemError
from tandem.core.ids import TenantId
from tandem.core.lane import lane_labels, lanes_of
from tandem.routing.worker_view import POOLS
from tandem.sched.state.slo_targets import LatencyTargets
from tandem.sim.cluster.cluster_spec import ClusterSpec
from tandem.sim.cluster.worker import WorkerSpec
from tandem.sim.machines.machine import Machine


@dataclass(frozen=True, slots=True)
class PoolSize:
    """Size of one pool: `number` workers of `degree` accelerators each. `lanes`: labels of the lanes that they serve,
    empty for all."""

    pool: Pool
    number: int
    degree: int = 1
    lanes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Deployment:
    """Pools of workers on one kind of machine, with their configuration.

    `link_bandwidth`: bytes per second between workers for each of a worker's accelerators; None: the machine's.
    `kv_bytes`: KV memory per worker; None: as much as fits beside the weights. `tenants`: the known tenants; None:
    requests need no key.
    """

    machine: Machine
    pools: tuple[PoolSize, ...]
    config: Config
    link_bandwidth: float | None = None
    kv_bytes: int | None = None
    tenants: Mapping[TenantId, Tenant] | None = None

    @property
    def num_gpus(self) -> int:
        return sum(pool.number * pool.degree for pool in self.pools)

    @property
    def price_per_hour(self) -> float:
        return self.num_gpus * self.machine.price_per_hour

    def __str__(self) -> str:
        pool_texts = " + ".join(_describe_pool(pool) for pool in self.pools)
        return f"{pool_texts} on {self.num_gpus} x {self.machine.name}"

    def cluster(self, seed: int) -> ClusterSpec:
        """Return the cluster to simulate. Raises TandemError(INVALID_REQUEST) for workers that cannot be built and for
        pools that could not serve a request."""
        return ClusterSpec(
            workers=tuple((self._worker(pool), pool.number) for pool in self._serving()),
            gateway=self.config.gateway,
            latency_s=self.machine.latency_s,
            delivery_s=self.machine.delivery_s,
            seed=seed,
            tenants=self.tenants,
            targets=LatencyTargets.of(self.config.slo),
        )

    def _serving(self) -> tuple[PoolSize, ...]:
        present = {pool.pool for pool in self.pools if pool.number > 0}
        if not present:
            raise _refuse("--pools has no worker: name at least one, as in mixed=1")
        if present in ({"prefill"}, {"decode"}):
            (only,) = present
            other = "decode" if only == "prefill" else "prefill"
            raise _refuse(f"--pools has {only} workers alone: add {other} or mixed ones")
        if self.config.gateway.disaggregation == "strict" and sum(pool.number for pool in self.pools) < 2:
            raise _refuse("gateway.disaggregation=strict needs two workers or more: raise the numbers of --pools")
        return self.pools

    def _worker(self, pool: PoolSize) -> WorkerSpec:
        try:
            spec = replace(self.machine.worker(pool.pool, pool.degree, self.config), lanes=lanes_of(pool.lanes))
        except ValueError as error:
            raise _refuse(f"{pool.pool} workers: {error}") from error
        if self.link_bandwidth is not None:
            spec = replace(spec, bandwidth=pool.degree * self.link_bandwidth)
        if self.kv_bytes is not None:
            spec = replace(spec, num_blocks=self._num_blocks(spec, pool, self.kv_bytes))
        return spec

    def _num_blocks(self, spec: WorkerSpec, pool: PoolSize, kv_bytes: int) -> int:
        number = kv_bytes // spec.layout.block_bytes
        if not 1 <= number <= spec.num_blocks:
            most = spec.num_blocks * spec.layout.block_bytes / 2**30
            raise _refuse(
                f"engine.kv_cache_memory of {pool.pool} workers must hold one block and be at most {most:.1f} GiB"
            )
        return number


def parse_pools(sizes: str, degrees: str = "") -> tuple[PoolSize, ...]:
    """Parse the flags `--pools` and `--tp` into pool sizes.

    `sizes`: the value of `--pools`, such as `prefill=4,decode=8`, or `decode=6,decode=2:batch`, where the lanes of a
    pool's workers follow their number. `degrees`: the value of `--tp`, such as `decode=2`, or `2` for all pools. Raises
    TandemError(INVALID_REQUEST) for text of another form."""
    numbers = _numbers("--pools", sizes)
    named = {pool for pool, _ in numbers}
    one = degrees.strip()
    degree_by_pool = (
        dict.fromkeys(named, int(one))
        if one.isascii() and one.isdecimal()
        else {pool: degree for (pool, _), degree in _numbers("--tp", degrees, may_have_lanes=False).items()}
    )
    for pool in degree_by_pool:
        if pool not in named:
            raise _refuse(f"--tp names {pool}, but --pools has no such workers")
    if 0 in degree_by_pool.values():
        raise _refuse("--tp must be at least 1")
    return tuple(
        PoolSize(pool, number, degree_by_pool.get(pool, 1), lanes) for (pool, lanes), number in numbers.items()
    )


def _numbers(flag: str, text: str, *, may_have_lanes: bool = True) -> dict[tuple[Pool, tuple[str, ...]], int]:
    found: dict[tuple[Pool, tuple[str, ...]], int] = {}
    for part in filter(None, text.split(",")):
        name, _, rest = part.strip().partition("=")
        value, colon, labels = rest.partition(":")
        pool = cast(Pool, name)
        lanes = _lanes(flag, part, labels) if colon and may_have_lanes else ()
        is_number = value.isascii() and value.isdecimal() and (may_have_lanes or not colon)
        if pool not in POOLS or (pool, lanes) in found or not is_number:
            once = "once for the same lanes" if may_have_lanes else "once"
            raise _refuse(f"{flag} {text}: {part!r} is not POOL=NUMBER, each of {', '.join(POOLS)} {once}")
        found[pool, lanes] = int(value)
    return found


def _lanes(flag: str, part: str, labels: str) -> tuple[str, ...]:
    try:
        return lane_labels(lanes_of(labels.split("+")))
    except ValueError as error:
        raise _refuse(f"{flag} {part}: {error}") from error


def _describe_pool(pool: PoolSize) -> str:
    degree = f" of {pool.degree}" if pool.degree > 1 else ""
    lanes = f" for {'+'.join(pool.lanes)}" if pool.lanes else ""
    return f"{pool.number} {pool.pool}{degree}{lanes}"


def _refuse(message: str) -> TandemError:
    return TandemError(ErrorKind.INVALID_REQUEST, message)
