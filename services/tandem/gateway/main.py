"""Composes the gateway program and runs it until a signal; decides nothing about requests."""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import os
import secrets
import signal
import socket
from collections.abc import Sequence

import uvloop

from tandem.core.clock import SystemClock
from tandem.core.config import Config
from tandem.core.errors import ErrorKind, TandemError
from tandem.core.ids import GatewayId, WorkerRef
from tandem.gateway.app import create_app
from tandem.gateway.dispatch import Dispatcher
from tandem.gateway.fair_share import FairShare
from tandem.gateway.fleet import Fleet
from tandem.gateway.ports import OpenDoor
from tandem.gateway.server import HttpServer
from tandem.gateway.text_models import TextModels
from tandem.sched.targets import LatencyTargets
from tandem.stores.registry import RegistryUnavailable, WorkerRegistry
from tandem.stores.service_counters import ServiceCounters

log = logging.getLogger(__name__)
FLUSH_S = 2.0
"""For clients to read the end of their responses, once every request has ended."""


class Gateway:
    """The whole program inside one event loop."""

    def __init__(self, config: Config) -> None:
        name = GatewayId(f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(4)}")
        clock = SystemClock()
        self._drain_s = config.gateway.drain_s
        self._registry = WorkerRegistry(config.redis.url, config.redis.namespace)
        self._fleet = Fleet(name, self._discover, TextModels(config.model.generation_config), clock, config.gateway)
        self._dispatcher = Dispatcher(self._fleet, config.gateway, clock, LatencyTargets.of(config.slo))
        counters = ServiceCounters(config.redis.url, config.redis.namespace, name)
        self._share = FairShare(self._dispatcher.line, counters)
        self._server = HttpServer(
            create_app(self._dispatcher, OpenDoor(), config.gateway),
            config.gateway.host,
            config.gateway.port,
            graceful_s=FLUSH_S,
        )

    @property
    def port(self) -> int:
        return self._server.port

    async def start(self) -> None:
        await self._dispatcher.start()
        await self._fleet.start(self._dispatcher)
        await self._share.start()
        await self._server.start()

    async def stop(self) -> None:
        """Let requests under way end, within `gateway.drain_s`; then cut them off, each with a typed error."""
        cut = await self._dispatcher.drain(self._drain_s)
        if cut:
            log.warning("%d requests were cut off after %g s", cut, self._drain_s)
        await self._server.stop()
        await self._fleet.stop()
        await self._dispatcher.stop()
        await self._share.stop()
        await self._registry.close()

    async def _discover(self) -> Sequence[WorkerRef]:
        try:
            return [record.worker for record in await self._registry.list()]
        except RegistryUnavailable as error:
            raise TandemError(ErrorKind.NO_WORKER, f"the registry does not answer: {error}") from error


async def _run(config: Config) -> None:
    gateway = Gateway(config)
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for name in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(name, stop.set)
    await gateway.start()
    # What is loaded by now stays: a look of the garbage collector at all of it would hold up every stream.
    gc.freeze()
    host = f"[{config.gateway.host}]" if ":" in config.gateway.host else config.gateway.host
    url = f"http://{host}:{gateway.port}"
    print(json.dumps({"ready": True, "url": url}), flush=True)  # noqa: T201 - for whoever started us
    await stop.wait()
    await gateway.stop()


def run(config: Config) -> int:
    """`tandem gateway`: serve until SIGINT or SIGTERM. The line on stdout says where, once it listens."""
    uvloop.run(_run(config))
    return 0
