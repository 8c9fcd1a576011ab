"""Move memory at given addresses over a connected socket: without a copy in Python, and without the interpreter's lock
while the kernel copies."""

from __future__ import annotations

import ctypes
import errno
import os
import socket
import ssl
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import numpy.typing as npt

    Spans = npt.NDArray[np.uint64]
    """Pieces of memory, uint64 [number, 2]: the address and the number of bytes of each."""

_MAX_PIECES = 1024
"""Most pieces of one call, a limit of the kernel (UIO_MAXIOV)."""


class _MessageHeader(ctypes.Structure):
    """`struct msghdr` of Linux on 64-bit machines, see sendmsg(2)."""

    _fields_ = (
        ("name", ctypes.c_void_p),
        ("name_length", ctypes.c_uint32),
        ("pieces", ctypes.c_void_p),
        ("num_pieces", ctypes.c_size_t),
        ("control", ctypes.c_void_p),
        ("control_length", ctypes.c_size_t),
        ("flags", ctypes.c_int),
    )


_Move = Callable[[int, object, int], int]
_libc = ctypes.CDLL(None, use_errno=True)
_sendmsg: _Move = _libc.sendmsg
_recvmsg: _Move = _libc.recvmsg
for _function in (_libc.sendmsg, _libc.recvmsg):
    _function.restype = ctypes.c_ssize_t
    _function.argtypes = (ctypes.c_int, ctypes.c_void_p, ctypes.c_int)


def block_spans(address: int, step: int, blocks: npt.NDArray[np.int64], offset: int, num_bytes: int) -> Spans:
    """Return the memory spans, as uint64 [number, 2] of address and length, that hold `num_bytes` bytes of each block
    in `blocks`, from byte `offset` of the block on. Block `b` begins at `address + b * step`. Whole blocks (`num_bytes`
    equal to `step`) that follow each other in memory are merged into one span."""
    starts = (blocks * step + (address + offset)).astype(np.uint64)
    if num_bytes == step:
        begins = np.flatnonzero(np.concatenate(([True], np.diff(blocks) != 1)))
        sizes = np.diff(np.append(begins, len(blocks))) * num_bytes
        return np.stack((starts[begins], sizes.astype(np.uint64)), axis=1)
    return np.stack((starts, np.full(len(blocks), num_bytes, np.uint64)), axis=1)


def span(address: int, num_bytes: int) -> Spans:
    return np.array([(address, num_bytes)], np.uint64)


def send(connection: socket.socket, spans: Spans) -> None:
    """Send the bytes of the spans in order; return once the kernel has taken all. Raises OSError where the connection
    ends."""
    if isinstance(connection, ssl.SSLSocket):
        for view in _views(spans):
            connection.sendall(view)
    else:
        _move(_sendmsg, connection, spans, socket.MSG_NOSIGNAL)


def receive(connection: socket.socket, spans: Spans) -> None:
    """Receive the bytes of the spans in order. Raises OSError where the connection ends before the last byte. Nothing
    is written to the spans after the call."""
    if isinstance(connection, ssl.SSLSocket):
        for view in _views(spans):
            _receive_into(connection, view)
    else:
        _move(_recvmsg, connection, spans, socket.MSG_WAITALL)


def receive_bytes(connection: socket.socket, num_bytes: int) -> bytearray:
    """Receive exactly `num_bytes` bytes. Raises OSError where the connection ends before the last one."""
    content = bytearray(num_bytes)
    _receive_into(connection, memoryview(content))
    return content


def shut(connection: socket.socket) -> None:
    """End a connection that another thread may be using. Calls in which that thread waits for the connection return at
    once; that thread must close the socket."""
    try:
        # That of SSLSocket would also discard the TLS state under the other thread's feet.
        socket.socket.shutdown(connection, socket.SHUT_RDWR)
    except OSError:
        return


def _receive_into(connection: socket.socket, view: memoryview) -> None:
    while len(view):
        num = connection.recv_into(view)
        if not num:
            raise ConnectionResetError(errno.ECONNRESET, "the other side closed the connection")
        view = view[num:]


def _move(call: _Move, connection: socket.socket, spans: Spans, flags: int) -> None:
    rest = np.array(spans, np.uint64, order="C")
    while len(rest):
        part = rest[:_MAX_PIECES]
        header = _MessageHeader(pieces=part.ctypes.data, num_pieces=len(part))
        moved = call(connection.fileno(), ctypes.addressof(header), flags)
        if moved > 0:
            rest = _behind(rest, len(part), moved)
        elif moved == 0:
            raise ConnectionResetError(errno.ECONNRESET, "the other side closed the connection")
        elif (code := ctypes.get_errno()) != errno.EINTR:
            raise OSError(code, os.strerror(code))


def _behind(spans: Spans, num_pieces: int, num_bytes: int) -> Spans:
    """Return the spans without the first `num_bytes` bytes, which lie in the first `num_pieces` ones."""
    ends = np.cumsum(spans[:num_pieces, 1])
    num_whole = int(np.searchsorted(ends, num_bytes, side="right"))
    begun = num_bytes - (int(ends[num_whole - 1]) if num_whole else 0)
    rest = spans[num_whole:]
    if begun:
        rest[0] += np.array((begun, -begun), np.int64).astype(np.uint64)
    return rest


def _views(spans: Spans) -> list[memoryview]:
    return [memoryview((ctypes.c_char * num).from_address(address)).cast("B") for address, num in spans.tolist()]
