"""How a worker introduces itself: who it is for life, what it is taken for now, and the proof; never its load."""

from __future__ import annotations

import logging
from typing import Any

from tandem.core.clock import wall_ns
from tandem.stores.redis_health import RedisHealth
from tandem.wire.gen import worker_pb2
from tandem.wire.peer_auth import PeerAuth
from tandem.worker.model.worker_info import WorkerInfo

_log = logging.getLogger(__name__)


class WorkerDescriptor:
    """`role` is what routers take this worker for. The worker itself does whatever job it is given. `metrics_address`:
    host:port of its /metrics, empty where it has none."""

    def __init__(self, identity: WorkerInfo, trust: PeerAuth, redis: RedisHealth) -> None:
        self.identity = identity
        self.role = identity.pool
        self.metrics_address = ""
        self._trust = trust
        self._redis = redis

    def __repr__(self) -> str:
        return f"<introduction of {self.identity.me} as {self.role}>"

    def take_role(self, role: str) -> None:
        """The registry has said it."""
        if role != self.role:
            _log.info("%s is taken for %s from now on (its pool is %s)", self.identity.me, role, self.identity.pool)
            self.role = role

    def describe(self, *, with_bundle: bool, metadata: Any) -> worker_pb2.DescribeReply:
        """Everything but load and books, for the caller with this metadata."""
        reply = self.identity.describe(with_bundle=with_bundle)
        reply.role = self.role
        reply.metrics_address = self.metrics_address
        reply.wall_ns = wall_ns()
        reply.redis_problem = self._redis.problem or ""
        reply.num_redis_errors = self._redis.num_errors.total()
        self._trust.sign_reply(metadata, reply)
        return reply
