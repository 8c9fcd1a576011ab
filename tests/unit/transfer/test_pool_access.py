"""Test that blocks on a GPU go through pinned memory intact, with a driver double that copies as late as it may."""

from __future__ import annotations

import ctypes
import socket
import threading
from collections.abc import Callable

import numpy as np
import pytest

from tandem.transfer.memory_pool import cuda_number
from tandem.transfer.pool_access import cuda_access
from tandem.transfer.socket_memory import receive_bytes

STAGE_BYTES = 64


class Driver:
    """Copies on a stream happen when it is waited for. `resources`: streams and pinned memory that are not freed."""

    def __init__(self) -> None:
        self.resources: dict[int, object] = {}
        self._copies: list[tuple[int, int, int]] = []

    def enter(self, number: int) -> None:
        assert number == 1

    def open_stream(self) -> int:
        self.resources[1] = "stream"
        return 1

    def close_stream(self, stream: int) -> None:
        del self.resources[stream]

    def allocate_pinned(self, num_bytes: int) -> int:
        memory = ctypes.create_string_buffer(num_bytes)
        self.resources[ctypes.addressof(memory)] = memory
        return ctypes.addressof(memory)

    def free_pinned(self, address: int) -> None:
        assert not self._copies, "a copy may still use the memory"
        del self.resources[address]

    def copy_to_host(self, target: int, source: int, num_bytes: int, stream: int) -> None:
        assert stream == 1
        self._copies.append((target, source, num_bytes))

    copy_to_device = copy_to_host

    def wait(self, stream: int) -> None:
        for target, source, num_bytes in self._copies:
            ctypes.memmove(target, source, num_bytes)
        self._copies.clear()


def spans_in(memory: np.ndarray, *parts: slice) -> np.ndarray:
    return np.array([(memory[part].ctypes.data, memory[part].nbytes) for part in parts], np.uint64)


def beside(work: Callable[[], None]) -> threading.Thread:
    thread = threading.Thread(target=work)
    thread.start()
    return thread


PARTS = [
    (slice(0, 10),),
    (slice(0, 64),),
    (slice(0, 65), slice(100, 163)),
    (slice(500, 1000), slice(0, 1), slice(3, 30), slice(100, 400)),
]


@pytest.mark.parametrize("parts", PARTS)
def test_blocks_of_a_gpu_are_sent_in_order(parts: tuple[slice, ...]) -> None:
    memory = np.random.default_rng(0).integers(0, 256, 1000, np.uint8)
    driver = Driver()
    ours, theirs = socket.socketpair()
    with ours, theirs, cuda_access(driver, 1, STAGE_BYTES) as access:  # type: ignore[arg-type]
        sender = beside(lambda: access.send(ours, spans_in(memory, *parts)))
        expected = b"".join(memory[part].tobytes() for part in parts)
        assert receive_bytes(theirs, len(expected)) == expected
        sender.join()
    assert driver.resources == {}


@pytest.mark.parametrize("parts", PARTS)
def test_what_is_received_is_in_the_gpu_when_the_call_returns(parts: tuple[slice, ...]) -> None:
    memory, content = np.zeros(1000, np.uint8), np.random.default_rng(1).integers(0, 256, 1000, np.uint8)
    driver = Driver()
    ours, theirs = socket.socketpair()
    with ours, theirs, cuda_access(driver, 1, STAGE_BYTES) as access:  # type: ignore[arg-type]
        sender = beside(lambda: theirs.sendall(b"".join(content[part].tobytes() for part in parts)))
        access.receive(ours, spans_in(memory, *parts))
        sender.join()
        for part in parts:
            assert np.array_equal(memory[part], content[part])
    assert driver.resources == {}


def test_a_connection_that_ends_leaves_no_copy_behind() -> None:
    memory, driver = np.zeros(1000, np.uint8), Driver()
    ours, theirs = socket.socketpair()
    with ours, cuda_access(driver, 1, STAGE_BYTES) as access:  # type: ignore[arg-type]
        theirs.sendall(b"x" * 100)
        theirs.close()
        with pytest.raises(OSError, match="closed the connection"):
            access.receive(ours, spans_in(memory, slice(0, 1000)))
        assert not driver._copies
    assert driver.resources == {}


@pytest.mark.parametrize(("device", "number"), [("cpu", None), ("cuda", 0), ("cuda:3", 3)])
def test_devices_have_numbers(device: str, number: int | None) -> None:
    assert cuda_number(device) == number
