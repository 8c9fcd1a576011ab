"""Open the KV transfer agents of a worker's ranks: the agent of one rank, or all of them merged into one
`KVTransfer`."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial

from tandem.core.addresses import format_host, is_loopback
from tandem.core.clock import Clock, SystemClock
from tandem.core.config import Config
from tandem.core.errors import ErrorKind, TandemError
from tandem.core.ids import WorkerRef
from tandem.engine.transfer_messages import Event, TransportPeer
from tandem.runtime.kv_cache import KVCache
from tandem.transfer.auto_transport import AutoTransport, has_rdma, reach_of
from tandem.transfer.interface import KVTransfer, PeerError, ReadState, Transport
from tandem.transfer.memory_pool import MemoryPool, agent_name
from tandem.transfer.multi_rank_transfer import MultiRankTransfer
from tandem.transfer.network_devices import NEITHER, find_devices, interface_address, ucx_environment
from tandem.transfer.nixl_transport import NixlTransport
from tandem.transfer.process_vm_transport import ProcessVmTransport
from tandem.transfer.tcp_transport import TcpTransport
from tandem.transfer.transfer_thread import TransferThread
from tandem.worker.addresses import own_host
from tandem.worker.connection_security import connection_security
from tandem.worker.model.worker_model import WorkerModel
from tandem.worker.ranks.remote_transfer import RemoteTransfer

_log = logging.getLogger(__name__)
SELF_TEST_S, SELF_TEST_POLL_S = 10.0, 0.001
"""Time limit in seconds of the self-test, in which a transport reads its own memory before it is used, and seconds
between two polls of the self-test."""
OnEvent = Callable[[Event], None]
OpenTransport = Callable[[Config, MemoryPool, str], Transport]
"""Signature of a transport factory: `open(config, pool, agent)` opens the transport that `transfer.backend` names, for
the memory `pool` and under the name `agent`."""


def open_transport(config: Config, pool: MemoryPool, agent: str) -> Transport:
    """Open and return the transport that `transfer.backend` names. It reads into `pool`, and lets other workers read
    `pool` under the agent name `agent`. With `auto` it uses TCP alone where NIXL does not work. Raises TandemError when
    this machine does not support the transport, or has none of the devices that `transfer.network_devices` names, or
    where `worker.host` is a loopback address although devices are named: such a worker may lack authentication."""
    backend, names = config.transfer.backend, config.transfer.network_device_names
    if backend == "local":
        return ProcessVmTransport(pool, agent)
    if names and is_loopback(config.worker.host):
        message = f"workers at {config.worker.host} are for this machine only: set worker.host, or name no devices"
        raise TandemError(ErrorKind.UNSUPPORTED, message, param="transfer.network_devices")
    devices = find_devices(names)
    for name in devices.missing:
        _log.warning("KV moves without %s, which is %s", name, NEITHER)
    if backend != "tcp":
        os.environ.update(ucx_environment(devices, os.environ))
    if backend == "nixl":
        return NixlTransport(pool, agent, config.transfer.nixl_backend_names)
    security = connection_security(config.cluster, SystemClock())
    hosts = list(dict.fromkeys(map(interface_address, devices.interfaces)))
    tcp = TcpTransport(pool, agent, config.worker.host, security, device_hosts=hosts)
    if backend == "tcp":
        return tcp
    machine = reach_of(pool.region.device)
    try:
        nixl = _working(NixlTransport(pool, agent, config.transfer.nixl_backend_names))
    except TandemError as error:
        _log.warning("KV moves over TCP, also within this machine: %s", error.message)
        return AutoTransport(tcp, None, "", machine=machine, has_rdma=False)
    return AutoTransport(tcp, nixl, nixl.backend, machine=machine, has_rdma=has_rdma(os.environ))


def _working(nixl: NixlTransport) -> NixlTransport:
    """Return `nixl` if its self-test succeeds, which reads its own memory; otherwise close it and raise TandemError."""
    clock, pause = SystemClock(), threading.Event()
    began = clock.now()
    problem = "the bytes did not arrive intact"
    try:
        test = nixl.post_self_test()
        while (state := test.poll()) is ReadState.PENDING and clock.now() - began < SELF_TEST_S:
            pause.wait(SELF_TEST_POLL_S)
        if state is ReadState.DONE:
            return nixl
        if state is ReadState.PENDING:
            problem = f"they did not arrive within {SELF_TEST_S:g} s"
    except PeerError as error:
        problem = str(error)
    with suppress(PeerError):  # what may go on writes to its test bytes only
        nixl.close()
    raise TandemError(ErrorKind.UNSUPPORTED, f"NIXL moves no bytes of its own memory: {problem}")


def open_rank_transfer(
    config: Config, cache: KVCache, rank: int, on_event: OnEvent, worker: WorkerRef
) -> tuple[KVTransfer, TransportPeer]:
    """Open and start the KV transfer of a rank other than the first. Returns the transfer, which executes the first
    rank's commands, and the description by which other workers read this rank.

    `cache`: the rank's KV memory. `rank`: number of the rank. `on_event`: receives the transfer's events. `worker`: the
    worker to which the rank belongs. The description names the address of this machine, because the worker's own
    address may be on another machine. Raises TandemError when this machine does not support the transport.
    """
    pool = MemoryPool(cache.region, cache.layout, keepalive=cache)
    transport = open_transport(config, pool, agent_name(worker.id, worker.incarnation, rank))
    transfer = TransferThread(transport, cache.digest_here, on_event, SystemClock())
    transfer.start()
    host = own_host(config.worker)
    peer = transport.describe(replace(worker, address=f"{format_host(host)}:0"))
    return transfer, replace(peer, worker=worker, ranks=tuple(replace(rank, host=host) for rank in peer.ranks))


def open_transfer(transport: Transport, model: WorkerModel, on_event: OnEvent, clock: Clock) -> KVTransfer:
    """Create the KV transfer of a worker, which drives the transfers of all its ranks as one; the caller starts it.

    `transport`: transport of the first rank. `model`: the loaded model, with the group of the other ranks, if any.
    `on_event`: receives the events of the transfer. `clock`: measures the duration of reads.
    """

    def own(handler: OnEvent) -> TransferThread:
        return TransferThread(transport, model.digest, handler, clock)

    rank_group = model.rank_group
    if rank_group is None:
        return own(on_event)
    remotes: dict[int, RemoteTransfer] = {}

    def remote(rank: int, handler: OnEvent) -> RemoteTransfer:
        remotes[rank] = RemoteTransfer(partial(rank_group.send_to_transfer, rank), handler)
        return remotes[rank]

    def lose(reason: str) -> None:
        for transfer in remotes.values():
            transfer.lost(reason)

    merged = MultiRankTransfer([own, *(partial(remote, rank) for rank in rank_group.ranks)], on_event)
    rank_group.on_transfer_event(lambda rank, event: remotes[rank].received(event))
    rank_group.watch(lose)
    return merged
