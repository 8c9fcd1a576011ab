"""Send a pool's blocks over a socket and receive into them: directly where they are in host memory, through pinned host
memory where they are on a GPU."""

from __future__ import annotations

import socket
from types import TracebackType
from typing import TYPE_CHECKING, Protocol

from tandem.transfer.cuda_driver import CudaDriver
from tandem.transfer.memory_pool import MemoryPool, cuda_number
from tandem.transfer.socket_memory import receive, send, span

if TYPE_CHECKING:
    from tandem.transfer.socket_memory import Spans

STAGE_BYTES = 1 << 20
"""Bytes of each of the two halves of a connection's pinned memory. A hundred readers with two connections each use 400
MiB of it."""


class PoolAccess(Protocol):
    """Send and receive blocks of a pool over sockets. One thread uses an access, inside a `with` block, which allocates
    and frees what the access needs."""

    def __enter__(self) -> PoolAccess: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    def send(self, connection: socket.socket, spans: Spans) -> None:
        """Send the bytes of `spans`, which lie in the pool. Raises OSError where the connection ends."""
        ...

    def receive(self, connection: socket.socket, spans: Spans) -> None:
        """Receive the bytes of `spans`, which lie in the pool; return once they are in its memory. Raises OSError where
        the connection ends; nothing is written to the pool after the call."""
        ...


class HostAccess:
    """Send and receive blocks of a pool in host memory, directly."""

    def __enter__(self) -> HostAccess:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        return None

    def send(self, connection: socket.socket, spans: Spans) -> None:
        send(connection, spans)

    def receive(self, connection: socket.socket, spans: Spans) -> None:
        receive(connection, spans)


class CudaAccess:
    """Send and receive blocks of a pool in the memory of CUDA device `number`. The bytes pass through pinned host
    memory, which has two halves of `stage_bytes` bytes. While one half is sent or received, the GPU copies to or from
    the other half, on a stream of its own."""

    def __init__(self, driver: CudaDriver, number: int, stage_bytes: int = STAGE_BYTES) -> None:
        self._driver = driver
        self._number = number
        self._stage_bytes = stage_bytes
        self._stage = self._stream = 0

    def __enter__(self) -> CudaAccess:
        self._driver.enter(self._number)
        self._stream = self._driver.open_stream()
        try:
            self._stage = self._driver.allocate_pinned(2 * self._stage_bytes)
        except BaseException:
            self._driver.close_stream(self._stream)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self._driver.wait(self._stream)
            self._driver.free_pinned(self._stage)
        finally:
            self._driver.close_stream(self._stream)

    def send(self, connection: socket.socket, spans: Spans) -> None:
        half, filled = self._stage, 0
        for batch in _batches(spans, self._stage_bytes):
            other = self._other(half)
            num_bytes = 0
            for address, size in batch:
                self._driver.copy_to_host(other + num_bytes, address, size, self._stream)
                num_bytes += size
            if filled:
                send(connection, span(half, filled))
            self._driver.wait(self._stream)
            half, filled = other, num_bytes
        if filled:
            send(connection, span(half, filled))

    def receive(self, connection: socket.socket, spans: Spans) -> None:
        half = self._stage
        try:
            for batch in _batches(spans, self._stage_bytes):
                receive(connection, span(half, sum(size for _, size in batch)))
                self._driver.wait(self._stream)
                num_bytes = 0
                for address, size in batch:
                    self._driver.copy_to_device(address, half + num_bytes, size, self._stream)
                    num_bytes += size
                half = self._other(half)
        finally:
            self._driver.wait(self._stream)

    def _other(self, half: int) -> int:
        return 2 * self._stage + self._stage_bytes - half


def open_access(pool: MemoryPool, driver: CudaDriver | None) -> PoolAccess:
    """Return a new access to `pool` for one thread, to be used in a `with` block. `driver`: the CUDA driver; None for a
    pool in host memory."""
    number = cuda_number(pool.region.device)
    return HostAccess() if number is None or driver is None else CudaAccess(driver, number)


def _batches(spans: Spans, most: int) -> list[list[tuple[int, int]]]:
    """Cut the spans into batches of `most` bytes; the last one may be smaller."""
    batches: list[list[tuple[int, int]]] = []
    room = 0
    for address, num_bytes in spans.tolist():
        done = 0
        while done < num_bytes:
            if not room:
                batches.append([])
                room = most
            size = min(room, num_bytes - done)
            batches[-1].append((address + done, size))
            done += size
            room -= size
    return batches
