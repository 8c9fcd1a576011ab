"""Messages both ways between two ranks of one worker, over a Unix socket; never knows what they mean.

The socket lies in a directory that only its user can enter, so whoever is at its other end could do to either rank
whatever it likes anyway: nothing is signed. Ranks of one worker share a machine, as their GPUs' links want it.
Sending needs no other thread and no event loop; it is what each step waits for.
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
MAX_BYTES = 64 << 20
_PREFIX = "tandem-ranks-"
_MAX_SOCKET_PATH = 100
"""Bytes; the kernel allows 107, on some systems 103."""
_LENGTH = struct.Struct(">I")
_TIMEVAL = struct.Struct("@ll")


class RankChannel:
    """One end. Any thread sends, one receives."""

    def __init__(self, connection: socket.socket, send_timeout_s: float) -> None:
        """`send_timeout_s` bounds how long an end that takes nothing is waited for."""
        whole, part = divmod(send_timeout_s, 1)
        timeout = _TIMEVAL.pack(int(whole), int(part * 1e6))
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, timeout)
        self._connection = connection
        self._lock = threading.Lock()

    def send(self, message: bytes) -> None:
        """Raises OSError when the other end is gone, or takes nothing."""
        with self._lock:
            self._connection.sendall(_LENGTH.pack(len(message)) + message)

    def receive(self) -> bytes | None:
        """The next message; None when there will be none. Raises ValueError for one that nobody would send."""
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
        """None when the other end stops before."""
        read = bytearray()
        while len(read) < num_bytes:
            piece = self._connection.recv(num_bytes - len(read))
            if not piece:
                return None
            read += piece
        return bytes(read)

    def close(self) -> None:
        """Both ends receive nothing more. From any thread; never raises."""
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
        self._connection.close()


def private_directory() -> Path:
    """A directory for the ranks of one worker, mode 0700, with a path that is short enough for a socket. Raises
    TandemError."""
    room = _MAX_SOCKET_PATH - len(f"/{_PREFIX}12345678/{SOCKET}")
    for parent in (os.environ.get("XDG_RUNTIME_DIR"), tempfile.gettempdir(), "/tmp"):
        if parent and len(os.fsencode(parent)) <= room and os.access(parent, os.W_OK | os.X_OK):
            return Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent))
    message = "no directory with a short path to put a socket into: set TMPDIR to one"
    raise TandemError(ErrorKind.UNSUPPORTED, message, param="engine.tensor_parallel")


def listen(directory: Path, num_ranks: int) -> socket.socket:
    """Where ranks connect to, in their directory."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(directory / SOCKET))
    listener.listen(num_ranks)
    return listener


def connect(directory: Path, send_timeout_s: float) -> RankChannel:
    """Raises OSError when nobody listens."""
    connection = socket.socket(socket.AF_UNIX)
    try:
        connection.connect(str(directory / SOCKET))
    except OSError:
        connection.close()
        raise
    return RankChannel(connection, send_timeout_s)
