"""List the checks of `tandem doctor` and pass each the settings that it needs."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence, Set
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, replace
from functools import cache
from typing import Literal, TypeVar

from tandem.core.clock import Clock, wall_ns
from tandem.core.config import Config
from tandem.core.device_defaults import with_device_defaults
from tandem.core.errors import TandemError
from tandem.core.settings import Resolved
from tandem.doctor import (
    auth,
    clock_skew,
    gateway,
    gpu,
    host,
    kubernetes,
    model,
    own_addresses,
    pairs,
    rdma,
    redis_server,
    settings_lint,
    tls,
    ucx,
    versions,
    workers,
)
from tandem.doctor.finding import Finding, skip
from tandem.doctor.runner import Check, Result, on_thread
from tandem.doctor.system import System

PAIRS_S = 3600.0
"""Time limit for all pairs, which are measured one after the other with a time limit for each."""
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Options:
    """Hold the command-line options of `tandem doctor`.

    `url`: URL of a gateway to check, empty for none. `ca_file`: the CA that signed the gateway's certificate; None for
    the system's CAs. `pairs`: the pairs of workers of which to measure the links."""

    url: str = ""
    ca_file: str | None = None
    pairs: Literal["none", "few", "all"] = "none"


@dataclass(frozen=True, slots=True)
class Dependencies:
    """Hold functions of packages that this package may not import; the caller passes them in.

    `members_of`: opens the list of a cluster's workers. `check_gateway_auth`, `check_worker_auth`: check the
    authentication settings as the programs do at their start, and raise TandemError. `worker_address`: computes the
    address that a worker advertises.
    """

    members_of: Callable[[Config], AbstractAsyncContextManager[workers.MemberList]]
    check_gateway_auth: auth.AuthCheck
    check_worker_auth: auth.AuthCheck
    worker_address: own_addresses.AddressRule


def list_checks(
    resolved: Resolved, system: System, dependencies: Dependencies, options: Options, parts: Set[str], clock: Clock
) -> list[Check]:
    """Return all checks; links are measured only if `options.pairs` requests it.

    `resolved`: the settings to check. `parts`: parts of Tandem that are installed, gateway or worker. A check of a part
    that is not installed is replaced by one that reports only that it was skipped.
    """
    config = with_device_defaults(resolved.config)
    limits = host.read_limits(system)

    def examine_ports() -> Sequence[Finding]:
        configured = own_addresses.configured_addresses(config)
        return [own_addresses.check_address(each, config.cluster) for each in configured if each.part in parts]

    checks = [
        Check("python", lambda: versions.judge_versions(versions.read_versions()), others=("packages",)),
        Check("settings", lambda: settings_lint.judge_settings(resolved)),
        *_worker_checks(config, system, limits),
        Check("ports", examine_ports, 20.0),
        Check(
            "advertise-address",
            lambda: own_addresses.check_advertised(config.worker, system.environ, dependencies.worker_address),
            part="worker",
        ),
        Check("nodes", lambda: own_addresses.check_nodes(config), part="worker"),
        Check("guard", lambda: auth.check_guard(dependencies.check_worker_auth, resolved), part="worker"),
        Check("open-files", lambda: host.judge_open_files(limits, config.gateway.max_connections), part="gateway"),
        Check("tenants", lambda: auth.check_tenants(dependencies.check_gateway_auth, resolved), part="gateway"),
        Check("secret", lambda: auth.check_secret(config)),
        Check("tls", lambda: tls.check_tls(config.cluster, wall_ns() / 1e9)),
        Check("gateway-tls", lambda: tls.check_gateway_tls(config.gateway, wall_ns() / 1e9), part="gateway"),
        *_cluster_checks(config, dependencies, options, clock),
        Check("pod", lambda: kubernetes.judge_pod(kubernetes.read_pod(system))),
        Check("rbac", lambda: kubernetes.check_permissions(system, config), 60.0),
    ]
    return [check if check.part in ("", *parts) else _skipped(check) for check in checks]


def _worker_checks(config: Config, system: System, limits: host.ResourceLimits) -> list[Check]:
    """Return the checks of the hardware, limits, libraries and model files that a worker needs to compute and to read
    KV."""
    is_required = config.transfer.require == "rdma"
    rdma_facts = _once(lambda: on_thread(lambda: rdma.read_rdma(system)))

    async def examine_rdma() -> Sequence[Finding]:
        found, gid_index = await rdma_facts(), system.environ.get("UCX_IB_GID_INDEX", "")
        return (
            *rdma.judge_devices(found, is_required=is_required),
            *rdma.judge_gids(found, gid_index, is_required=is_required),
            rdma.judge_efa(found, config.transfer),
            rdma.judge_gpu_direct(found, is_cuda=config.model.device == "cuda", is_required=is_required),
        )

    async def examine_memlock() -> Finding:
        pool_bytes = config.engine.kv_cache_memory + config.engine.host_cache_memory
        uses_rdma = (await rdma_facts()).is_usable
        return host.judge_memlock(limits, pool_bytes, uses_rdma)

    return [
        Check("cpu", lambda: host.check_cpu(system, config), part="worker", others=("compiler",)),
        Check("gpu", lambda: gpu.check_gpus(system, config), gpu.LIMIT_S, part="worker", others=("cuda",)),
        Check("rdma", examine_rdma, part="worker", others=("gid", "efa", "gpudirect")),
        Check("network-devices", lambda: rdma.check_network_devices(system, config.transfer), part="worker"),
        Check("memlock", examine_memlock, part="worker"),
        Check("shared-memory", lambda: host.check_shared_memory(system), part="worker"),
        Check("ucx", lambda: ucx.check_ucx(system, config.transfer), ucx.LIMIT_S, part="worker"),
        Check("model", lambda: model.check_model(config.model), 30.0, part="worker", others=("cache",)),
    ]


def _cluster_checks(config: Config, dependencies: Dependencies, options: Options, clock: Clock) -> list[Check]:
    """Return the checks of Redis, gateway, workers and their clocks, and the measurement of links."""
    url = config.redis.url
    redis_facts = _once(lambda: redis_server.read_redis(url, clock))
    checked_gateway = _once(lambda: on_thread(lambda: gateway.check_gateway(options.url, clock, options.ca_file)))
    worker_list = _once(lambda: _read_workers(config, dependencies, clock))

    async def examine_redis() -> Result:
        if url:
            return redis_server.judge_redis(await redis_facts(), url)
        return await on_thread(redis_server.check_own_server)

    async def examine_workers() -> Sequence[Finding]:
        found = await worker_list()
        roles = workers.judge_roles(found, config.gateway.disaggregation)
        return (*workers.judge_workers(found), *workers.judge_fingerprints(found), *roles)

    async def examine_gateway() -> Finding:
        return (await checked_gateway())[0]

    async def examine_clock() -> Sequence[Finding]:
        skews: list[clock_skew.Skew] = []
        if url and not (redis := await redis_facts()).problem:
            skews.append(clock_skew.Skew("Redis", redis.ahead_s, redis.within_s))
        if (skew := (await checked_gateway())[1]) is not None:
            skews.append(skew)
        return clock_skew.judge_skews([*skews, *workers.skews_of(await worker_list())])

    async def examine_pairs() -> Sequence[Finding]:
        """Measure the links of one pair of workers after the other, and return a finding for each. Concurrent reads
        would share a link, and each would look slow."""
        found = await worker_list()
        chosen = pairs.choose_pairs(found, is_all=options.pairs == "all")
        if not chosen:
            reason = "no two workers of one kind answer, one as producer and one as consumer"
            return [skip("pairs", found.reason or reason)]
        async with dependencies.members_of(config) as members:
            results = [(pair, await pairs.measure(members, pair)) for pair in chosen]
        return [r if isinstance(r, Finding) else pairs.judge_link(pair, r, config.transfer) for pair, r in results]

    return [
        Check("redis", examine_redis),
        Check("workers", examine_workers, 30.0, others=("fingerprints", "roles")),
        Check("gateway", examine_gateway, 15.0),
        Check("clock", examine_clock, 30.0),
        *([Check("pairs", examine_pairs, PAIRS_S, is_alone=True)] if options.pairs != "none" else []),
    ]


def _skipped(check: Check) -> Check:
    finding = skip(check.name, f"tandem[{check.part}] is not installed: none runs here")
    return replace(check, examine=lambda: finding)


async def _read_workers(config: Config, dependencies: Dependencies, clock: Clock) -> workers.WorkerList:
    if not config.redis.url:
        return workers.WorkerList(reason="redis.url is not set, so no workers are known (--redis-url)")
    try:
        async with dependencies.members_of(config) as members:
            return await workers.read_workers(members, clock)
    except TandemError as error:
        return workers.WorkerList(reason=error.message)


def _once(read: Callable[[], Awaitable[_T]]) -> Callable[[], Awaitable[_T]]:
    """Return a function that runs an asynchronous read once and returns its result to every caller."""
    task = cache(lambda: asyncio.ensure_future(read()))
    return lambda: asyncio.shield(task())
