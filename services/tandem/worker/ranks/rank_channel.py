"""Exchange messages between two ranks of one worker over a connected socket.

A message is sent on the calling thread, without another thread or an event loop, because every step waits for it.
Messages are not signed, because only accepted processes have a connection (`worker.ranks.rank_listener`).
"""

from __future__ import annotations

import contextlib
import select
import socket
import ssl
import struct
import threading

from tandem.transfer.socket_memory import shut

MAX_BYTES = 64 << 20
"""Largest accepted message, in bytes."""
_LENGTH = struct.Struct(">I")
_TIMEVAL = struct.Struct("@ll")


class RankChannel:
    """Exchange messages of bytes with another rank of the same worker over a connected socket. Any thread may send; one
    thread receives."""

    def __init__(self, connection: socket.socket, send_timeout_s: float) -> None:
        """Take over `connection`, which `close` closes. `send_timeout_s`: seconds that a send waits for a peer that
        does not read."""
        whole, part = divmod(send_timeout_s, 1)
        timeout = _TIMEVAL.pack(int(whole), int(part * 1e6))
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, timeout)
        self._connection = connection
        self._stream: _TlsStream | socket.socket = connection
        if isinstance(connection, ssl.SSLSocket):
            self._stream = _TlsStream(connection, send_timeout_s)
        self._lock = threading.Lock()

    def send(self, message: bytes) -> None:
        """Send one message, and block until the kernel has taken it. Raises OSError when the other rank has ended, or
        does not read within the timeout."""
        with self._lock:
            self._stream.sendall(_LENGTH.pack(len(message)) + message)

    def receive(self) -> bytes | None:
        """Wait for the next message and return it; None when the connection has ended. Raises ValueError for a message
        longer than MAX_BYTES."""
        try:
            head = self._exactly(_LENGTH.size)
            if head is None:
                return None
            (length,) = _LENGTH.unpack(head)
            if length > MAX_BYTES:
                raise ValueError(f"a message of {length} bytes")
            return self._exactly(length)
        except OSError:
            return None

    def _exactly(self, num_bytes: int) -> bytes | None:
        """Read `num_bytes` bytes; None when the connection ends before."""
        read = bytearray()
        while len(read) < num_bytes:
            piece = self._stream.recv(num_bytes - len(read))
            if not piece:
                return None
            read += piece
        return bytes(read)

    def close(self) -> None:
        """Close the connection for both ends, so that `receive` returns None on either side. May be called from any
        thread; does not raise."""
        shut(self._connection)
        with contextlib.suppress(OSError):
            self._stream.close()


class _TlsStream:
    """Let one thread receive from a TLS connection while another one sends. OpenSSL itself allows one call at a
    time."""

    def __init__(self, connection: ssl.SSLSocket, send_timeout_s: float) -> None:
        connection.setblocking(False)
        self._connection = connection
        self._number = connection.fileno()
        self._send_timeout_ms = int(send_timeout_s * 1000)
        self._lock = threading.Lock()

    def recv(self, num_bytes: int) -> bytes:
        while True:
            with self._lock:
                try:
                    return self._connection.recv(num_bytes)
                except ssl.SSLWantReadError:
                    event = select.POLLIN
                except ssl.SSLWantWriteError:
                    event = select.POLLOUT
            self._wait(event, None)

    def sendall(self, content: bytes) -> None:
        rest = memoryview(content)
        while rest:
            with self._lock:
                try:
                    rest = rest[self._connection.send(rest) :]
                    continue
                except ssl.SSLWantWriteError:
                    event = select.POLLOUT
                except ssl.SSLWantReadError:
                    event = select.POLLIN
            if not self._wait(event, self._send_timeout_ms):
                raise BlockingIOError("the other side does not read")

    def close(self) -> None:
        with self._lock:
            self._connection.close()

    def _wait(self, event: int, timeout_ms: int | None) -> bool:
        """Wait until the connection is ready for `event` (a mask of poll(2)) or has ended. Returns False when neither
        happened within `timeout_ms` milliseconds (None: no limit)."""
        poll = select.poll()
        poll.register(self._number, event)
        return bool(poll.poll(timeout_ms))
