"""Compose the gateway program from its parts and run it until SIGINT or SIGTERM."""

from __future__ import annotations

import asyncio
import ctypes
import gc
import json
import logging
import os
import resource
import secrets
import signal
import socket
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Protocol

import uvloop

from tandem.core.addresses import format_host
from tandem.core.clock import Clock, SystemClock, wall_ns
from tandem.core.config import Config, GatewayConfig
from tandem.core.errors import ErrorKind, TandemError
from tandem.core.ids import GatewayId, WorkerRef
from tandem.gateway.app import GatewayApp
from tandem.gateway.console.routes import Console
from tandem.gateway.console.snapshot import take_snapshot
from tandem.gateway.context.interfaces import AllowAll, Authenticator
from tandem.gateway.gauges import watch_dispatch, watch_links, watch_prefixes, watch_quotas, watch_redis
from tandem.gateway.grpc.server import GrpcServer
from tandem.gateway.http.host_header import AllowedHosts
from tandem.gateway.http.monitoring_routes import PROBES
from tandem.gateway.http.protocol_limits import HttpLimits
from tandem.gateway.http.routes import routes_of
from tandem.gateway.http.server import HttpServer
from tandem.gateway.orchestration.demand import DemandPublisher
from tandem.gateway.orchestration.driver import RequestDriver
from tandem.gateway.prefix.prefix_index_client import PrefixIndexClient
from tandem.gateway.telemetry.request_log import RequestLog
from tandem.gateway.tenants.authenticator import ApiKeyAuthenticator
from tandem.gateway.tenants.fairness_sync import FairnessSync
from tandem.gateway.tenants.quotas import TenantQuotas
from tandem.gateway.tenants.tenants_watch import TenantsWatch, read_tenants
from tandem.gateway.text.text_models import TextModels
from tandem.gateway.workers.wakeable_models import WakeableModels
from tandem.gateway.workers.worker_pool import WorkerPool
from tandem.obs.logs.logging_setup import set_up_logging
from tandem.obs.metrics.metrics import Metrics
from tandem.obs.telemetry import Telemetry
from tandem.sched.state.slo_targets import LatencyTargets
from tandem.stores.demand_store import DemandStore
from tandem.stores.model_registry import ModelRegistry
from tandem.stores.prefix_index import IndexReader
from tandem.stores.quota_store import GatewayRegistry, RedisQuotas
from tandem.stores.redis_client import RedisHealth, StoreUnavailable
from tandem.stores.replica_targets import ReplicaTargets
from tandem.stores.service_counters import ServiceCounters
from tandem.stores.worker_registry import WorkerRegistry
from tandem.wire.peer_auth import PeerAuth
from tandem.wire.tls import TlsFiles

log = logging.getLogger(__name__)
FLUSH_S = 2.0
"""Seconds that a stopping gateway gives clients to read the end of their responses, once every request has ended."""


_LARGE_BLOCK_BYTES = 256 << 10
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of glibc's malloc.h
_MANY_OBJECTS = 10_000
"""Number of new objects after which the youngest generation is collected: about the objects of seventy requests. A
collection of so many takes some milliseconds."""


class _Part(Protocol):
    """Part of the gateway program that runs from `start` to `stop`."""

    async def start(self) -> None: ...

    async def stop(self) -> None: ...


class Gateway:
    """Build all parts of the gateway program from the configuration, and start and stop them on one event loop. `name`:
    the gateway's name, unique to this run of the process."""

    def __init__(self, config: Config, name: GatewayId) -> None:
        clock = SystemClock()
        options, redis, health = config.gateway, config.redis, RedisHealth()
        self._registry = WorkerRegistry(redis.url, redis.namespace, health=health)
        holds = options.wake_timeout_s > 0
        texts = TextModels(config.model.generation_config, keep_bundles=holds)
        trust = PeerAuth.of(name, config.cluster)
        fleet = WorkerPool(name, self._discover, texts, clock, options, trust, config.transfer)
        authenticator, quotas, tenancy = _tenancy(name, config, clock, health)
        targets = LatencyTargets.of(config.slo)
        reader = IndexReader(redis.url, redis.namespace, health=health)
        prefixes = PrefixIndexClient(reader, fleet, redis.index_stride, clock)
        self._dispatcher = RequestDriver(fleet, options, clock, quotas, targets, prefixes)
        counters = ServiceCounters(redis.url, redis.namespace, name, health=health)
        board = DemandStore(redis.url, redis.namespace, health=health)
        self._telemetry = Telemetry.start("tandem-gateway", name, config.telemetry.max_values)
        watch_dispatch(self._telemetry.metrics, self._dispatcher)
        _watch_stores(self._telemetry.metrics, health, fleet, prefixes, quotas)
        consoles: list[Console] = []
        if options.console:
            snapshot = partial(take_snapshot, name, self._dispatcher, fleet, clock, clock.now())
            consoles.append(Console(snapshot, authenticator, clock))
        tls = TlsFiles.of_gateway(options) if options.has_tls else None
        app = GatewayApp(
            self._dispatcher,
            authenticator,
            options,
            telemetry=self._telemetry,
            observers=[RequestLog(config.telemetry.log_requests), self._dispatcher.demand, *consoles],
            targets=targets,
            clock=clock,
        )
        if tls is not None:
            app.warn_of(tls.problem)
        for console in consoles:
            app.serve(routes_of(console))
        limits = HttpLimits.of(options, PROBES)
        self._server, self._metrics = _http_servers(app, options, limits, tls)
        self._grpc = GrpcServer(
            self._dispatcher,
            app.answers,
            authenticator,
            max_message=options.max_body,
            max_calls=options.max_connections,
            stalled_client_s=options.stalled_client_s,
            tls=tls,
        )
        self._config = options
        # They stop in reverse order: the driver before the pool, because its last cancellations go to workers.
        self._parts: list[_Part] = [
            *([] if self._metrics is None else [self._metrics]),
            *tenancy,
            fleet,
            self._dispatcher,
            *([_wakeable(fleet, config, texts, clock, health)] if holds else []),
            prefixes,
            FairnessSync(self._dispatcher.director.queue, counters),
            DemandPublisher(name, board, self._dispatcher.demand, clock),
        ]

    @property
    def url(self) -> str:
        """Return the base URL of the HTTP server."""
        return f"{self._config.scheme}://{self._host}:{self._server.port}"

    @property
    def grpc_target(self) -> str:
        """Return the address of the gRPC server as host:port, for a client's channel."""
        return f"{self._host}:{self._grpc.port}"

    @property
    def metrics_address(self) -> str:
        """Return host:port of the listener of `gateway.metrics_port`; empty where that is not set, because the HTTP
        server at `url` serves the metrics then."""
        return "" if self._metrics is None else f"{format_host(self._config.own_metrics_host)}:{self._metrics.port}"

    @property
    def _host(self) -> str:
        return format_host(self._config.host)

    async def start(self) -> None:
        """Start all parts; HTTP and gRPC requests are accepted when this returns."""
        for part in self._parts:
            await part.start()
        await self._server.start()
        await self._grpc.start(self._config.host, self._config.own_grpc_port)

    async def stop(self) -> None:
        """Refuse new requests, wait up to `gateway.drain_s` seconds for open ones, end the remaining ones with the
        error DRAINING, and stop all parts."""
        cut = await self._dispatcher.drain(self._config.drain_s)
        if cut:
            log.warning(
                "the gateway aborted %d requests that were open after %g s (gateway.drain_s)", cut, self._config.drain_s
            )
        await self._grpc.stop(FLUSH_S)
        await self._server.stop()  # after gRPC, because its lifespan ends the tokenizer threads of both front ends
        for part in reversed(self._parts):
            await part.stop()
        await self._registry.close()
        await asyncio.to_thread(self._telemetry.close, FLUSH_S)

    async def _discover(self) -> Mapping[WorkerRef, str]:
        try:
            return {record.worker: record.role for record in await self._registry.list()}
        except StoreUnavailable as error:
            raise TandemError(ErrorKind.NO_WORKER, f"Redis does not answer: {error}; check redis.url") from error


def _tenancy(
    gateway: GatewayId, config: Config, clock: Clock, health: RedisHealth
) -> tuple[Authenticator, TenantQuotas | None, Sequence[_Part]]:
    """Return what the setting `gateway.auth` selects: what finds the tenant of an API key, the quotas of all tenants,
    and the parts to start. With `auth: off` every client is accepted and nothing is limited. Raises
    TandemError(INVALID_REQUEST) for a tenants file that cannot be read."""
    if config.gateway.auth == "off":
        return AllowAll(), None, ()
    path, policy = Path(config.gateway.tenants), config.gateway.disaggregation
    authenticator = ApiKeyAuthenticator(read_tenants(path, policy), wall_ns)
    store = RedisQuotas(config.redis.url, config.redis.namespace, health=health)
    registry = GatewayRegistry(config.redis.url, config.redis.namespace, ttl_s=store.ttl_s, health=health)
    quotas = TenantQuotas(gateway, store, registry, clock)
    return authenticator, quotas, (TenantsWatch(path, policy, authenticator), quotas)


def _wakeable(
    fleet: WorkerPool, config: Config, texts: TextModels, clock: Clock, health: RedisHealth
) -> WakeableModels:
    """Let a worker pool know the models that a planner can wake, and return what searches for them."""
    models = ModelRegistry(config.redis.url, config.redis.namespace, health=health)
    replicas = ReplicaTargets(config.redis.url, config.redis.namespace, health=health)
    wakeable = WakeableModels(fleet.live_models, models, replicas, texts, clock)
    fleet.wakeable, fleet.optional_roles = wakeable.models, wakeable.optional_roles
    return wakeable


def _watch_stores(
    metrics: Metrics, health: RedisHealth, fleet: WorkerPool, prefixes: PrefixIndexClient, quotas: TenantQuotas | None
) -> None:
    watch_prefixes(metrics, prefixes)
    watch_links(metrics, fleet.pairs)
    watch_redis(metrics, health)
    if quotas is not None:
        watch_quotas(metrics, quotas)


def _http_servers(
    app: GatewayApp, config: GatewayConfig, limits: HttpLimits, tls: TlsFiles | None
) -> tuple[HttpServer, HttpServer | None]:
    """Return the server of `gateway.port`, and that of `gateway.metrics_port` if there is one."""
    serve = partial(HttpServer, graceful_s=FLUSH_S, tls=tls, on_refusal=app.count_refusal)
    server = serve(app, config.host, config.port, limits=limits)
    if config.metrics_port < 0:
        return server, None
    host = config.own_metrics_host
    metrics_limits = replace(limits, allowed_hosts=AllowedHosts.of(host, config.host_patterns))
    return server, serve(app.metrics, host, config.metrics_port, limits=metrics_limits)


def new_name() -> GatewayId:
    """Return a name for this run of the process: its host name, its process id and a random suffix."""
    return GatewayId(f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(4)}")


def tune_gc() -> None:
    """Keep the garbage collector from delaying streams; call this once everything is loaded.

    Objects loaded so far are never collected again, and the threshold that starts a collection is raised, so that
    collections are rare. With the default threshold one would run whenever the number of open requests has grown by
    five; it would find nothing, because a request leaves no reference cycle."""
    gc.freeze()
    gc.set_threshold(_MANY_OBJECTS, *gc.get_threshold()[1:])


def tune_malloc() -> None:
    """Make glibc give the memory of large blocks, such as request bodies, back to the system when they are freed.

    By default glibc raises its threshold for large blocks to the size of the largest block that was freed, up to 32
    MiB, and keeps smaller blocks in its heap. Other C libraries have no such setting, and nothing is done."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, _LARGE_BLOCK_BYTES)
        mallopt(_M_TRIM_THRESHOLD, _LARGE_BLOCK_BYTES)


async def _run(config: Config, name: GatewayId) -> None:
    gateway = Gateway(config, name)
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    await gateway.start()
    tune_gc()
    addresses = {"url": gateway.url, "grpc": gateway.grpc_target, "metrics": gateway.metrics_address}
    facts = {"ready": True, **addresses}
    print(json.dumps(facts), flush=True)  # noqa: T201 - read by the parent process
    await stop.wait()
    await gateway.stop()


def run(config: Config) -> int:
    """Run `tandem gateway` until SIGINT or SIGTERM, and return the exit status 0. One line of JSON with the gateway's
    addresses is printed once it listens."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # the usual 1,024 are fewer than `max_connections`
    name = new_name()
    set_up_logging(config.telemetry, "tandem-gateway", name)
    tune_malloc()
    # A text is tokenized on the thread that asks for it, at that thread's priority, not by a pool of tokenizers' own.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    uvloop.run(_run(config, name))
    return 0
