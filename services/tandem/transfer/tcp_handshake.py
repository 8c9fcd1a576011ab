"""Let both sides of a TCP connection prove that they know the source's key, without sending it.

The key is an HMAC of the cluster's secret over a nonce of the source's transport, which is part of its description: so
a reader can only connect to that incarnation, and only as a member of the cluster. Without a secret whoever has read
the description is accepted. What follows on the connection is protected by TLS alone, where that is configured.
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


def _no_secrets() -> Sequence[bytes]:
    return ()


def _in_the_clear(connection: socket.socket) -> socket.socket:
    return connection


@dataclass(frozen=True, slots=True)
class ConnectionSecurity:
    """How the TCP connections between the transports of a cluster are protected; by default not at all.

    `secrets`: returns the cluster's secrets, of which the first one proves and each is accepted; none: no secret.
    `accept`, `connect`: return the connection of a source or of a reader, prepared for TLS or as it is; `start_tls`
    then begins. Any thread may call them.
    """

    secrets: Callable[[], Sequence[bytes]] = _no_secrets
    accept: Callable[[socket.socket], socket.socket] = _in_the_clear
    connect: Callable[[socket.socket], socket.socket] = _in_the_clear


def start_tls(connection: socket.socket) -> None:
    """Begin TLS on a connection that is prepared for it. Raises OSError where the other side is not of the cluster."""
    if isinstance(connection, ssl.SSLSocket):
        connection.do_handshake()


class HandshakeRefused(ConnectionError):
    """Raised when the other side of a connection does not prove that it knows the key."""


def greet_reader(connection: socket.socket, nonce: bytes, known: Sequence[bytes]) -> None:
    """Check that the reader at the other end knows a key of the source with this nonce, and prove that this side does.

    `known`: the cluster's secrets. Raises HandshakeRefused, or OSError where the connection ends.
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
    """Prove to the source with this nonce that this reader knows its key, and check that the source does.

    `known`: the cluster's secrets. Raises HandshakeRefused, or OSError where the source ends the connection, because it
    has another nonce or secret.
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
