"""Refuses to listen where strangers are and nothing keeps them out; never listens itself, and imports no model."""

from __future__ import annotations

from tandem.core.addresses import is_loopback
from tandem.core.config import Config
from tandem.core.errors import ErrorKind, TandemError
from tandem.wire.peer_auth import PeerAuth


def require_worker_auth(config: Config, who: str = "") -> PeerAuth:
    """How a worker tells members of its cluster from strangers. Raises TandemError(INVALID_REQUEST), which says what to
    do instead."""
    trust = PeerAuth.of(who, config.cluster)
    if trust.is_open and not config.cluster.insecure and not is_loopback(config.worker.host):
        message = (
            f"worker.host is {config.worker.host}, which others can reach: name a file with a secret that all gateways "
            "and workers share with --secret-file, or TLS files, or let everybody in with --cluster-insecure"
        )
        raise TandemError(ErrorKind.INVALID_REQUEST, message, param="cluster.secret_file")
    return trust
