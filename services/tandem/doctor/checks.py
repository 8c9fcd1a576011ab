"""Which checks there are, and what of the settings each is given; never judges anything itself."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Sequence, Set
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Generic, Literal, TypeVar

from tandem.core.clock import Clock, wall_ns
from tandem.core.config import Config
from tandem.core.device_defaults import with_device_defaults
from tandem.core.errors import TandemError
from tandem.core.settings import Resolved
from tandem.doctor import (
    advertised_address,
    auth,
    clock_skew,
    cpu,
    gateway,
    gpu,
    listen_ports,
    model,
    pairs,
    pod,
    rbac,
    rdma,
    redis_server,
    secret,
    settings_lint,
    shared_memory,
    tls,
    ucx,
    ulimits,
    versions,
    workers,
)
from tandem.doctor.finding import Finding, skip
from tandem.doctor.runner import Check, on_thread
from tandem.doctor.system import System
from tandem.stores.embedded_redis import EmbeddedServerError, find_program

PAIRS_S = 3600.0
"""All pairs one after the other; each has its own time."""
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Options:
    """`url` of a gateway, empty where none is to be asked."""

    url: str = ""
    pairs: Literal["none", "few", "all"] = "none"


@dataclass(frozen=True, slots=True)
class Dependencies:
    """What programs of other rooms know: how to reach a cluster's members, what a gateway and a worker ask for before
    they start, and where a worker says that it is."""

    members_of: Callable[[Config], AbstractAsyncContextManager[workers.MemberList]]
    gateway_door: auth.Door
    worker_door: auth.Door
    worker_address: advertised_address.Told


class _Once(Generic[_T]):
    """What several checks ask for is read once."""

    def __init__(self, read: Callable[[], Awaitable[_T]]) -> None:
        self._read = read
        self._task: asyncio.Task[_T] | None = None

    async def __call__(self) -> _T:
        if self._task is None:
            self._task = asyncio.ensure_future(self._read())
        return await asyncio.shield(self._task)


class CheckSuite:
    """All checks for one set of settings. `checks` are run side by side, then `pairs`, which must have the links for
    themselves. `parts` of Tandem are installed: what the others would need here is skipped."""

    def __init__(
        self, resolved: Resolved, system: System, outside: Dependencies, asked: Options, parts: Set[str], clock: Clock
    ) -> None:
        self._resolved = resolved
        self._config = with_device_defaults(resolved.config)
        self._system = system
        self._outside = outside
        self._asked = asked
        self._parts = parts
        self._clock = clock
        self._redis = _Once(self._read_redis)
        self._front = _Once(self._read_front)
        self._fleet = _Once(self._read_fleet)
        self._rdma = _Once(lambda: on_thread(lambda: rdma.read_rdma(system)))

    def checks(self) -> tuple[Check, ...]:
        return (
            Check("versions", _looking(lambda: versions.judge_versions(versions.read_versions()))),
            Check("settings", _looking(lambda: settings_lint.judge_settings(self._resolved))),
            self._of("worker", Check("cpu", _looking(self._cpu))),
            self._of("worker", Check("gpu", _looking(self._gpu), gpu.QUERY_S * 2 + gpu.TORCH_S + 5)),
            self._of("worker", Check("rdma", self._examine_rdma)),
            self._of("worker", Check("memlock", self._examine_memlock)),
            self._of("worker", Check("shared-memory", _looking(self._shared_memory))),
            self._of("worker", Check("ucx", _looking(self._ucx), ucx.LIMIT_S)),
            self._of("worker", Check("model", _looking(self._model), 30.0)),
            Check("ports", _looking(self._ports), 20.0),
            self._of("worker", Check("advertise-address", _looking(self._announced))),
            self._of("worker", Check("guard", _looking(self._guard))),
            self._of("gateway", Check("open-files", _looking(self._open_files))),
            self._of("gateway", Check("tenants", _looking(self._tenants))),
            Check("secret", _looking(self._secret)),
            Check("tls", _looking(self._tls)),
            Check("redis", self._examine_redis),
            Check("workers", self._examine_fleet, 30.0),
            Check("gateway", self._examine_front, 15.0),
            Check("clock", self._examine_clock, 30.0),
            Check("pod", _looking(self._pod)),
            Check("rbac", _looking(lambda: [rbac.examine_permissions(self._system, self._config)]), 60.0),
        )

    def pairs(self) -> tuple[Check, ...]:
        return () if self._asked.pairs == "none" else (Check("pairs", self._examine_pairs, PAIRS_S),)

    def _of(self, part: str, check: Check) -> Check:
        """The check where that part is installed, else one that says that it is not."""
        if part in self._parts:
            return check
        return Check(
            check.name, _looking(lambda: [skip(check.name, f"tandem[{part}] is not installed: none runs here")])
        )

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

    async def _examine_memlock(self) -> Sequence[Finding]:
        uses_rdma = (await self._rdma()).is_usable
        pool_bytes = self._config.engine.kv_cache_memory + self._config.engine.host_cache_memory
        return (ulimits.judge_memlock(ulimits.read_limits(self._system), pool_bytes, uses_rdma),)

    def _open_files(self) -> Sequence[Finding]:
        return (ulimits.judge_open_files(ulimits.read_limits(self._system), self._config.gateway.max_connections),)

    def _shared_memory(self) -> Sequence[Finding]:
        return (shared_memory.judge_shared_memory(shared_memory.read_shared_memory(self._system)),)

    def _ucx(self) -> Sequence[Finding]:
        handoff, told = self._config.handoff, self._system.environ.get("UCX_TLS", "")
        trial = ucx.Trial() if handoff.transport == "local" else ucx.read_trial(self._system)
        return ucx.judge_trial(trial, handoff, self._config.transfer, told)

    def _model(self) -> Sequence[Finding]:
        return model.judge_model(model.read_model(self._config.model))

    def _ports(self) -> Sequence[Finding]:
        wanted = [one for one in listen_ports.wanted_places(self._config) if one.part in self._parts]
        return [listen_ports.judge_place(listen_ports.read_place(one, self._config.cluster)) for one in wanted]

    def _announced(self) -> Sequence[Finding]:
        worker = self._config.worker
        found = advertised_address.read_announced(worker, self._system.environ, self._outside.worker_address)
        return (advertised_address.judge_announced(found, worker.host),)

    def _guard(self) -> Sequence[Finding]:
        return (auth.judge_guard(auth.read_door(self._outside.worker_door, self._resolved)),)

    def _tenants(self) -> Sequence[Finding]:
        return (auth.judge_tenants(auth.read_door(self._outside.gateway_door, self._resolved), self._resolved),)

    def _secret(self) -> Sequence[Finding]:
        return (secret.judge_secret(secret.read_secret(self._config.cluster.secret_file), self._config),)

    def _tls(self) -> Sequence[Finding]:
        return (tls.judge_tls(tls.read_tls(self._config.cluster), wall_ns() / 1e9),)

    def _pod(self) -> Sequence[Finding]:
        return (pod.judge_pod(pod.read_pod(self._system)),)

    # ---- others

    async def _read_redis(self) -> redis_server.RedisFacts:
        return await redis_server.read_redis(self._config.redis.url, self._clock)

    async def _read_front(self) -> gateway.GatewayFacts:
        return await on_thread(lambda: gateway.read_front(self._asked.url, self._clock))

    async def _read_fleet(self) -> workers.WorkerList:
        if not self._config.redis.url:
            return workers.WorkerList(reason="no Redis is named that lists workers (--redis-url)")
        try:
            async with self._outside.members_of(self._config) as members:
                return await workers.read_fleet(members, self._clock)
        except TandemError as error:
            return workers.WorkerList(reason=error.message)

    async def _examine_redis(self) -> Sequence[Finding]:
        if self._config.redis.url:
            return redis_server.judge_redis(await self._redis(), self._config.redis.url)
        return redis_server.judge_own_server(await on_thread(_no_server))

    async def _examine_fleet(self) -> Sequence[Finding]:
        found = await self._fleet()
        roles = workers.judge_roles(found, self._config.gateway.disaggregation)
        return (*workers.judge_workers(found), *workers.judge_fingerprints(found), *roles)

    async def _examine_front(self) -> Sequence[Finding]:
        return (gateway.judge_front(await self._front() if self._asked.url else None),)

    async def _examine_clock(self) -> Sequence[Finding]:
        skews: list[clock_skew.Skew] = []
        if self._config.redis.url and not (told := await self._redis()).problem:
            skews.append(clock_skew.Skew("Redis", told.ahead_s, told.within_s))
        if self._asked.url and (own := (await self._front()).skew) is not None:
            skews.append(own)
        return clock_skew.judge_skews([*skews, *workers.skews_of(await self._fleet())])

    async def _examine_pairs(self) -> Sequence[Finding]:
        """One after the other: two at once would share a link and each look slow."""
        found = await self._fleet()
        chosen = pairs.choose_pairs(found, is_all=self._asked.pairs == "all")
        if not chosen:
            return pairs.judge_choice(found, chosen)
        async with self._outside.members_of(self._config) as members:
            measured = [await pairs.measure(members, pair) for pair in chosen]
        return tuple(pairs.judge_pair(one, self._config.transfer) for one in measured)


def _looking(look: Callable[[], Sequence[Finding]]) -> Callable[[], Awaitable[Sequence[Finding]]]:
    """What may wait for the kernel, on a thread of its own."""
    return lambda: on_thread(look)


def _no_server() -> str:
    """Why `serve` finds no server to start; empty where it does."""
    try:
        program = find_program()
    except EmbeddedServerError as error:
        return str(error)
    return "" if os.access(program, os.X_OK) else f"{program} cannot be executed"
