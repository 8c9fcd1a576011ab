"""Exchange messages between two ranks of one worker over a Unix socket.

The socket is in a directory that only its user can enter, so messages are not signed: a process that can connect could
control either rank anyway. Ranks of one worker share a machine, because their GPUs' links require it. Sending needs no
other thread and no event loop, since every step waits for it.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import tempfile
import threading
from pathlib import Path

from tandem.core.errors import ErrorKind, TandemError

SOCKET = "leader.sock"
"""File name of the socket."""
MAX_BYTES = 64 << 20
"""Largest accepted message, in bytes."""
_PREFIX = "tandem-ranks-"
_MAX_SOCKET_PATH = 100
"""Longest socket path, in bytes; the kernel allows 107, some systems 103."""
_LENGTH = struct.Struct(">I")
_TIMEVAL = struct.Struct("@ll")


class RankChannel:
    """Exchange messages of bytes with another rank of the same worker over a connected socket. Any thread may send; one
    thread receives."""

    def __init__(self, connection: socket.socket, send_timeout_s: float) -> None:
        """Own `connection`. `send_timeout_s`: seconds that a send waits for a peer that does not read."""
        whole, part = divmod(send_timeout_s, 1)
        timeout = _TIMEVAL.pack(int(whole), int(part * 1e6))
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, timeout)
        self._connection = connection
        self._lock = threading.Lock()

    def send(self, message: bytes) -> None:
        """Send one message, and block until the kernel has taken it. Raises OSError when the other rank has ended, or
        does not read within the timeout."""
        with self._lock:
            self._connection.sendall(_LENGTH.pack(len(message)) + message)

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
            piece = self._connection.recv(num_bytes - len(read))
            if not piece:
                return None
            read += piece
        return bytes(read)

    def close(self) -> None:
        """Close the connection for both ends, so that `receive` returns None on either side. May be called from any
        thread; does not raise."""
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
        self._connection.close()


def private_directory() -> Path:
    """Create a directory for the socket of one worker's ranks, with mode 0700 and a path short enough for a socket, and
    return it. Raises TandemError when no parent directory with a short path can be written."""
    room = _MAX_SOCKET_PATH - len(f"/{_PREFIX}12345678/{SOCKET}")
    for parent in (os.environ.get("XDG_RUNTIME_DIR"), tempfile.gettempdir(), "/tmp"):
        if parent and len(os.fsencode(parent)) <= room and os.access(parent, os.W_OK | os.X_OK):
            return Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent))
    message = "engine.tensor_parallel needs a writable directory with a short path for a socket: set TMPDIR to one"
    raise TandemError(ErrorKind.UNSUPPORTED, message, param="engine.tensor_parallel")


def listen(directory: Path, num_ranks: int) -> socket.socket:
    """Bind the Unix socket in `directory`, to which up to `num_ranks` ranks connect, and return it listening; does not
    wait for a connection. Raises OSError when the socket exists."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(directory / SOCKET))
    listener.listen(num_ranks)
    return listener


def connect(directory: Path, send_timeout_s: float) -> RankChannel:
    """Connect to the first rank, whose socket is in `directory`, and return the channel. Raises OSError when nothing
    listens there. `send_timeout_s`: as in `RankChannel`."""
    connection = socket.socket(socket.AF_UNIX)
    try:
        connection.connect(str(directory / SOCKET))
    except OSError:
        connection.close()
        raise
    return RankChannel(connection, send_timeout_s)
