"""KV in the memory of a GPU: read between processes that share it, with the same ends as in host memory.

Needs a GPU; has been run on none yet.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace

import numpy as np
import pytest
import torch

from tandem.core.clock import SystemClock
from tandem.core.ids import Incarnation, WorkerId
from tandem.engine.transfer_messages import ConnectPeer, FailureKind, PeerLost, ReadDone, ReadFailed
from tandem.transfer.interface import ReadState
from tandem.transfer.memory_pool import agent_name
from tandem.transfer.nixl_transport import NixlTransport
from tandem.transfer.transfer_engine import TransferEngine
from tests.contract.transfer.conftest import Rig, copies_of, reference
from tests.contract.transfer.heads import HEADS, LOCAL, MAX_POST_BYTES, REMOTE, SEED, World, layout_of, turn_until
from tests.contract.transfer.peer_process import NUM_BLOCKS, known_content
from tests.memory_pools import memory_pool

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
DEVICE = "cuda:0"
LAYOUT = layout_of("float32")
EXPECTED = known_content(SEED, LAYOUT).reshape(NUM_BLOCKS, HEADS, -1)


class ConsumerRank:
    """One rank of a consumer whose pool is in the GPU's memory."""

    def __init__(self, rank: int, num_ranks: int) -> None:
        share = HEADS // num_ranks
        self.memory = torch.zeros(NUM_BLOCKS, share * LAYOUT.head_bytes, dtype=torch.uint8, device=DEVICE)
        torch.cuda.synchronize()
        self.heads = range(rank * share, (rank + 1) * share)
        address = self.memory.data_ptr()
        pool = memory_pool(address, NUM_BLOCKS, LAYOUT, DEVICE, heads=self.heads, keepalive=self.memory)
        self.transport = NixlTransport(pool, agent_name(WorkerId(f"gpu-consumer-of-{num_ranks}"), Incarnation(1), rank))

    def content(self) -> np.ndarray:
        return self.memory.cpu().numpy().reshape(NUM_BLOCKS, len(self.heads), -1)


@pytest.fixture
def world() -> Iterator[World]:
    with ExitStack() as stack:
        yield World("nixl", LAYOUT, stack, device=DEVICE)


@pytest.mark.parametrize(("giving", "taking"), [(1, 1), (1, 2), (2, 1), (2, 2)])
def test_another_process_is_read(world: World, giving: int, taking: int) -> None:
    producer = world.producer(giving)
    for rank in range(taking):
        consumer = ConsumerRank(rank, taking)
        consumer.transport.connect(producer)
        read = consumer.transport.post_read(producer, copies_of(REMOTE, LOCAL))
        assert Rig.settle(read) is ReadState.DONE
        # On a stream that has seen nothing of the read: what is launched after DONE sees the bytes.
        with torch.cuda.stream(torch.cuda.Stream()):
            seen = consumer.memory[LOCAL].clone()
        torch.cuda.synchronize()
        expected = EXPECTED[REMOTE, consumer.heads.start : consumer.heads.stop].reshape(len(REMOTE), -1)
        assert np.array_equal(seen.cpu().numpy(), expected)
        others = np.setdiff1d(np.arange(NUM_BLOCKS), LOCAL)
        assert not consumer.content()[others].any()
        assert consumer.transport.disconnect(producer)
        consumer.transport.close()


def test_a_neighbour_in_the_same_process_is_read() -> None:
    producer, consumer = ConsumerRank(0, 1), ConsumerRank(0, 1)
    producer.memory[7] = 5
    torch.cuda.synchronize()
    peer = producer.transport.describe(reference("gpu-neighbour"))
    consumer.transport.connect(peer)
    read = consumer.transport.post_read(peer, copies_of([7], [3]))
    while (state := read.poll()) is ReadState.PENDING:
        producer.transport.progress()
    assert state is ReadState.DONE
    assert bool((consumer.memory[3] == 5).all())
    for each in (consumer, producer):
        each.transport.close()


def test_a_source_that_dies_ends_its_orders(world: World) -> None:
    """Either way: the driver keeps its memory for as long as somebody has it mapped."""
    victim, (process,) = world.spawn("gpu-victim", 1)
    consumer = ConsumerRank(0, 1)
    carrier = TransferEngine(consumer.transport, lambda blocks, logical: [], SystemClock(), MAX_POST_BYTES)
    carrier.accept(ConnectPeer(victim))
    order = replace(world.order(1, victim), is_checked=False)
    carrier.accept(order)
    turn_until(carrier, ReadDone)
    process.kill()
    process.wait()
    carrier.accept(replace(order, read=2))
    seen = turn_until(carrier, ReadDone | ReadFailed)
    if isinstance(failed := seen[0], ReadFailed):
        assert failed.kind is FailureKind.PEER
        assert any(isinstance(event, PeerLost) for event in seen)
    assert carrier.is_drained
    carrier.close()


def test_the_self_test_works_beside_gpu_memory() -> None:
    consumer = ConsumerRank(0, 1)
    assert Rig.settle(consumer.transport.post_self_test()) is ReadState.DONE
    consumer.transport.close()


def test_memory_that_cannot_be_shared_is_refused() -> None:
    """In a process of its own: the allocator is chosen once."""
    program = (
        "from tandem.core.errors import TandemError\n"
        "from tests.contract.transfer.test_cuda_memory import ConsumerRank\n"
        "try:\n    ConsumerRank(0, 1)\nexcept TandemError as error:\n    print(error)\n"
    )
    path = os.pathsep.join(filter(None, sys.path))
    environment = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True", "PYTHONPATH": path}
    run = subprocess.run(
        [sys.executable, "-c", program], env={**os.environ, **environment}, capture_output=True, text=True, check=True
    )
    assert "expandable_segments" in run.stdout
