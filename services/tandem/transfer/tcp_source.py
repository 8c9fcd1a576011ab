"""Serve the blocks of a pool to readers that connect over TCP, each connection on a thread of its own."""

from __future__ import annotations

import logging
import secrets
import socket
import struct
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from tandem.core.addresses import is_wildcard
from tandem.core.errors import TandemError
from tandem.transfer.pool_access import PoolAccess, open_access
from tandem.transfer.socket_memory import block_spans, receive_bytes, shut
from tandem.transfer.tcp_handshake import NONCE_BYTES, ConnectionSecurity, greet_reader, start_tls

if TYPE_CHECKING:
    import numpy.typing as npt

    from tandem.kv.layout import KVRegion
    from tandem.transfer.cuda_driver import CudaDriver
    from tandem.transfer.memory_pool import MemoryPool
    from tandem.transfer.socket_memory import Spans

MAX_RUNS = 1024
"""Most runs of adjacent blocks that one request names."""
TEST_BYTES = 4096
"""Bytes that a self-test reads."""
MAX_CONNECTIONS, MAX_UNPROVEN = 1024, 256
"""Most open connections, and most of these that have not proven yet that they belong to the cluster. A further one is
closed at once, or takes the place of the oldest unproven one."""
HANDSHAKE_S = 3.0
"""Longest wait for the next bytes of a connection's TLS and handshake."""
STALLED_S = 30.0
"""A connection is closed when its reader, stopped or on a host that is gone, takes none of the requested bytes for
this long."""
SILENT_S = 11.0
"""A source whose host answers nothing for this long is gone."""
_RETRY_S = 0.1
_BACKLOG = 256
_KEEPALIVE = ((socket.TCP_KEEPIDLE, 5), (socket.TCP_KEEPINTVL, 2), (socket.TCP_KEEPCNT, 3))
_HEAD = struct.Struct("<BxxxIII")
"""A request: what is read, the number of runs, then offset and number of the bytes of each block. Behind it come the
runs, each a first block and a number of blocks, 4 bytes each. The answer is the requested bytes, and nothing else: a
source ends the connection of a reader that requests what does not exist."""
_BLOCKS, _TEST = 1, 2
_RUN = np.dtype("<u4")
_log = logging.getLogger(__name__)


def request_blocks(runs: npt.NDArray[np.int64], offset: int, num_bytes: int) -> bytes:
    """Return the request for `num_bytes` bytes at `offset` of each block of at most MAX_RUNS runs, int64 [number, 2]:
    the first block and the number of blocks."""
    return _HEAD.pack(_BLOCKS, len(runs), offset, num_bytes) + runs.astype(_RUN).tobytes()


def request_test() -> bytes:
    """Return the request for the TEST_BYTES bytes by which a transport tests itself."""
    return _HEAD.pack(_TEST, 0, 0, TEST_BYTES)


def tune(connection: socket.socket, silent_s: float) -> None:
    """Make a connection send without delay, and end once the other side has acknowledged or taken nothing for
    `silent_s` seconds; a limit of TCP itself, so that TLS makes no difference."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in _KEEPALIVE:
        connection.setsockopt(socket.IPPROTO_TCP, option, value)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(silent_s * 1000))


@dataclass(slots=True)
class _Connection:
    """A connection of a reader. `socket`: the present one, which TLS replaces. `is_proven`: the reader is known to be
    of the cluster. `is_ended`: it made room for another one."""

    socket: socket.socket
    is_proven: bool = False
    is_ended: bool = False


def requested_spans(region: KVRegion, runs: npt.NDArray[np.uint32], offset: int, num_bytes: int) -> Spans:
    """Return the memory of `region` that a request names. `runs`: a first block and a number of blocks, in turn. Raises
    ValueError where the region lacks a block or a byte of them."""
    starts, numbers = runs.reshape(-1, 2).astype(np.int64).T
    stops = starts + numbers
    if numbers.min() < 1 or stops.max() > region.num_all_blocks or numbers.sum() > region.num_all_blocks:
        raise ValueError(f"a reader requests blocks that do not exist, or some of them twice, in {region}")
    if not 0 < num_bytes <= region.block_bytes - offset:
        raise ValueError(f"a reader requests {num_bytes} bytes from {offset} on of each block of {region}")
    if num_bytes == region.block_bytes:
        spans = np.stack((starts * num_bytes + region.address, numbers * num_bytes), axis=1)
        return spans.astype(np.uint64)
    blocks = np.repeat(starts - np.cumsum(numbers) + numbers, numbers) + np.arange(numbers.sum())
    return block_spans(region.address, region.block_bytes, blocks, offset, num_bytes)


def _listen(host: str) -> socket.socket:
    """Return a listener at a free port of `host`: of both address families where that is a wildcard, as gRPC does."""
    if is_wildcard(host) and socket.has_dualstack_ipv6():
        return socket.create_server(("::", 0), family=socket.AF_INET6, backlog=_BACKLOG, dualstack_ipv6=True)
    family, _, _, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
    return socket.create_server(address[:2], family=family, backlog=_BACKLOG)


class TcpSource:
    """Listen at a free port of `host`, and answer the requests of readers of `pool` until `close`.

    `nonce`: identifies this source to its readers. `test_bytes`: what self-tests read. Raises OSError where it cannot
    listen.
    """

    def __init__(
        self, pool: MemoryPool, host: str, security: ConnectionSecurity, driver: CudaDriver | None = None
    ) -> None:
        self.nonce = secrets.token_bytes(NONCE_BYTES)
        self.test_bytes = secrets.token_bytes(TEST_BYTES)
        self._pool = pool
        self._driver = driver
        self._security = security
        self._lock = threading.Lock()
        self._has_closed = threading.Event()
        self._connections: dict[threading.Thread, _Connection] = {}
        self._listener = _listen(host)
        self.port: int = self._listener.getsockname()[1]
        self._acceptor = threading.Thread(target=self._accept, name="tandem-kv-accept", daemon=True)
        self._acceptor.start()

    def close(self, timeout_s: float) -> bool:
        """End all connections, and return whether all threads have ended within `timeout_s` seconds each."""
        with self._lock:
            self._has_closed.set()
            for connection in self._connections.values():
                shut(connection.socket)
            threads = [self._acceptor, *self._connections]
        shut(self._listener)
        for thread in threads:
            thread.join(timeout_s)
        return not any(thread.is_alive() for thread in threads)

    def _accept(self) -> None:
        with self._listener:
            while not self._has_closed.is_set():
                try:
                    connection, _ = self._listener.accept()
                except OSError as error:
                    # For example while there is no file descriptor left.
                    if not self._has_closed.wait(_RETRY_S):
                        _log.warning("cannot accept a connection of a reader of KV: %s", error)
                    continue
                if not self._begin(connection):
                    connection.close()

    def _begin(self, accepted: socket.socket) -> bool:
        """Begin to serve a connection. Returns False where there are too many. Of too many that have not proven
        themselves the oldest one is ended."""
        with self._lock:
            waiting = [each for each in self._connections.values() if not each.is_proven and not each.is_ended]
            if len(waiting) >= MAX_UNPROVEN:
                waiting[0].is_ended = True
                shut(waiting[0].socket)
            if self._has_closed.is_set() or len(self._connections) >= MAX_CONNECTIONS:
                return False
            connection = _Connection(accepted)
            thread = threading.Thread(target=self._serve, args=(connection,), name="tandem-kv-send", daemon=True)
            self._connections[thread] = connection
            try:
                thread.start()
            except RuntimeError as error:  # for example where the pod may have no more processes
                del self._connections[thread]
                _log.warning("a connection of a reader of KV was closed: %s", error)
                return False
            return True

    def _serve(self, connection: _Connection) -> None:
        try:
            self._prove(connection)
            with open_access(self._pool, self._driver) as access:
                self._answer(connection.socket, access)
        except OSError as error:  # the reader has ended the connection, has died, or is not of the cluster
            level = logging.DEBUG if connection.is_proven else logging.INFO
            _log.log(level, "a connection of a reader of KV has ended: %s", error)
        except (TandemError, ValueError) as error:
            _log.warning("a connection of a reader of KV was closed: %s", error)
        finally:
            with self._lock:
                del self._connections[threading.current_thread()]
            connection.socket.close()

    def _prove(self, connection: _Connection) -> None:
        """Check that the reader is of the cluster. Raises OSError where it is not."""
        tune(connection.socket, STALLED_S)
        connection.socket.settimeout(HANDSHAKE_S)
        with self._lock:
            connection.socket = self._security.accept(connection.socket)
            if self._has_closed.is_set() or connection.is_ended:
                shut(connection.socket)
        start_tls(connection.socket)
        greet_reader(connection.socket, self.nonce, self._security.secrets())
        connection.socket.settimeout(None)
        connection.is_proven = True

    def _answer(self, connection: socket.socket, access: PoolAccess) -> None:
        """Answer requests until the reader ends the connection. Raises ValueError for a request that no reader
        sends."""
        while True:
            kind, num_runs, offset, num_bytes = _HEAD.unpack(receive_bytes(connection, _HEAD.size))
            if kind == _TEST and num_runs == 0:
                connection.sendall(self.test_bytes)
            elif kind == _BLOCKS and 0 < num_runs <= MAX_RUNS:
                runs = np.frombuffer(receive_bytes(connection, num_runs * 2 * _RUN.itemsize), _RUN)
                access.send(connection, requested_spans(self._pool.region, runs, offset, num_bytes))
            else:
                raise ValueError(f"a request of kind {kind} with {num_runs} runs")
