"""Test that workers keep KV in files and read it after a restart, over real gRPC, and that files that are torn, changed
or gone, and disks that are full, cost nothing but time."""

from __future__ import annotations

import asyncio
import errno
import os
import queue
import shutil
import threading
import time
from collections.abc import Callable
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from tandem.core.clock import SystemClock
from tandem.core.config import Bytes, EngineConfig
from tandem.core.events import Finished
from tandem.core.ids import HostSlot
from tandem.engine import file_tier
from tandem.engine.effects import ReadFiles
from tandem.engine.ports import HostBlocks
from tandem.kv.hashing import chain_hashes, root_hash
from tandem.worker.kv.block_files import BlockFiles
from tandem.worker.kv.file_cache import FileCache
from tests.e2e.client import PATIENCE_S, new_request
from tests.unit.worker.conftest import Node, Nodes
from tests.unit.worker.fake_model import MODEL, continuation

NUM_BLOCKS, NUM_SLOTS = 16, 16
PROMPT = list(range(1, 26))
"""Six full blocks of four tokens."""


async def start(nodes: Nodes, directory: Path, fingerprint: str = "f00d") -> Node:
    engine = EngineConfig(
        block_size=4,
        max_num_batched_tokens=8,
        max_num_seqs=8,
        file_cache_path=str(directory),
        file_cache_size=Bytes(1 << 20),
    )
    return await nodes.start(num_blocks=NUM_BLOCKS, num_host_slots=NUM_SLOTS, fingerprint=fingerprint, engine=engine)


async def num_cached(node: Node, prompt: list[int]) -> int:
    """Check the tokens after a prompt, and return how many of it were cached."""
    key = await node.client.generate(new_request(MODEL, prompt, 2))
    end = await node.client.end_of(key)
    assert isinstance(end, Finished), end
    assert node.client.tokens(key) == continuation(prompt, 2)
    return end.num_cached_tokens


async def fill(node: Node, first: int) -> None:
    """Run prompts that push all others out of the pool."""
    for number in range(4):
        await num_cached(node, [first + number, *range(60, 99)])


def block_paths(directory: Path) -> list[Path]:
    return sorted(directory.rglob("*.kv"))


async def wait_for_prompt(node: Node, directory: Path) -> None:
    """Wait until files have the blocks of PROMPT, and the worker knows of all files."""
    names = {block_hash.hex() for block_hash in chain_hashes(root_hash("f00d", 4, ""), PROMPT, 4)}
    async with asyncio.timeout(PATIENCE_S):
        while not names <= {path.stem for path in block_paths(directory)}:
            await asyncio.sleep(0.01)
        while (await node.client.books()).num_file_blocks < len(block_paths(directory)):
            await asyncio.sleep(0.01)


async def start_with_files(nodes: Nodes, directory: Path) -> Node:
    """Start a worker that has written PROMPT to files and has nothing of it left in its pool."""
    node = await start(nodes, directory)
    assert await num_cached(node, PROMPT) == 0
    await fill(node, 30)
    await wait_for_prompt(node, directory)
    return node


async def num_from_files(node: Node) -> int:
    return (await node.client.books()).num_file_hit_tokens


async def test_a_prompt_is_read_from_files_after_a_restart_and_at_another_worker(nodes: Nodes, tmp_path: Path) -> None:
    first = await start_with_files(nodes, tmp_path)
    await first.worker.stop()
    second = await start(nodes, tmp_path)
    await wait_for_prompt(second, tmp_path)
    assert await num_cached(second, PROMPT) == 24
    books = await second.client.books()
    assert books.num_file_hit_tokens == 24 and books.num_free_blocks == NUM_BLOCKS
    stranger = await start(nodes, tmp_path, fingerprint="beef")
    assert await num_cached(stranger, PROMPT) == 0


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize(
    "damage", [flip, lambda path: os.truncate(path, 4100), Path.unlink], ids=["changed", "short", "gone"]
)
async def test_a_damaged_file_is_not_served(nodes: Nodes, tmp_path: Path, damage: Callable[[Path], None]) -> None:
    first = await start_with_files(nodes, tmp_path)
    await first.worker.stop()
    second = await start(nodes, tmp_path)
    await wait_for_prompt(second, tmp_path)
    for path in block_paths(tmp_path):
        damage(path)
    assert await num_cached(second, PROMPT) == 0
    assert await num_cached(second, PROMPT) == 24
    assert (await second.client.books()).num_file_hit_tokens == 0


async def test_a_directory_that_is_deleted_costs_only_its_content(
    nodes: Nodes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file_tier, "WRITE_PAUSE_S", 0.1)
    node = await start_with_files(nodes, tmp_path / "files")
    (tmp_path / "files").rename(tmp_path / "gone")
    shutil.rmtree(tmp_path / "gone")
    await num_cached(node, PROMPT)
    assert await num_from_files(node) == 0
    async with asyncio.timeout(PATIENCE_S):
        # A write that the deletion disturbed is tried again after a pause.
        for first in count(40, 10):
            await fill(node, first)
            await num_cached(node, PROMPT)
            if await num_from_files(node):
                break
            await asyncio.sleep(0.1)


async def test_a_full_disk_costs_only_the_files(
    nodes: Nodes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "pwritev", full)
    node = await start(nodes, tmp_path)
    await num_cached(node, PROMPT)
    await fill(node, 30)
    await num_cached(node, PROMPT)
    books = await node.client.books()
    assert books.num_file_blocks == books.num_file_hit_tokens == 0 and books.num_free_blocks == NUM_BLOCKS
    assert block_paths(tmp_path) == []
    assert sum("goes on without" in record.message for record in caplog.records) == 1


async def test_a_disk_that_fails_to_read_costs_only_the_files(
    nodes: Nodes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> int:
        raise OSError(errno.EIO, "Input/output error")

    first = await start_with_files(nodes, tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(os, "preadv", fail)
        for other in (40, 50):
            await num_cached(first, PROMPT)
            await fill(first, other)
        assert await num_from_files(first) == 0
    assert len(block_paths(tmp_path)) > 6, "they are not deleted"


class StopsOnFirstPut(queue.SimpleQueue[Any]):
    """Stop a file cache, on another thread, as soon as the first block of a batch is in the queue."""

    cache: FileCache
    has_stopped = False

    def put(self, item: Any, block: bool = True, timeout: float | None = None) -> None:
        super().put(item, block, timeout)
        if item is not None and not self.has_stopped:
            self.has_stopped = True
            stopper = threading.Thread(target=self.cache.stop, args=(0.0,))
            stopper.start()
            stopper.join()


def test_a_stop_in_the_midst_of_a_batch_ends_all_threads(tmp_path: Path) -> None:
    """No reader may end before it has read the blocks that are queued after the stop."""
    files = BlockFiles(tmp_path, 4, 1, 1 << 20)
    host = SimpleNamespace(host_view=lambda slot: memoryview(bytearray(4)), digest_host=lambda slots: [])
    cache = FileCache(files, cast(HostBlocks, host), lambda command: None, SystemClock())
    cache._to_read = to_read = StopsOnFirstPut()
    to_read.cache = cache
    cache.start()
    hashes = tuple(chain_hashes(root_hash("f00d", 4, ""), PROMPT, 4))
    cache.submit(ReadFiles(1, hashes, tuple(map(HostSlot, range(len(hashes)))), ()))
    while not to_read.has_stopped:
        time.sleep(0.001)
    assert cache.stop(2.0)
