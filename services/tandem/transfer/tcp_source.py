"""Serve the blocks of a pool to readers that connect over TCP, each connection on a thread of its own."""

from __future__ import annotations

import logging
import secrets
import socket
import struct
from typing import TYPE_CHECKING

import numpy as np

from tandem.core.errors import TandemError
from tandem.transfer.connection_server import ConnectionServer, Proof, listen
from tandem.transfer.pool_access import PoolAccess, open_access
from tandem.transfer.socket_memory import block_spans, receive_bytes
from tandem.transfer.tcp_handshake import NONCE_BYTES, ConnectionSecurity

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
STALLED_S = 30.0
"""Seconds after which a connection is closed if its reader takes none of the requested bytes, because it is stopped or
on a host that is gone."""
_HEAD = struct.Struct("<BxxxIII")
"""Head of a request: its kind (blocks or self-test), the number of runs, and which bytes of each block are read, as
offset and number. The runs follow, each as a first block and a number of blocks, 4 bytes each. The answer is the
requested bytes, and nothing else: a source ends the connection of a reader that requests what does not exist."""
_BLOCKS, _TEST = 1, 2
_RUN = np.dtype("<u4")
_log = logging.getLogger(__name__)


def request_blocks(runs: npt.NDArray[np.int64], offset: int, num_bytes: int) -> bytes:
    """Encode a request for the `num_bytes` bytes at `offset` of each block in `runs`. `runs`: at most MAX_RUNS runs of
    adjacent blocks, int64 [number of runs, 2], each as the first block and the number of blocks."""
    return _HEAD.pack(_BLOCKS, len(runs), offset, num_bytes) + runs.astype(_RUN).tobytes()


def request_test() -> bytes:
    """Return the request by which a transport tests itself: for the TEST_BYTES test bytes of its own source."""
    return _HEAD.pack(_TEST, 0, 0, TEST_BYTES)


def requested_spans(region: KVRegion, runs: npt.NDArray[np.uint32], offset: int, num_bytes: int) -> Spans:
    """Return the memory spans of `region` that hold what a reader requests. `runs`: flat array with a first block and a
    number of blocks for each run. `offset`, `num_bytes`: which bytes of each block are requested. Raises ValueError
    where `region` lacks one of the blocks or bytes."""
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


class TcpSource:
    """Listen at a free port of `host`, and answer the requests of readers of `pool` until `close`.

    `nonce`: identifies this source to its readers. `test_bytes`: the bytes that a self-test reads. `security`:
    protection of the connections. `driver`: the CUDA driver; None for a pool in host memory. Raises OSError where it
    cannot listen.
    """

    def __init__(
        self, pool: MemoryPool, host: str, security: ConnectionSecurity, driver: CudaDriver | None = None
    ) -> None:
        self.nonce = secrets.token_bytes(NONCE_BYTES)
        self.test_bytes = secrets.token_bytes(TEST_BYTES)
        self._pool = pool
        self._driver = driver
        listener = listen(host)
        self.port: int = listener.getsockname()[1]
        self._server = ConnectionServer(listener, "kv-send", self._serve, Proof(self.nonce, security, STALLED_S))

    def close(self, timeout_s: float) -> None:
        """End all connections, and wait up to `timeout_s` seconds for the end of each thread."""
        self._server.close(timeout_s)

    def _serve(self, connection: socket.socket) -> None:
        try:
            with open_access(self._pool, self._driver) as access:
                self._answer(connection, access)
        except (TandemError, ValueError) as error:
            _log.warning("a connection of a reader of KV was closed: %s", error)

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
