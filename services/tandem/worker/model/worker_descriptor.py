"""Answer `Describe` with the worker's identity, its current role, and a signature."""

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
    """Own the worker's answer to `Describe`.

    `role` is the label by which routers choose the worker's jobs; the worker itself runs any job. `metrics_address` is
    the host:port of its /metrics, empty where there is none.
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
        """Adopt the role that the registry has for this worker."""
        if role != self.role:
            _log.info("worker %s: role %s (pool %s)", self.identity.me, role, self.identity.pool)
            self.role = role

    def describe(self, *, with_bundle: bool, metadata: Any) -> worker_pb2.DescribeReply:
        """Return everything but load and engine statistics, signed for the caller with this metadata."""
        reply = self.identity.describe(with_bundle=with_bundle)
        reply.role = self.role
        reply.metrics_address = self.metrics_address
        reply.wall_ns = wall_ns()
        reply.redis_problem = self._redis.problem or ""
        reply.num_redis_errors = self._redis.num_errors.total()
        self._trust.sign_reply(metadata, reply)
        return reply
