"""Let the other ranks of a worker connect to its first rank: over a Unix socket on one machine, else over TCP.

The Unix socket is in a directory that only its user can enter. It needs no authentication, since any process of that
user could control the ranks anyway. Over TCP both sides prove that they know the cluster's secret, with TLS where the
cluster has certificates.
"""

from __future__ import annotations

import os
import shutil
import socket
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path

from tandem.core.addresses import format_host
from tandem.core.clock import SystemClock
from tandem.core.config import Config
from tandem.core.errors import ErrorKind, TandemError
from tandem.transfer.connection_server import HANDSHAKE_S, SILENT_S, ConnectionServer, Proof, listen, tune
from tandem.transfer.tcp_handshake import greet_source, start_tls
from tandem.worker.addresses import own_host, require_worker_auth
from tandem.worker.connection_security import connection_security

MEET_S = 600.0
"""Seconds in which the ranks of several machines must find each other: machines and their supervisors start at
different times."""
RETRY_S = 0.5
"""Seconds between two attempts to connect to the first rank."""
CONNECT_S = 3.0
_BACKLOG = 64
_END_S = 2.0
_SOCKET = "leader.sock"
_PREFIX = "tandem-ranks-"
_MAX_SOCKET_PATH = 100
"""Longest socket path, in bytes; the kernel allows 107, some systems 103."""
_NONCE = b"tandem ranks of one worker"
"""Nonce from which the keys of connections between ranks are derived. Connections that move KV never have the same
keys: their nonces are random and of another length."""

Serve = Callable[[socket.socket], None]


class RankListener:
    """Own the server to which the ranks of a worker connect. `address`: where it listens, the path of a Unix socket or
    host:port."""

    def __init__(self, address: str, server: ConnectionServer) -> None:
        self.address = address
        self._server = server

    def stop_accepting(self) -> None:
        """Accept no further rank; connected ranks stay connected."""
        self._server.stop_accepting()

    def close(self) -> None:
        """End all connections, and remove the Unix socket with its directory. Processes that have not connected yet
        cannot connect any more after that, and end."""
        self._server.close(_END_S)
        remove_socket(self.address)


Listen = Callable[[Serve], RankListener]
"""Signature of a function that opens a listener for ranks: `listen(serve)` returns the listener, which calls `serve`
with each connection on a thread of its own."""


def listen_on_socket(serve: Serve) -> RankListener:
    """Listen on a Unix socket for ranks of this machine, and return the listener. `serve`: called with each connection
    on a thread of its own. Raises TandemError when no directory for the socket can be written."""
    path = private_directory() / _SOCKET
    listener = socket.socket(socket.AF_UNIX)
    try:
        listener.bind(str(path))
        listener.listen(_BACKLOG)
    except OSError:
        listener.close()
        remove_socket(str(path))
        raise
    return RankListener(str(path), ConnectionServer(listener, "ranks", serve))


def listen_on_network(config: Config, serve: Serve) -> RankListener:
    """Listen on TCP for ranks of several machines, at engine.master_port of worker.host, and return the listener.
    `serve`: called with each connection on a thread of its own. Raises TandemError where the port cannot be used, or
    where strangers could connect because there is neither a secret nor TLS."""
    require_worker_auth(config)
    host, port = config.worker.host, config.engine.master_port
    security = connection_security(config.cluster, SystemClock())
    own = own_host(config.worker)
    try:
        listener = listen(host, port)
    except OSError as error:
        message = (
            f"cannot listen for ranks on {format_host(host)}:{port}: {error}; set engine.master_port to a free port"
        )
        raise TandemError(ErrorKind.INVALID_REQUEST, message, param="engine.master_port") from None
    address = f"{format_host(own)}:{listener.getsockname()[1]}"
    return RankListener(address, ConnectionServer(listener, "ranks", serve, Proof(_NONCE, security, SILENT_S)))


def connect(address: str, config: Config, has_parent_ended: threading.Event) -> socket.socket:
    """Connect to the first rank at `address`, where its listener is, and return the connection. Over TCP, both sides
    have authenticated each other before the return.

    Over TCP, connecting is tried again until the first rank listens, but not longer than MEET_S seconds and not after
    `has_parent_ended` was set. Raises TandemError where the first rank cannot be reached, or the two do not know the
    same secret.
    """
    if address.startswith("/"):
        connection = socket.socket(socket.AF_UNIX)
        try:
            connection.connect(address)
        except OSError as error:
            connection.close()
            raise _unreachable(address, error) from None
        return connection
    security = connection_security(config.cluster, SystemClock())
    connection = _connect_over_tcp(address, has_parent_ended)
    try:
        tune(connection, SILENT_S)
        connection = security.connect(connection)
        connection.settimeout(HANDSHAKE_S)
        start_tls(connection)
        greet_source(connection, _NONCE, security.secrets())
        connection.settimeout(None)
    except OSError as error:
        connection.close()
        message = (
            f"the first rank at {address} and this one do not authenticate each other: {error}; compare "
            "cluster.secret_file and the cluster's TLS files of both machines"
        )
        raise TandemError(ErrorKind.UNAUTHENTICATED, message, param="cluster.secret_file") from None
    return connection


def _connect_over_tcp(address: str, has_parent_ended: threading.Event) -> socket.socket:
    host, _, port = address.rpartition(":")
    clock = SystemClock()
    deadline = clock.now() + MEET_S
    while True:
        try:
            return socket.create_connection((host.strip("[]"), int(port)), CONNECT_S)
        except OSError as error:
            if has_parent_ended.wait(RETRY_S) or clock.now() >= deadline:
                raise _unreachable(address, error) from None


def remove_socket(address: str) -> None:
    """Remove the Unix socket at the path `address` with its directory; do nothing where `address` is host:port. Does
    not raise."""
    if address.startswith("/"):
        shutil.rmtree(Path(address).parent, ignore_errors=True)


def private_directory() -> Path:
    """Create a directory for the socket of one worker's ranks, with mode 0700 and a path short enough for a socket, and
    return it. Raises TandemError when no parent directory with a short path can be written."""
    room = _MAX_SOCKET_PATH - len(f"/{_PREFIX}12345678/{_SOCKET}")
    for parent in (os.environ.get("XDG_RUNTIME_DIR"), tempfile.gettempdir(), "/tmp"):
        if parent and len(os.fsencode(parent)) <= room and os.access(parent, os.W_OK | os.X_OK):
            return Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent))
    message = "engine.tensor_parallel needs a writable directory with a short path for a socket: set TMPDIR to one"
    raise TandemError(ErrorKind.UNSUPPORTED, message, param="engine.tensor_parallel")


def _unreachable(address: str, error: OSError) -> TandemError:
    message = f"the first rank cannot be reached at {address}: {error}"
    return TandemError(ErrorKind.WORKER_LOST, message, param="engine.master_addr")
