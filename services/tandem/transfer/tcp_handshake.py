"""Let both sides of a TCP connection prove that they know the source's key, without sending it.

The source is the side that accepts the connection, the reader the one that connects. The key is an HMAC of the
cluster's secret over the source's nonce, which is part of the description that readers get. So a reader can connect
only to the incarnation that was described to it, and only as a member of the cluster. Without a secret whoever has read
the description is accepted. The handshake does not protect what follows on the connection; TLS does, where it is
configured.
"""

from __future__ import annotations

import hmac
import secrets
import socket
import ssl
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tandem.transfer.socket_memory import receive_bytes

NONCE_BYTES = 32
_PROTOCOL = b"TANDEM/1"
_CHALLENGE_BYTES, _MAC_BYTES = 16, 32
_READER, _SOURCE = b"tandem kv reader\0", b"tandem kv source\0"


@dataclass(frozen=True, slots=True)
class ConnectionSecurity:
    """Hold the functions that protect the TCP connections between the programs of a cluster; the default values protect
    nothing.

    `secrets`: returns the cluster's secrets. A program proves that it knows the first of them, and accepts a proof for
    any of them. An empty sequence means that there is no secret. `accept`, `connect`: prepare a plain connection for
    TLS, as the side that has accepted it or that has connected, and return the socket to use instead; without TLS they
    return the same socket. `start_tls` then makes the TLS handshake. Any thread may call the three functions.
    """

    secrets: Callable[[], Sequence[bytes]] = lambda: ()
    accept: Callable[[socket.socket], socket.socket] = lambda connection: connection
    connect: Callable[[socket.socket], socket.socket] = lambda connection: connection


def start_tls(connection: socket.socket) -> None:
    """Make the TLS handshake on a connection that is prepared for TLS; do nothing on a plain one. Raises OSError where
    the other side is not a member of the cluster."""
    if isinstance(connection, ssl.SSLSocket):
        connection.do_handshake()


class HandshakeRefused(ConnectionError):
    """Raised when the other side of a connection does not prove that it knows the source's key."""


def greet_reader(connection: socket.socket, nonce: bytes, known: Sequence[bytes]) -> None:
    """Check, as the source, that the reader at the other end of `connection` knows the source's key, and prove to the
    reader that this side knows the same key.

    `nonce`: the source's nonce, from which the key is derived. `known`: the cluster's secrets, any of which the reader
    may use; an empty sequence counts as one empty secret. Raises HandshakeRefused where the reader proves no such key,
    or OSError where the connection ends.
    """
    challenge = secrets.token_bytes(_CHALLENGE_BYTES)
    connection.sendall(_PROTOCOL + challenge)
    answer = bytes(receive_bytes(connection, _CHALLENGE_BYTES + _MAC_BYTES))
    theirs, proof = answer[:_CHALLENGE_BYTES], answer[_CHALLENGE_BYTES:]
    for secret in known or (b"",):
        key = _key(secret, nonce)
        if hmac.compare_digest(proof, _mac(key, _READER, challenge, theirs)):
            connection.sendall(_mac(key, _SOURCE, theirs, challenge))
            return
    raise HandshakeRefused("the reader does not prove that it knows the cluster's secret and this source's nonce")


def greet_source(connection: socket.socket, nonce: bytes, known: Sequence[bytes]) -> None:
    """Prove, as a reader, to the source at the other end of `connection` that this side knows the source's key, and
    check that the source knows it too.

    `nonce`: the source's nonce, from which the key is derived. `known`: the cluster's secrets, of which the first is
    used; an empty sequence counts as one empty secret. Raises HandshakeRefused where the source does not prove the key,
    or OSError where the source ends the connection, because it has another nonce or secret.
    """
    greeting = bytes(receive_bytes(connection, len(_PROTOCOL) + _CHALLENGE_BYTES))
    if not greeting.startswith(_PROTOCOL):
        raise HandshakeRefused("another program, or another version of Tandem, answers at this address")
    theirs = greeting[len(_PROTOCOL) :]
    key = _key(known[0] if known else b"", nonce)
    challenge = secrets.token_bytes(_CHALLENGE_BYTES)
    connection.sendall(challenge + _mac(key, _READER, theirs, challenge))
    if not hmac.compare_digest(receive_bytes(connection, _MAC_BYTES), _mac(key, _SOURCE, challenge, theirs)):
        raise HandshakeRefused("the source does not prove that it knows the cluster's secret")


def _key(secret: bytes, nonce: bytes) -> bytes:
    return hmac.digest(secret, nonce, "sha256")


def _mac(key: bytes, role: bytes, theirs: bytes, ours: bytes) -> bytes:
    return hmac.digest(key, role + theirs + ours, "sha256")
