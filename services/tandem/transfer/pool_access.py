"""Send a pool's blocks over a socket and receive into them: directly where they are in host memory, through pinned host
memory where they are on a GPU."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
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
    """Send and receive blocks of a pool over sockets. Only one thread uses an access."""

    def send(self, connection: socket.socket, spans: Spans) -> None:
        """Send the bytes of `spans`, which lie in the pool. Raises OSError where the connection ends."""
        ...

    def receive(self, connection: socket.socket, spans: Spans) -> None:
        """Receive the bytes of `spans`, which lie in the pool; return once they are in its memory. Raises OSError where
        the connection ends; nothing is written to the pool after the call."""
        ...


class HostAccess:
    """Send and receive blocks of a pool in host memory, directly."""

    def send(self, connection: socket.socket, spans: Spans) -> None:
        send(connection, spans)

    def receive(self, connection: socket.socket, spans: Spans) -> None:
        receive(connection, spans)


@dataclass(frozen=True, slots=True)
class CudaAccess:
    """Send and receive blocks of a pool in GPU memory. The bytes pass through `stage`, the address of pinned host
    memory, which has two halves of `stage_bytes` bytes. While one half is sent or received, the GPU copies to or from
    the other half, on the CUDA stream `stream`."""

    driver: CudaDriver
    stream: int
    stage: int
    stage_bytes: int

    def send(self, connection: socket.socket, spans: Spans) -> None:
        half, filled = self.stage, 0
        for batch in _batches(spans, self.stage_bytes):
            other = self._other(half)
            num_bytes = 0
            for address, size in batch:
                self.driver.copy_to_host(other + num_bytes, address, size, self.stream)
                num_bytes += size
            if filled:
                send(connection, span(half, filled))
            self.driver.wait(self.stream)
            half, filled = other, num_bytes
        if filled:
            send(connection, span(half, filled))

    def receive(self, connection: socket.socket, spans: Spans) -> None:
        half = self.stage
        try:
            for batch in _batches(spans, self.stage_bytes):
                receive(connection, span(half, sum(size for _, size in batch)))
                self.driver.wait(self.stream)
                num_bytes = 0
                for address, size in batch:
                    self.driver.copy_to_device(address, half + num_bytes, size, self.stream)
                    num_bytes += size
                half = self._other(half)
        finally:
            self.driver.wait(self.stream)

    def _other(self, half: int) -> int:
        return 2 * self.stage + self.stage_bytes - half


@contextmanager
def cuda_access(driver: CudaDriver, number: int, stage_bytes: int = STAGE_BYTES) -> Iterator[PoolAccess]:
    """Return a context manager that yields an access to a pool on CUDA device `number`, and frees its stream and its
    pinned memory at the end. `stage_bytes`: size of each half of that memory."""
    driver.enter(number)
    stream = driver.open_stream()
    try:
        stage = driver.allocate_pinned(2 * stage_bytes)
        try:
            yield CudaAccess(driver, stream, stage, stage_bytes)
        finally:
            driver.wait(stream)
            driver.free_pinned(stage)
    finally:
        driver.close_stream(stream)


def open_access(pool: MemoryPool, driver: CudaDriver | None) -> AbstractContextManager[PoolAccess]:
    """Return a context manager that yields an access to `pool` for one thread. `driver`: the CUDA driver; None for a
    pool in host memory."""
    number = cuda_number(pool.region.device)
    return nullcontext(HostAccess()) if number is None or driver is None else cuda_access(driver, number)


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
