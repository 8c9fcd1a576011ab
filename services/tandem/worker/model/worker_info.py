"""Define a worker's identity and properties, which stay the same for one incarnation, and build its answer to
`Describe`."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import Any

from tandem.core.bundle import TokenizerBundle
from tandem.core.clock import wall_ns
from tandem.core.ids import WorkerRef
from tandem.core.lane import ALL_LANES, Lane, lane_labels
from tandem.core.topology import Topology
from tandem.engine.transfer_messages import TransportPeer
from tandem.stores.redis_client import RedisHealth
from tandem.wire.gen import worker_pb2
from tandem.wire.kv_codec import encode_peer, encode_worker, same_fields
from tandem.wire.peer_auth import PeerAuth
from tandem.wire.worker_codec import encode_bundle

_log = logging.getLogger(__name__)
_SAME = (
    *("pool", "model", "fingerprint", "max_model_len", "max_num_seqs"),
    *("bundle_digest", "transport_kind", "aliases", "machine"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerInfo:
    """Hold the properties that a worker reports to others and that stay the same for one incarnation.

    `me`: identity. `pool`: name of the worker's pool, which is also its role at first (`WorkerDescriptor.role`).
    `model`, `aliases`: name of the model, and further names by which requests may name it. `fingerprint`: hexadecimal
    digest of model and KV format. `max_model_len`: most tokens of a sequence. `bundle`, `bundle_digest`: the
    tokenizer's files and their hexadecimal digest. `transport`: what other workers need to read this one's KV.
    `transport_kind`: value of transfer.backend. `max_num_seqs`: most sequences that run at once. `topology`: host, rack
    and zone. `machine`: identity of the machine (`transfer.process_identity.machine_identity`); empty for a worker that
    spans several. `lanes`: lanes whose requests gateways place on this worker. The worker accepts jobs of other lanes
    too, because a gateway may not have learned the worker's lanes yet.
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
    lanes: frozenset[Lane] = ALL_LANES


class WorkerDescriptor:
    """Build the worker's answer to the rpc Describe, except for load, statistics and link reports.

    `role`: what routers use the worker for (`prefill`, `decode` or `mixed`), at first the name of its pool; the worker
    itself runs any job. `metrics_address`: host:port of the worker's /metrics endpoint; empty where there is none.
    """

    def __init__(self, identity: WorkerInfo, trust: PeerAuth, redis: RedisHealth) -> None:
        self.identity = identity
        self.role = identity.pool
        self.metrics_address = ""
        self._trust = trust
        self._redis = redis

    def __repr__(self) -> str:
        return f"<descriptor of {self.identity.me} as {self.role}>"

    def set_role(self, role: str) -> None:
        """Adopt the role that the registry has for this worker, and log a change."""
        if role != self.role:
            _log.info("worker %s of pool %s has the role %s now", self.identity.me, self.identity.pool, role)
            self.role = role

    def describe(self, *, with_bundle: bool, metadata: Any) -> worker_pb2.DescribeReply:
        """Return the reply to the rpc Describe, to which the caller adds load, statistics and link reports.
        `with_bundle`: whether to include the tokenizer's files. `metadata`: gRPC metadata of the call, for which the
        reply carries a proof that this worker knows the cluster's secret."""
        me = self.identity
        reply = worker_pb2.DescribeReply(
            worker=encode_worker(me.me),
            role=self.role,
            transport=encode_peer(me.transport),
            topology=worker_pb2.Topology(host=me.topology.host, rack=me.topology.rack, zone=me.topology.zone),
            lanes=lane_labels(me.lanes),
            metrics_address=self.metrics_address,
            wall_ns=wall_ns(),
            redis_problem=self._redis.problem or "",
            num_redis_errors=self._redis.num_errors.total(),
            **same_fields(me, _SAME),
        )
        if with_bundle:
            reply.bundle.CopyFrom(encode_bundle(me.bundle))
        self._trust.sign_reply(metadata, reply)
        return reply
