"""Define what stays the same for one incarnation of a worker and is advertised to others."""

from __future__ import annotations

from dataclasses import dataclass, field

from tandem.core.bundle import TokenizerBundle
from tandem.core.ids import WorkerRef
from tandem.core.topology import Topology
from tandem.engine.transfer_messages import TransportPeer
from tandem.wire.gen import worker_pb2
from tandem.wire.kv_codec import encode_peer, encode_worker
from tandem.wire.worker_codec import encode_bundle


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerInfo:
    """Identity of one incarnation of a worker.

    `pool` is a label for routers, `fingerprint` and `bundle_digest` are hexadecimal, `max_model_len` is in tokens, and
    `machine` comes from `transfer.process_identity.machine_identity`.
    """

    me: WorkerRef
    pool: str
    model: str
    fingerprint: str
    max_model_len: int
    bundle: TokenizerBundle
    bundle_digest: str
    transport: TransportPeer
    transport_kind: str
    max_num_seqs: int = 0
    aliases: tuple[str, ...] = ()
    topology: Topology = field(default_factory=Topology)
    machine: str = ""

    def describe(self, *, with_bundle: bool) -> worker_pb2.DescribeReply:
        """Build the reply to `Describe` without load and engine statistics."""
        reply = worker_pb2.DescribeReply(
            worker=encode_worker(self.me),
            pool=self.pool,
            model=self.model,
            fingerprint=self.fingerprint,
            max_model_len=self.max_model_len,
            max_num_seqs=self.max_num_seqs,
            transport=encode_peer(self.transport),
            bundle_digest=self.bundle_digest,
            transport_kind=self.transport_kind,
            aliases=self.aliases,
            topology=worker_pb2.Topology(host=self.topology.host, rack=self.topology.rack, zone=self.topology.zone),
            machine=self.machine,
        )
        if with_bundle:
            reply.bundle.CopyFrom(encode_bundle(self.bundle))
        return reply
