"""List the checks of `tandem doctor` and pass each the settings that it needs."""

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
    host_limits,
    listen_ports,
    model,
    pairs,
    pod,
    rbac,
    rdma,
    redis_server,
    settings_lint,
    tls,
    ucx,
    versions,
    workers,
)
from tandem.doctor.finding import Finding, skip
from tandem.doctor.runner import Check, on_thread
from tandem.doctor.system import System
from tandem.stores.embedded_redis import EmbeddedServerError, find_program

PAIRS_S = 3600.0
"""Time limit for all pairs, which are measured one after the other with a time limit for each."""
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Options:
    """Command-line options of the doctor.

    `url`: URL of a gateway to check, empty for none. `pairs`: pairs of workers whose links to measure.
    """

    url: str = ""
    pairs: Literal["none", "few", "all"] = "none"


@dataclass(frozen=True, slots=True)
class Dependencies:
    """Functions of other packages that the checks use.

    `members_of` opens a cluster's list of workers, `check_gateway_auth` and `check_worker_auth` are the programs' own
    checks of authentication settings, `worker_address` is the workers' rule for the address to advertise.
    """

    members_of: Callable[[Config], AbstractAsyncContextManager[workers.MemberList]]
    check_gateway_auth: auth.AuthCheck
    check_worker_auth: auth.AuthCheck
    worker_address: advertised_address.AddressRule


class _Cached(Generic[_T]):
    """Run an asynchronous read once and return its result to every caller."""

    def __init__(self, read: Callable[[], Awaitable[_T]]) -> None:
        self._read = read
        self._task: asyncio.Task[_T] | None = None

    async def __call__(self) -> _T:
        if self._task is None:
            self._task = asyncio.ensure_future(self._read())
        return await asyncio.shield(self._task)


class CheckSuite:
    """All checks for one set of settings.

    `checks` may run concurrently; `pairs` must run after them, since they need the links to themselves. `parts`: parts
    of Tandem that are installed; checks for other parts are skipped.
    """

    def __init__(
        self,
        resolved: Resolved,
        system: System,
        dependencies: Dependencies,
        options: Options,
        parts: Set[str],
        clock: Clock,
    ) -> None:
        self._resolved = resolved
        self._config = with_device_defaults(resolved.config)
        self._system = system
        self._dependencies = dependencies
        self._options = options
        self._parts = parts
        self._clock = clock
        self._redis = _Cached(self._read_redis)
        self._gateway_facts = _Cached(self._read_gateway)
        self._worker_list = _Cached(self._read_workers)
        self._rdma = _Cached(lambda: on_thread(lambda: rdma.read_rdma(system)))

    def checks(self) -> tuple[Check, ...]:
        return (
            Check("versions", _threaded(lambda: versions.judge_versions(versions.read_versions()))),
            Check("settings", _threaded(lambda: settings_lint.judge_settings(self._resolved))),
            self._if_installed("worker", Check("cpu", _threaded(self._cpu))),
            self._if_installed("worker", Check("gpu", _threaded(self._gpu), gpu.QUERY_S * 2 + gpu.TORCH_S + 5)),
            self._if_installed("worker", Check("rdma", self._examine_rdma)),
            self._if_installed("worker", Check("memlock", self._examine_memlock)),
            self._if_installed("worker", Check("shared-memory", _threaded(self._shared_memory))),
            self._if_installed("worker", Check("ucx", _threaded(self._ucx), ucx.LIMIT_S)),
            self._if_installed("worker", Check("model", _threaded(self._model), 30.0)),
            Check("ports", _threaded(self._ports), 20.0),
            self._if_installed("worker", Check("advertise-address", _threaded(self._advertised))),
            self._if_installed("worker", Check("guard", _threaded(self._worker_auth))),
            self._if_installed("gateway", Check("open-files", _threaded(self._open_files))),
            self._if_installed("gateway", Check("tenants", _threaded(self._tenants))),
            Check("secret", _threaded(self._secret)),
            Check("tls", _threaded(self._tls)),
            Check("redis", self._examine_redis),
            Check("workers", self._examine_workers, 30.0),
            Check("gateway", self._examine_gateway, 15.0),
            Check("clock", self._examine_clock, 30.0),
            Check("pod", _threaded(self._pod)),
            Check("rbac", _threaded(lambda: [rbac.examine_permissions(self._system, self._config)]), 60.0),
        )

    def pairs(self) -> tuple[Check, ...]:
        return () if self._options.pairs == "none" else (Check("pairs", self._examine_pairs, PAIRS_S),)

    def _if_installed(self, part: str, check: Check) -> Check:
        """Return the check if its part is installed, else a check that is skipped with that reason."""
        if part in self._parts:
            return check
        return Check(
            check.name, _threaded(lambda: [skip(check.name, f"tandem[{part}] is not installed: none runs here")])
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
        return (host_limits.judge_memlock(host_limits.read_limits(self._system), pool_bytes, uses_rdma),)

    def _open_files(self) -> Sequence[Finding]:
        return (
            host_limits.judge_open_files(host_limits.read_limits(self._system), self._config.gateway.max_connections),
        )

    def _shared_memory(self) -> Sequence[Finding]:
        return (host_limits.judge_shared_memory(host_limits.read_shared_memory(self._system)),)

    def _ucx(self) -> Sequence[Finding]:
        handoff, ucx_tls = self._config.handoff, self._system.environ.get("UCX_TLS", "")
        trial = ucx.Trial() if handoff.transport == "local" else ucx.read_trial(self._system)
        return ucx.judge_trial(trial, handoff, self._config.transfer, ucx_tls)

    def _model(self) -> Sequence[Finding]:
        return model.judge_model(model.read_model(self._config.model))

    def _ports(self) -> Sequence[Finding]:
        addresses = [a for a in listen_ports.configured_addresses(self._config) if a.part in self._parts]
        return [listen_ports.judge_address(listen_ports.probe_address(a, self._config.cluster)) for a in addresses]

    def _advertised(self) -> Sequence[Finding]:
        worker = self._config.worker
        found = advertised_address.read_advertised(worker, self._system.environ, self._dependencies.worker_address)
        return (advertised_address.judge_advertised(found, worker.host),)

    def _worker_auth(self) -> Sequence[Finding]:
        return (auth.judge_guard(auth.read_auth_problem(self._dependencies.check_worker_auth, self._resolved)),)

    def _tenants(self) -> Sequence[Finding]:
        return (
            auth.judge_tenants(
                auth.read_auth_problem(self._dependencies.check_gateway_auth, self._resolved), self._resolved
            ),
        )

    def _secret(self) -> Sequence[Finding]:
        return (auth.judge_secret(auth.read_secret(self._config.cluster.secret_file), self._config),)

    def _tls(self) -> Sequence[Finding]:
        return (tls.judge_tls(tls.read_tls(self._config.cluster), wall_ns() / 1e9),)

    def _pod(self) -> Sequence[Finding]:
        return (pod.judge_pod(pod.read_pod(self._system)),)

    # ---- Redis, workers and gateway

    async def _read_redis(self) -> redis_server.RedisFacts:
        return await redis_server.read_redis(self._config.redis.url, self._clock)

    async def _read_gateway(self) -> gateway.GatewayFacts:
        return await on_thread(lambda: gateway.read_gateway(self._options.url, self._clock))

    async def _read_workers(self) -> workers.WorkerList:
        if not self._config.redis.url:
            return workers.WorkerList(reason="redis.url is not set, so no workers are known (--redis-url)")
        try:
            async with self._dependencies.members_of(self._config) as members:
                return await workers.read_workers(members, self._clock)
        except TandemError as error:
            return workers.WorkerList(reason=error.message)

    async def _examine_redis(self) -> Sequence[Finding]:
        if self._config.redis.url:
            return redis_server.judge_redis(await self._redis(), self._config.redis.url)
        return redis_server.judge_own_server(await on_thread(_no_server))

    async def _examine_workers(self) -> Sequence[Finding]:
        found = await self._worker_list()
        roles = workers.judge_roles(found, self._config.gateway.disaggregation)
        return (*workers.judge_workers(found), *workers.judge_fingerprints(found), *roles)

    async def _examine_gateway(self) -> Sequence[Finding]:
        return (gateway.judge_gateway(await self._gateway_facts() if self._options.url else None),)

    async def _examine_clock(self) -> Sequence[Finding]:
        skews: list[clock_skew.Skew] = []
        if self._config.redis.url and not (redis := await self._redis()).problem:
            skews.append(clock_skew.Skew("Redis", redis.ahead_s, redis.within_s))
        if self._options.url and (skew := (await self._gateway_facts()).skew) is not None:
            skews.append(skew)
        return clock_skew.judge_skews([*skews, *workers.skews_of(await self._worker_list())])

    async def _examine_pairs(self) -> Sequence[Finding]:
        """Measure one pair after the other: concurrent reads would share a link, and each would look slow."""
        found = await self._worker_list()
        chosen = pairs.choose_pairs(found, is_all=self._options.pairs == "all")
        if not chosen:
            return pairs.judge_choice(found, chosen)
        async with self._dependencies.members_of(self._config) as members:
            measured = [await pairs.measure(members, pair) for pair in chosen]
        return tuple(pairs.judge_pair(each, self._config.transfer) for each in measured)


def _threaded(check: Callable[[], Sequence[Finding]]) -> Callable[[], Awaitable[Sequence[Finding]]]:
    """Make a check that may block (in the kernel, for example) run on a thread of its own."""
    return lambda: on_thread(check)


def _no_server() -> str:
    """Return why `tandem serve` has no Redis server to start; empty if it has one."""
    try:
        program = find_program()
    except EmbeddedServerError as error:
        return str(error)
    return "" if os.access(program, os.X_OK) else f"{program} cannot be executed"
