"""Start a worker: bind its port, open its transport, and create a `Worker` for them."""

from __future__ import annotations

import asyncio
import logging
import os
import socket

import grpc.aio

from tandem.core.addresses import format_host
from tandem.core.clock import SystemClock, wall_ns
from tandem.core.config import Config, WorkerConfig
from tandem.core.errors import ErrorKind, TandemError
from tandem.core.ids import Incarnation, WorkerId, WorkerRef
from tandem.core.topology import Topology
from tandem.engine.transfer_messages import TransportPeer
from tandem.transfer.interface import Transport
from tandem.transfer.memory_pool import agent_name
from tandem.transfer.peer_layout import join_ranks
from tandem.transfer.process_identity import machine_identity
from tandem.wire.peer_auth import PeerAuth
from tandem.worker.addresses import advertised_address, default_route_address, require_worker_auth
from tandem.worker.model.rank_transfer import OpenTransport, open_transport
from tandem.worker.model.worker_info import WorkerInfo
from tandem.worker.model.worker_model import WorkerModel
from tandem.worker.worker import Worker

_log = logging.getLogger(__name__)


async def start_worker(
    config: Config,
    model: WorkerModel,
    *,
    open_transport: OpenTransport = open_transport,
) -> Worker:
    """Start a worker for the loaded `model` on the running event loop, and return it once it serves. `open_transport`:
    function that opens the KV transport, which tests replace.

    Raises TandemError when the worker cannot start, for example because its port is in use, after stopping everything
    that it has started.
    """
    incarnation, name = Incarnation(wall_ns()), config.worker.id or f"{socket.gethostname()}-{os.getpid()}"
    trust = require_worker_auth(config, name)
    server = trust.server(incarnation)
    me = WorkerRef(WorkerId(name), incarnation, _bind(server, trust, config.worker))
    agent = agent_name(me.id, me.incarnation)
    _log.info("opening the transport %s", config.transfer.backend)
    transport = await asyncio.to_thread(open_transport, config, model.pool, agent)
    try:
        peer = await asyncio.to_thread(_describe, model, me, transport)
        identity = _identity(config, model, me, peer)
        worker = Worker(config, model, identity, server, trust, transport, SystemClock())
    except BaseException:
        await asyncio.to_thread(transport.close)
        raise
    try:
        await worker.start()
    except BaseException:
        await worker.stop()
        raise
    return worker


def _describe(model: WorkerModel, me: WorkerRef, transport: Transport) -> TransportPeer:
    """Return what other workers need to read the KV of all ranks of this worker; opens the transfers of the ranks other
    than the first. Raises TandemError when a rank fails."""
    mine = transport.describe(me)
    return mine if model.rank_group is None else join_ranks([mine, *model.rank_group.open_transfers(me)])


def _bind(server: grpc.aio.Server, trust: PeerAuth, config: WorkerConfig) -> str:
    """Bind a port; returns the address to advertise."""
    where = f"{format_host(config.host)}:{config.port}"
    try:
        port = trust.listen(server, where)
    except RuntimeError as error:
        raise TandemError(
            ErrorKind.INVALID_REQUEST,
            f"cannot listen on {where}: {error}; set worker.host and --worker-port to a free address, or port 0",
            param="worker.port",
        ) from None
    return advertised_address(config, port, os.environ, default_route_address)


def _identity(config: Config, model: WorkerModel, me: WorkerRef, peer: TransportPeer) -> WorkerInfo:
    return WorkerInfo(
        me=me,
        pool=config.worker.pool,
        model=model.name,
        fingerprint=model.fingerprint,
        max_model_len=model.max_model_len,
        max_num_seqs=config.engine.max_num_seqs,
        bundle=model.bundle,
        bundle_digest=model.bundle.digest,
        transport=peer,
        transport_kind=config.transfer.backend,
        aliases=model.aliases,
        topology=Topology(config.worker.host_label, config.worker.rack, config.worker.zone),
        machine=machine_identity() if config.engine.nnodes == 1 else "",
        lanes=config.worker.served_lanes,
    )
