"""Verify the identity and KV format of a worker before this worker reads from it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import NamedTuple

import grpc.aio

from tandem.core.ids import WorkerRef
from tandem.engine.transfer_messages import TransportPeer
from tandem.wire.gen import worker_pb2
from tandem.wire.gen.worker_pb2_grpc import WorkerStub
from tandem.wire.kv_codec import decode_peer
from tandem.wire.listener_probe import refuses_connections
from tandem.wire.peer_auth import PeerAuth, means_other_life
from tandem.worker.model.worker_info import WorkerInfo

ANSWER_S = 5.0
"""Seconds for a source to answer Describe, and for the transport to connect to it."""
REFUSAL_S = 0.25
"""Longest wait for the answer to a test connection to a source that does not answer Describe."""


class SourceGone(Exception):
    """Raised when the worker to be read has ended or restarted, or can never be read by this worker."""


class Source(NamedTuple):
    """Hold what is needed to read from a worker that was verified.

    `stub`: makes gRPC calls to the worker. `peer`: description by which the transport connects to it. `machine`:
    identity of the machine on which it runs, from `DescribeReply`.
    """

    stub: WorkerStub
    peer: TransportPeer
    machine: str


@asynccontextmanager
async def open_source(trust: PeerAuth, source: WorkerRef, me: WorkerInfo) -> AsyncIterator[Source]:
    """Open a channel to the worker `source`, verify its description, and yield it as a `Source`. The channel is closed
    at the end of the `async with` block. `trust`: authentication within the cluster. `me`: this worker, whose model and
    KV format the source must have too.

    Raises SourceGone when the source's host refuses connections to its address, another worker or incarnation answers,
    or model, KV format or transport differ. Raises TandemError when the answer is not authenticated; nothing of the
    answer is used then. Raises grpc.aio.AioRpcError when the source does not answer.
    """
    async with trust.open_channel(source.address) as channel:
        stub = trust.stub(channel, source.incarnation)
        try:
            reply = await stub.Describe(worker_pb2.DescribeRequest(), timeout=ANSWER_S)
        except grpc.aio.AioRpcError as error:
            if means_other_life(error):
                raise SourceGone(f"another incarnation of {source.id} is at {source.address}") from error
            if error.code() is grpc.StatusCode.UNAVAILABLE and await refuses_connections(source.address, REFUSAL_S):
                raise SourceGone(
                    f"the process of {source.id} has ended: nothing listens at {source.address}"
                ) from error
            raise
        peer = decode_peer(reply.transport)
        # Compare id and incarnation only: the same address may be written in two ways.
        if (peer.worker.id, peer.worker.incarnation) != (source.id, source.incarnation):
            raise SourceGone(f"{source.address} is now {peer.worker}, incarnation {peer.worker.incarnation}")
        if reply.fingerprint != me.fingerprint:
            raise SourceGone(f"{source} serves another model or another KV format")
        if reply.transport_kind != me.transport_kind:
            raise SourceGone(f"{source} moves KV over {reply.transport_kind!r}, this worker over {me.transport_kind!r}")
        yield Source(stub, replace(peer, worker=source), reply.machine)
