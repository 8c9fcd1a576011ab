"""Verify the identity and KV format of a worker before this worker reads from it."""

from __future__ import annotations

from dataclasses import dataclass, replace

import grpc.aio

from tandem.core.ids import WorkerRef
from tandem.engine.transfer_messages import TransportPeer
from tandem.wire.gen import worker_pb2
from tandem.wire.gen.worker_pb2_grpc import WorkerStub
from tandem.wire.kv_codec import decode_peer
from tandem.wire.peer_auth import means_other_life

ANSWER_S = 5.0
"""Seconds for a source to answer Describe, and for the transport to connect to it."""


class SourceGone(Exception):
    """Raised when the intended source no longer exists, or can never be read by this worker."""


@dataclass(frozen=True, slots=True)
class HandshakeResult:
    """How a source is read, and the identity of its machine, from `DescribeReply`."""

    peer: TransportPeer
    machine: str


async def handshake(stub: WorkerStub, source: WorkerRef, fingerprint: str, transport_kind: str) -> HandshakeResult:
    """Request the source's description and verify it.

    Raises SourceGone when another worker or incarnation answers, or model, KV format or transport differ; TandemError
    when the answer is not authenticated, with nothing of it used.
    """
    try:
        reply = await stub.Describe(worker_pb2.DescribeRequest(), timeout=ANSWER_S)
    except grpc.aio.AioRpcError as error:
        if means_other_life(error):
            raise SourceGone(f"another incarnation of {source.id} is at {source.address}") from error
        raise
    peer = decode_peer(reply.transport)
    # Compare id and incarnation only: the same address may be written in two ways.
    if (peer.worker.id, peer.worker.incarnation) != (source.id, source.incarnation):
        raise SourceGone(f"{source.address} is now {peer.worker}, incarnation {peer.worker.incarnation}")
    if reply.fingerprint != fingerprint:
        raise SourceGone(f"{source} serves another model or another KV format")
    if reply.transport_kind != transport_kind:
        raise SourceGone(f"{source} moves KV over {reply.transport_kind!r}, this worker over {transport_kind!r}")
    return HandshakeResult(replace(peer, worker=source), reply.machine)
