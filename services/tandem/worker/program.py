"""Starts a worker: a port and a transport by configuration, and a life for them; never knows of a job."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable

import grpc.aio

from tandem.core.clock import Clock, SystemClock, wall_ns
from tandem.core.config import Config, WorkerConfig
from tandem.core.errors import ErrorKind, TandemError
from tandem.core.ids import Incarnation, WorkerId, WorkerRef
from tandem.transfer.local import LocalTransport
from tandem.transfer.nixl import NixlTransport
from tandem.transfer.pool import MemoryPool, agent_name
from tandem.transfer.transport import Transport
from tandem.wire.trust import Trust
from tandem.worker.door import require_guard
from tandem.worker.life import Worker
from tandem.worker.model import WorkerModel

OpenTransport = Callable[[str, MemoryPool, str], Transport]
"""`open(kind, pool, agent)`"""


def open_transport(kind: str, pool: MemoryPool, agent: str) -> Transport:
    """Raises TandemError when this machine cannot have it."""
    return NixlTransport(pool, agent) if kind == "nixl" else LocalTransport(pool, agent)


async def start_worker(
    config: Config,
    model: WorkerModel,
    *,
    clock: Clock | None = None,
    open_transport: OpenTransport = open_transport,
) -> Worker:
    """A worker that serves, on the running event loop. Raises TandemError, with nothing left behind."""
    incarnation, name = Incarnation(wall_ns()), config.worker.id or f"{socket.gethostname()}-{os.getpid()}"
    trust = require_guard(config, name)
    server = trust.server(incarnation)
    me = WorkerRef(WorkerId(name), incarnation, _bind(server, trust, config.worker))
    agent = agent_name(me.id, me.incarnation)
    transport = await asyncio.to_thread(open_transport, config.handoff.transport, model.pool, agent)
    worker = Worker(config, model, me, server, trust, transport, clock or SystemClock())
    try:
        await worker.start()
    except BaseException:
        await worker.stop()
        raise
    return worker


def _bind(server: grpc.aio.Server, trust: Trust, config: WorkerConfig) -> str:
    """Take a port; returns the address that others are told."""
    host = f"[{config.host}]" if ":" in config.host else config.host
    try:
        port = trust.listen(server, f"{host}:{config.port}")
    except RuntimeError as error:
        where = f"{host}:{config.port}"
        raise TandemError(
            ErrorKind.INVALID_REQUEST, f"cannot listen on {where}: {error}", param="worker.port"
        ) from None
    return config.announce or f"{host}:{port}"
