"""Accept connections, each on a thread of its own, and serve those whose other side proves that it belongs to the
cluster.

The number of connections is limited, and the number of those without that proof more tightly, so that strangers cannot
keep members of the cluster out.
"""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from tandem.core.addresses import is_wildcard
from tandem.transfer.socket_memory import shut
from tandem.transfer.tcp_handshake import ConnectionSecurity, greet_reader, start_tls

MAX_CONNECTIONS, MAX_UNPROVEN = 1024, 256
"""Most open connections, and most of them that have not proven yet that they belong to the cluster. A connection beyond
the first limit is closed at once; one beyond the second takes the place of the oldest unproven one."""
HANDSHAKE_S = 3.0
"""Longest wait, in seconds, for the next bytes of a new connection's TLS and handshake."""
SILENT_S = 11.0
"""Seconds without any answer from a program's host after which the program counts as gone."""
BACKLOG = 256
_RETRY_S = 0.1
_KEEPALIVE = ((socket.TCP_KEEPIDLE, 5), (socket.TCP_KEEPINTVL, 2), (socket.TCP_KEEPCNT, 3))
_log = logging.getLogger(__name__)


def tune(connection: socket.socket, silent_s: float) -> None:
    """Make a TCP connection send without delay, and make it end once the other side has acknowledged nothing, or
    accepted no bytes, for `silent_s` seconds. TCP itself enforces this limit, so it also holds for connections with
    TLS."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in _KEEPALIVE:
        connection.setsockopt(socket.IPPROTO_TCP, option, value)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(silent_s * 1000))


def listen(host: str, port: int = 0) -> socket.socket:
    """Open a TCP listener at `port` of `host` and return its socket; port 0 takes any free port. A listener on a
    wildcard host accepts both IPv4 and IPv6, as gRPC does. Raises OSError where it cannot listen."""
    if is_wildcard(host) and socket.has_dualstack_ipv6():
        return socket.create_server(("::", port), family=socket.AF_INET6, backlog=BACKLOG, dualstack_ipv6=True)
    family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    return socket.create_server(address[:2], family=family, backlog=BACKLOG)


@dataclass(frozen=True, slots=True)
class Proof:
    """Hold what the other side of an accepted TCP connection must prove: that it knows the key for `nonce`
    (`tcp_handshake`).

    `security`: has the cluster's secrets, and TLS where that is configured. `silent_s`: seconds without an answer after
    which the connection ends, as in `tune`.
    """

    nonce: bytes
    security: ConnectionSecurity
    silent_s: float


@dataclass(slots=True)
class _Connection:
    """A connection. `socket`: the socket to use now, which TLS replaces by another one. `is_proven`: the other side has
    proven that it belongs to the cluster. `is_ended`: the connection was ended to make room for another one."""

    socket: socket.socket
    is_proven: bool = False
    is_ended: bool = False


class ConnectionServer:
    """Accept connections of `listener`, and call `serve` with each of them on a thread of its own, until `close`.

    The connection is closed when `serve` returns; `serve` may raise OSError. `proof`: what the other side must prove
    before `serve` is called; None where only processes of this user can connect. `name`: purpose of the connections, a
    part of the threads' names.
    """

    def __init__(
        self, listener: socket.socket, name: str, serve: Callable[[socket.socket], None], proof: Proof | None = None
    ) -> None:
        self._listener = listener
        self._name = name
        self._serve = serve
        self._proof = proof
        self._lock = threading.Lock()
        self._is_closed = threading.Event()
        self._connections: dict[threading.Thread, _Connection] = {}
        self._acceptor = threading.Thread(target=self._accept, name=f"tandem-{name}-accept", daemon=True)
        self._acceptor.start()

    def stop_accepting(self) -> None:
        """Accept no further connection, and end those whose other side has not proven itself yet. The other connections
        are still served."""
        with self._lock:
            self._is_closed.set()
            for connection in self._connections.values():
                if not connection.is_proven:
                    shut(connection.socket)
        shut(self._listener)
        self._acceptor.join(_RETRY_S)

    def close(self, timeout_s: float) -> None:
        """End all connections, and wait up to `timeout_s` seconds for the end of each thread."""
        with self._lock:
            self._is_closed.set()
            for connection in self._connections.values():
                shut(connection.socket)
            threads = [self._acceptor, *self._connections]
        shut(self._listener)
        for thread in threads:
            thread.join(timeout_s)

    def _accept(self) -> None:
        with self._listener:
            while not self._is_closed.is_set():
                try:
                    connection, _ = self._listener.accept()
                except OSError as error:
                    # For example while there is no file descriptor left.
                    if not self._is_closed.wait(_RETRY_S):
                        _log.warning("cannot accept a connection for %s: %s", self._name, error)
                    continue
                if not self._begin(connection):
                    connection.close()

    def _begin(self, accepted: socket.socket) -> bool:
        """Start a thread that serves a connection, and return whether it was started; it is not when too many
        connections are open. When too many of them are unproven, the oldest one of these is ended."""
        with self._lock:
            waiting = [each for each in self._connections.values() if not each.is_proven and not each.is_ended]
            if len(waiting) >= MAX_UNPROVEN:
                waiting[0].is_ended = True
                shut(waiting[0].socket)
            if self._is_closed.is_set() or len(self._connections) >= MAX_CONNECTIONS:
                return False
            connection = _Connection(accepted, is_proven=self._proof is None)
            thread = threading.Thread(target=self._run, args=(connection,), name=f"tandem-{self._name}", daemon=True)
            self._connections[thread] = connection
            try:
                thread.start()
            except RuntimeError as error:  # for example where the pod may have no more processes
                del self._connections[thread]
                _log.warning("a connection for %s was closed: %s", self._name, error)
                return False
            return True

    def _run(self, connection: _Connection) -> None:
        try:
            if self._proof is not None:
                self._prove(connection, self._proof)
            self._serve(connection.socket)
        except OSError as error:  # the other side has ended the connection, has died, or is not of the cluster
            level = logging.DEBUG if connection.is_proven else logging.INFO
            _log.log(level, "a connection for %s has ended: %s", self._name, error)
        finally:
            with self._lock:
                del self._connections[threading.current_thread()]
            with suppress(OSError):
                connection.socket.close()

    def _prove(self, connection: _Connection, proof: Proof) -> None:
        """Check that the other side is of the cluster. Raises OSError where it is not."""
        tune(connection.socket, proof.silent_s)
        connection.socket.settimeout(HANDSHAKE_S)
        with self._lock:
            connection.socket = proof.security.accept(connection.socket)
            if self._is_closed.is_set() or connection.is_ended:
                shut(connection.socket)
        start_tls(connection.socket)
        greet_reader(connection.socket, proof.nonce, proof.security.secrets())
        connection.socket.settimeout(None)
        with self._lock:
            if self._is_closed.is_set():
                raise ConnectionAbortedError("no further connection is accepted")
            connection.is_proven = True
