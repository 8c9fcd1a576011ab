"""How a worker meets another one that it is to read: asks who it is and believes only what fits; never reads."""

from __future__ import annotations

from dataclasses import dataclass, replace

import grpc.aio

from tandem.core.ids import WorkerRef
from tandem.engine.ports import TransportPeer
from tandem.wire.gen import worker_pb2
from tandem.wire.gen.worker_pb2_grpc import WorkerStub
from tandem.wire.kv_codec import decode_peer
from tandem.wire.peer_auth import means_other_life

ANSWER_S = 5.0
"""For a source to say who it is, and for the transport to connect to it."""


class SourceGone(Exception):
    """The source that was meant is no more, or can never be read from here."""


@dataclass(frozen=True, slots=True)
class HandshakeResult:
    """How a source is read, and on which machine it is; see `DescribeReply`."""

    peer: TransportPeer
    machine: str


async def handshake(stub: WorkerStub, source: WorkerRef, fingerprint: str, transport_kind: str) -> HandshakeResult:
    """Ask the source for its side of the handshake. Raises SourceGone when it is not who was meant, or does not hold
    the KV of this fingerprint and transport; TandemError when it is a stranger: nothing of what that says is used."""
    try:
        said = await stub.Describe(worker_pb2.DescribeRequest(), timeout=ANSWER_S)
    except grpc.aio.AioRpcError as error:
        if means_other_life(error):
            raise SourceGone(f"another life of {source.id} is at {source.address}") from error
        raise
    peer = decode_peer(said.transport)
    # The address may be written in two ways; a life may not.
    if (peer.worker.id, peer.worker.incarnation) != (source.id, source.incarnation):
        raise SourceGone(f"{source.address} is now {peer.worker}, incarnation {peer.worker.incarnation}")
    if said.fingerprint != fingerprint:
        raise SourceGone(f"{source} serves another model or another KV format")
    if said.transport_kind != transport_kind:
        raise SourceGone(f"{source} moves KV over {said.transport_kind!r}, this worker over {transport_kind!r}")
    return HandshakeResult(replace(peer, worker=source), said.machine)
