"""Test that the local transport reads only the incarnation that it shook hands with: pid and address prove nothing."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from tandem.core.errors import ErrorKind, TandemError
from tandem.core.ids import BlockId, Incarnation, WorkerId, WorkerRef
from tandem.engine.transfer_messages import TransportPeer
from tandem.transfer import process_vm_transport, transfer_engine
from tandem.transfer.interface import BlockCopy, PeerError
from tandem.transfer.memory_pool import agent_name
from tandem.transfer.process_identity import start_ticks
from tandem.transfer.process_memory import CopySpan, ProcessMemory
from tandem.transfer.process_vm_transport import ProcessVmTransport
from tandem.transfer.transfer_engine import split
from tests.memory_pools import memory_pool
from tests.unit.transfer.scripted import LAYOUT

HOST, PID, TICKS, ADDRESS, NONCE = range(5)


def open_local(name: str) -> tuple[ProcessVmTransport, np.ndarray]:
    memory = np.zeros((4000, LAYOUT.block_bytes), np.uint8)
    pool = memory_pool(memory.ctypes.data, len(memory), LAYOUT, keepalive=memory)
    return ProcessVmTransport(pool, agent_name(WorkerId(name), Incarnation(1))), memory


@pytest.fixture
def producer() -> Iterator[tuple[ProcessVmTransport, np.ndarray, TransportPeer]]:
    transport, memory = open_local("producer")
    memory[:] = np.arange(memory.size, dtype=np.uint32).astype(np.uint8).reshape(memory.shape)
    memory[:, 0] = np.arange(len(memory)) % 251
    yield transport, memory, transport.describe(WorkerRef(WorkerId("producer"), Incarnation(1), "127.0.0.1:1"))
    transport.close()


def forged(peer: TransportPeer, field: int, value: object) -> TransportPeer:
    (rank,) = peer.ranks
    fields = json.loads(rank.metadata)
    fields[field] = value
    return replace(peer, ranks=(replace(rank, metadata=json.dumps(fields).encode()),))


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        (HOST, "another/boot", "not on this host"),
        (TICKS, 1, "is gone"),
        (PID, 2**22 + 1, "is gone"),
        (NONCE, "00" * 16, "another incarnation"),
        (NONCE, "00", "no local transport"),
        (ADDRESS, 64, "is gone"),
        (PID, 0, "no local transport"),
    ],
)
def test_another_life_is_refused(producer, field: int, value: object, message: str) -> None:
    consumer, _ = open_local("consumer")
    with pytest.raises(PeerError, match=message):
        consumer.connect(forged(producer[2], field, value))


@pytest.mark.parametrize("metadata", [b"[" * 200_000, b'["h", Infinity, 1, 1, "00"]', b"[]", b"5", b"\xff"])
def test_bytes_that_are_nobodys_are_refused(producer, metadata: bytes) -> None:
    consumer, _ = open_local("consumer")
    (rank,) = producer[2].ranks
    with pytest.raises(PeerError, match="no local transport"):
        consumer.connect(replace(producer[2], ranks=(replace(rank, metadata=metadata),)))


def test_a_process_that_may_not_be_looked_at_is_refused(producer, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where /proc hides the processes of other users."""
    consumer, _ = open_local("consumer")

    def hidden(pid: int) -> int:
        raise PermissionError(f"/proc/{pid}/stat")

    monkeypatch.setattr(process_vm_transport, "start_ticks", hidden)
    with pytest.raises(PeerError, match="stat"):
        consumer.connect(producer[2])


def test_a_life_that_ends_between_connect_and_read_is_noticed(producer) -> None:
    transport, _, peer = producer
    consumer, _ = open_local("consumer")
    consumer.connect(peer)
    transport.close()
    with pytest.raises(PeerError, match="another incarnation"):
        consumer.post_read(peer, [BlockCopy(BlockId(1), BlockId(1))])


def test_more_pieces_than_one_system_call_takes(producer) -> None:
    _, content, peer = producer
    consumer, memory = open_local("consumer")
    consumer.connect(peer)
    remote = np.random.default_rng(0).permutation(len(content))
    copies = [BlockCopy(BlockId(int(r)), BlockId(i)) for i, r in enumerate(remote)]
    consumer.post_read(peer, copies)
    assert np.array_equal(memory, content[remote])


def test_memory_of_a_device_is_not_for_the_local_transport() -> None:
    with pytest.raises(TandemError) as error:
        ProcessVmTransport(memory_pool(4096, 1, LAYOUT, "cuda:0"), "x.1")
    assert error.value.kind is ErrorKind.UNSUPPORTED


def test_an_unmapped_source_is_an_error_and_not_a_crash() -> None:
    target = np.zeros(16, np.uint8)
    with pytest.raises(OSError, match="Bad address"):
        ProcessMemory().read(os.getpid(), [CopySpan(64, target.ctypes.data, 16)])


def test_the_start_of_a_process_is_its_own() -> None:
    me = start_ticks(os.getpid())
    assert me == start_ticks(os.getpid())
    assert start_ticks(1) <= me
    with pytest.raises(ProcessLookupError):
        start_ticks(2**22 + 1)


@pytest.mark.parametrize("num_blocks", [0, 1, 2, 3, 7, 64])
@pytest.mark.parametrize("max_blocks", [0, 1, 3, 100])
def test_parts_cover_an_order_once_within_the_cap(num_blocks: int, max_blocks: int) -> None:
    parts = list(split(num_blocks, LAYOUT.block_bytes, max_blocks * LAYOUT.block_bytes))
    assert [i for part in parts for i in range(part.start, part.stop)] == list(range(num_blocks))
    assert all(1 <= part.stop - part.start <= max(1, max_blocks) for part in parts)


@pytest.mark.parametrize("num_blocks", range(1, 40))
def test_the_last_part_is_small_and_no_part_is_tiny(num_blocks: int, monkeypatch) -> None:
    monkeypatch.setattr(transfer_engine, "LAST_PART_BYTES", 4 * LAYOUT.block_bytes)
    parts = list(split(num_blocks, LAYOUT.block_bytes, 12 * LAYOUT.block_bytes))
    sizes = [part.stop - part.start for part in parts]
    assert min(4, num_blocks) <= sizes[-1] + 1
    assert sizes[-1] <= 6
    assert sizes == sorted(sizes, reverse=True)
    assert len(sizes) <= num_blocks // 12 + 3
