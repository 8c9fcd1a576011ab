"""Refuse to listen on a reachable address without authentication; imports no model."""

from __future__ import annotations

from tandem.core.addresses import is_loopback
from tandem.core.config import Config
from tandem.core.errors import ErrorKind, TandemError
from tandem.wire.peer_auth import PeerAuth


def require_worker_auth(config: Config, worker_name: str = "") -> PeerAuth:
    """Return how the worker authenticates other members of its cluster. Raises TandemError(INVALID_REQUEST), naming the
    remedies, when the address is reachable for others and nothing authenticates them."""
    trust = PeerAuth.of(worker_name, config.cluster)
    if trust.is_open and not config.cluster.insecure and not is_loopback(config.worker.host):
        message = (
            f"worker.host is {config.worker.host}, which others can reach: name a file with a secret that all gateways "
            "and workers share with --secret-file, or TLS files, or allow anyone with --cluster-insecure"
        )
        raise TandemError(ErrorKind.INVALID_REQUEST, message, param="cluster.secret_file")
    return trust
