"""Which checks there are, and what of the settings each is given; never judges anything itself."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Generic, Literal, TypeVar

from tandem.core.by_device import by_device
from tandem.core.clock import Clock, wall_ns
from tandem.core.config import Config
from tandem.core.errors import TandemError
from tandem.core.settings import Resolved
from tandem.doctor import (
    announced,
    cpu,
    doors,
    fleet,
    front,
    gpu,
    limits,
    model,
    pairs,
    pod,
    ports,
    rbac,
    rdma,
    redis_server,
    secret,
    sense,
    shared_memory,
    skew,
    tls,
    ucx,
    versions,
)
from tandem.doctor.check import Check, on_thread
from tandem.doctor.finding import Finding
from tandem.doctor.system import System
from tandem.stores.embedded import EmbeddedServerError, find_program

PAIRS_S = 3600.0
"""All pairs one after the other; each has its own time."""
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Asked:
    """`url` of a gateway, empty where none is to be asked."""

    url: str = ""
    pairs: Literal["none", "few", "all"] = "none"


@dataclass(frozen=True, slots=True)
class Outside:
    """What programs of other rooms know: how to reach a cluster's members, and what a gateway and a worker ask for
    before they start."""

    members_of: Callable[[Config], AbstractAsyncContextManager[fleet.Members]]
    gateway_door: doors.Door
    worker_door: doors.Door


class _Once(Generic[_T]):
    """What several checks ask for is read once."""

    def __init__(self, read: Callable[[], Awaitable[_T]]) -> None:
        self._read = read
        self._task: asyncio.Task[_T] | None = None

    async def __call__(self) -> _T:
        if self._task is None:
            self._task = asyncio.ensure_future(self._read())
        return await asyncio.shield(self._task)


class Checkup:
    """All checks for one set of settings. `checks` are run side by side, then `pairs`, which must have the links for
    themselves."""

    def __init__(self, resolved: Resolved, system: System, outside: Outside, asked: Asked, clock: Clock) -> None:
        self._resolved = resolved
        self._config = by_device(resolved.config)
        self._system = system
        self._outside = outside
        self._asked = asked
        self._clock = clock
        self._redis = _Once(self._read_redis)
        self._front = _Once(self._read_front)
        self._fleet = _Once(self._read_fleet)
        self._rdma = _Once(lambda: on_thread(lambda: rdma.read_rdma(system)))

    def checks(self) -> tuple[Check, ...]:
        return (
            Check("versions", self._examine(lambda: versions.judge_versions(versions.read_versions()))),
            Check("settings", self._examine(lambda: sense.judge_settings(self._resolved))),
            Check("cpu", self._examine(self._cpu)),
            Check("gpu", self._examine(self._gpu), gpu.QUERY_S * 2 + gpu.TORCH_S + 5),
            Check("rdma", self._examine_rdma),
            Check("limits", self._examine_limits),
            Check("shared-memory", self._examine(lambda: [_shared_memory(self._system)])),
            Check("ucx", self._examine(self._ucx), ucx.LIMIT_S),
            Check("model", self._examine(lambda: model.judge_model(model.read_model(self._config.model))), 30.0),
            Check("ports", self._examine(self._ports), 20.0),
            Check("secret", self._examine(self._secret)),
            Check("doors", self._examine(self._doors)),
            Check("redis", self._examine_redis),
            Check("workers", self._examine_fleet, 30.0),
            Check("gateway", self._examine_front, 15.0),
            Check("clock", self._examine_clock, 30.0),
            Check("kubernetes", self._examine(self._kubernetes), 60.0),
        )

    def pairs(self) -> tuple[Check, ...]:
        return () if self._asked.pairs == "none" else (Check("pairs", self._examine_pairs, PAIRS_S),)

    def _examine(self, look: Callable[[], Sequence[Finding]]) -> Callable[[], Awaitable[Sequence[Finding]]]:
        """What may wait for the kernel, on a thread of its own."""
        return lambda: on_thread(look)

    # ---- this machine

    def _cpu(self) -> Sequence[Finding]:
        return cpu.judge_cpu(cpu.read_cpu(self._system), self._config.model.device, self._config.engine.kernels)

    def _gpu(self) -> Sequence[Finding]:
        device = self._config.model.device
        driver = gpu.read_driver(self._system) if device == "cuda" else gpu.Driver()
        torch = gpu.read_torch(self._system) if device == "cuda" else gpu.Torch()
        return (*gpu.judge_gpus(driver, self._config), *gpu.judge_cuda(torch, driver, device))

    async def _examine_rdma(self) -> Sequence[Finding]:
        found, is_required = await self._rdma(), self._config.transfer.require == "rdma"
        gid_index = self._system.environ.get("UCX_IB_GID_INDEX", "")
        is_cuda = self._config.model.device == "cuda"
        return (
            *rdma.judge_devices(found, is_required=is_required),
            *rdma.judge_gids(found, gid_index, is_required=is_required),
            rdma.judge_gpu_direct(found, is_cuda=is_cuda, is_required=is_required),
        )

    async def _examine_limits(self) -> Sequence[Finding]:
        found, uses_rdma = limits.read_limits(self._system), (await self._rdma()).is_usable
        pool_bytes = self._config.engine.kv_cache_memory + self._config.engine.host_cache_memory
        return (
            limits.judge_memlock(found, pool_bytes, uses_rdma),
            limits.judge_open_files(found, self._config.gateway.max_connections),
        )

    def _ucx(self) -> Sequence[Finding]:
        handoff, told = self._config.handoff, self._system.environ.get("UCX_TLS", "")
        trial = ucx.Trial() if handoff.transport == "local" else ucx.read_trial(self._system)
        return ucx.judge_trial(trial, handoff, self._config.transfer, told)

    def _ports(self) -> Sequence[Finding]:
        worker = self._config.worker
        return (
            *ports.examine_places(self._config),
            announced.judge_announced(announced.read_announced(worker, self._system), worker.host),
        )

    def _secret(self) -> Sequence[Finding]:
        cluster = self._config.cluster
        return (
            secret.judge_secret(secret.read_secret(cluster.secret_file), self._config),
            tls.judge_tls(tls.read_tls(cluster), wall_ns() / 1e9),
        )

    def _doors(self) -> Sequence[Finding]:
        tenants = doors.read_door(self._outside.gateway_door, self._resolved)
        guard = doors.read_door(self._outside.worker_door, self._resolved)
        return (doors.judge_tenants(tenants, self._resolved), doors.judge_guard(guard))

    def _kubernetes(self) -> Sequence[Finding]:
        asks = bool(rbac.wanted_permissions(self._config))
        return (
            *pod.judge_pod(pod.read_pod(self._system), asks_server=asks),
            rbac.examine_permissions(self._system, self._config),
        )

    # ---- others

    async def _read_redis(self) -> redis_server.RedisFacts:
        return await redis_server.read_redis(self._config.redis.url, self._clock)

    async def _read_front(self) -> front.Front:
        return await on_thread(lambda: front.read_front(self._asked.url, self._clock))

    async def _read_fleet(self) -> fleet.Fleet:
        if not self._config.redis.url:
            return fleet.Fleet(reason="no Redis is named that lists workers (--redis-url)")
        try:
            async with self._outside.members_of(self._config) as members:
                return await fleet.read_fleet(members, self._clock)
        except TandemError as error:
            return fleet.Fleet(reason=error.message)

    async def _examine_redis(self) -> Sequence[Finding]:
        if self._config.redis.url:
            return redis_server.judge_redis(await self._redis(), self._config.redis.url)
        return redis_server.judge_own_server(await on_thread(_no_server))

    async def _examine_fleet(self) -> Sequence[Finding]:
        found = await self._fleet()
        roles = fleet.judge_roles(found, self._config.gateway.disaggregation)
        return (*fleet.judge_workers(found), *fleet.judge_fingerprints(found), *roles)

    async def _examine_front(self) -> Sequence[Finding]:
        return (front.judge_front(await self._front() if self._asked.url else None),)

    async def _examine_clock(self) -> Sequence[Finding]:
        skews: list[skew.Skew] = []
        if self._config.redis.url and not (told := await self._redis()).problem:
            skews.append(skew.Skew("Redis", told.ahead_s, told.within_s))
        if self._asked.url and (own := (await self._front()).skew) is not None:
            skews.append(own)
        return skew.judge_skews([*skews, *fleet.skews_of(await self._fleet())])

    async def _examine_pairs(self) -> Sequence[Finding]:
        """One after the other: two at once would share a link and each look slow."""
        found = await self._fleet()
        chosen = pairs.choose_pairs(found, is_all=self._asked.pairs == "all")
        if not chosen:
            return pairs.judge_choice(found, chosen)
        async with self._outside.members_of(self._config) as members:
            measured = [await pairs.measure(members, pair) for pair in chosen]
        return tuple(pairs.judge_pair(one, self._config.transfer) for one in measured)


def _shared_memory(system: System) -> Finding:
    return shared_memory.judge_shared_memory(shared_memory.read_shared_memory(system))


def _no_server() -> str:
    """Why `serve` finds no server to start; empty where it does."""
    try:
        program = find_program()
    except EmbeddedServerError as error:
        return str(error)
    return "" if os.access(program, os.X_OK) else f"{program} cannot be executed"
