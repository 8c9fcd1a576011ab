"""Protect the TCP connections between programs of a cluster by the secret and the TLS files that settings name."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from tandem.core.clock import Clock
from tandem.core.config import ClusterConfig
from tandem.transfer.tcp_handshake import ConnectionSecurity
from tandem.wire.secret_file import SecretFile
from tandem.wire.tls import TlsFiles


def connection_security(config: ClusterConfig, clock: Clock) -> ConnectionSecurity:
    """Return the protection of those TCP connections of a cluster that do not use gRPC, which move KV or connect ranks.
    `config` names the secret file and the TLS files. `clock` gives the times at which the secret file is checked for
    changes. Raises TandemError where a file cannot be used."""
    secret = SecretFile(Path(config.secret_file)) if config.secret_file else None
    tls = TlsFiles.of_cluster(config) if config.has_tls else None
    unprotected = ConnectionSecurity()
    return ConnectionSecurity(
        secrets=unprotected.secrets if secret is None else lambda: secret.current(clock.now()),
        accept=unprotected.accept if tls is None else partial(tls.wrap, is_server=True),
        connect=unprotected.connect if tls is None else partial(tls.wrap, is_server=False),
    )
