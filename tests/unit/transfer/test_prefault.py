"""Test that pages of a pool are faulted in before their first use and keep their content."""

from __future__ import annotations

import mmap
import re
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from tandem.transfer import prefault as prefault_module
from tandem.transfer.memory_pool import MemoryPool
from tandem.transfer.prefault import PIECE_BYTES, BackgroundPrefault, prefault
from tests.memory_pools import memory_pool
from tests.unit.transfer.scripted import LAYOUT

PAGE = mmap.PAGESIZE


def resident_bytes(address: int) -> int:
    """Return the resident bytes of the mapping that begins at this address."""
    smaps = Path("/proc/self/smaps").read_text()
    entry = re.search(rf"^{address:x}-.*?^Rss:\s+(\d+) kB", smaps, re.MULTILINE | re.DOTALL)
    assert entry is not None
    return int(entry[1]) << 10


def pool_over(memory: np.ndarray, device: str = "cpu") -> MemoryPool:
    return memory_pool(memory.ctypes.data, memory.nbytes // LAYOUT.block_bytes, LAYOUT, device, keepalive=memory)


@pytest.fixture
def memory() -> np.ndarray:
    """Fresh pages in a mapping of their own: it is shared, and those are never merged with a neighbour."""
    return np.frombuffer(mmap.mmap(-1, 2 * PIECE_BYTES + PAGE), np.uint8)


@pytest.mark.parametrize("num_threads", [1, 3])
def test_all_pages_exist_and_hold_what_they_held(memory: np.ndarray, num_threads: int) -> None:
    memory[5 * PAGE + 1] = 7
    before = resident_bytes(memory.ctypes.data)
    prefault(pool_over(memory), num_threads)
    assert before < memory.nbytes // 2
    assert resident_bytes(memory.ctypes.data) == memory.nbytes
    assert memory[5 * PAGE + 1] == 7
    assert np.count_nonzero(memory) == 1


def test_only_the_beginning_of_a_pool_is_allocated_where_that_is_enough(memory: np.ndarray) -> None:
    prefault(pool_over(memory), 2, PIECE_BYTES)
    assert PIECE_BYTES <= resident_bytes(memory.ctypes.data) < memory.nbytes


def test_a_thread_allocates_the_rest_of_a_pool(memory: np.ndarray) -> None:
    memory[5 * PAGE + 1] = 7
    background = BackgroundPrefault(pool_over(memory))
    background.start()
    background._thread.join(60.0)
    assert resident_bytes(memory.ctypes.data) == memory.nbytes
    assert memory[5 * PAGE + 1] == 7 and np.count_nonzero(memory) == 1
    assert background.stop(0.0)


def test_a_thread_that_is_stopped_allocates_no_more(memory: np.ndarray, monkeypatch: pytest.MonkeyPatch) -> None:
    background = BackgroundPrefault(pool_over(memory))
    calls, has_begun, may_end = prefault_module._calls, threading.Event(), threading.Event()

    def held(pool: MemoryPool) -> Iterator[Callable[[], object]]:
        for call in calls(pool):
            yield call
            has_begun.set()
            may_end.wait(60.0)

    monkeypatch.setattr(prefault_module, "_calls", held)
    background.start()
    assert has_begun.wait(60.0) and not background.stop(0.0)
    may_end.set()
    assert background.stop(60.0)
    assert PIECE_BYTES <= resident_bytes(memory.ctypes.data) < memory.nbytes


def test_a_thread_that_was_not_started_is_stopped(memory: np.ndarray) -> None:
    assert BackgroundPrefault(pool_over(memory)).stop(0.0)


def test_a_pool_on_another_device_is_left_alone(memory: np.ndarray) -> None:
    prefault(pool_over(memory, "cuda:0"), 1)
    assert resident_bytes(memory.ctypes.data) == 0


def test_memory_that_is_not_there_is_no_error() -> None:
    prefault(memory_pool(PAGE, 1 << 20, LAYOUT), 2)
