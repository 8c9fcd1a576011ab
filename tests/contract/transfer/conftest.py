"""Pools of known content and peers in processes of their own, for the transport contract; asserts nothing."""

from __future__ import annotations

import base64
import os
import pickle
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import numpy as np
import pytest

from tandem.core.ids import BlockId, Incarnation, WorkerId, WorkerRef
from tandem.engine.transfer_messages import TransportPeer
from tandem.kv.layout import KVGroup, KVLayout
from tandem.transfer.interface import BlockCopy, PostedRead, ReadState, Transport
from tandem.transfer.memory_pool import agent_name
from tests.contract.transfer.peer_process import NUM_BLOCKS, TRANSPORTS, Bytes, known_content
from tests.memory_pools import memory_pool

T = TypeVar("T")
LAYERS = 8
GUARD_S = 60.0
"""Only ends a test that hangs."""
PEER_ENVIRONMENT = {"UCX_MEM_EVENTS": "n"}
"""UCX watches for memory that is given back, which takes half of the time in which it starts: a peer gives none back
while it lives."""


@dataclass
class Peer:
    """A transport in another process. `content` is what its pool holds, by block."""

    process: subprocess.Popen[str]
    handshake: TransportPeer
    content: Bytes

    def signal(self, number: signal.Signals) -> None:
        """Send a signal; after SIGSTOP wait until all threads have stopped, because a transport's own may still send
        for a moment."""
        self.process.send_signal(number)
        if number is signal.SIGSTOP:
            os.waitpid(self.process.pid, os.WUNTRACED)

    def kill(self) -> None:
        """Leaves neither a process nor a pipe."""
        self.process.kill()
        self.process.communicate()

    def close_transport(self) -> None:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write("close\n")
        self.process.stdin.flush()
        assert self.process.stdout.readline() == "closed\n"


@dataclass
class Rig:
    """One implementation under test: our own transport with its memory, and a way to get peers."""

    kind: str
    layout: KVLayout
    transport: Transport
    memory: Bytes
    new_transport: Callable[[], tuple[Transport, Bytes]]
    peers: list[Peer] = field(default_factory=list)
    incarnation: int = 0

    @property
    def needs_its_target(self) -> bool:
        """Whether a read of a stopped peer stays open. Shared memory needs the peer only for the first contact."""
        return self.kind in ("tcp", "auto") or self.is_held_by_its_target

    @property
    def is_held_by_its_target(self) -> bool:
        """Whether an open read of a stopped peer may still write after a teardown, until the peer answers."""
        return self.kind == "nixl" and os.environ.get("UCX_TLS") == "tcp"

    def spawn(self, worker: str, seed: int, layers: int = LAYERS) -> Peer:
        self.incarnation += 1
        peer = spawn_peer(self.kind, worker, self.incarnation, seed, layers)
        self.peers.append(peer)
        return peer

    @staticmethod
    def until(act: Callable[[], T], is_done: Callable[[T], bool]) -> T:
        deadline = time.monotonic() + GUARD_S
        while not is_done(result := act()):
            assert time.monotonic() < deadline, f"still {result} after {GUARD_S} s"
            time.sleep(0.0005)
        return result

    @classmethod
    def settle(cls, read: PostedRead) -> ReadState:
        """Poll until the read is over. Raises PeerError where `poll` does."""
        return cls.until(read.poll, lambda state: state is not ReadState.PENDING)

    def reap(self) -> None:
        for peer in self.peers:
            self.transport.disconnect(peer.handshake)
            peer.kill()
        self.peers.clear()


def spawn_peer(kind: str, worker: str, incarnation: int, seed: int, layers: int) -> Peer:
    layout = layout_of(layers)
    process = spawn_rank(kind, worker, incarnation, seed, layout)
    return Peer(process, handshake_of(process), known_content(seed, layout))


def spawn_rank(
    kind: str,
    worker: str,
    incarnation: int,
    seed: int,
    layout: KVLayout,
    rank: int = 0,
    num_ranks: int = 1,
    device: str = "cpu",
) -> subprocess.Popen[str]:
    """The process of one rank of a worker, which holds its share of the heads of `known_content`."""
    served = (kind, reference(worker, incarnation), seed, layout, rank, num_ranks, device)
    argument = base64.b64encode(pickle.dumps(served)).decode()
    return subprocess.Popen(
        [sys.executable, str(Path(__file__).with_name("peer_process.py")), argument],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, **PEER_ENVIRONMENT, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
    )


def handshake_of(process: subprocess.Popen[str]) -> TransportPeer:
    """What a process that was spawned says first."""
    assert process.stdout is not None
    return pickle.loads(base64.b64decode(process.stdout.readline()))


def connect(transport: Transport, peer: TransportPeer) -> None:
    """Connect a peer that may be connected already, as the transfer engine does: by a teardown before."""
    transport.disconnect(peer)
    transport.connect(peer)


def copies_of(remote: Sequence[int], local: Sequence[int]) -> list[BlockCopy]:
    return [BlockCopy(BlockId(theirs), BlockId(ours)) for theirs, ours in zip(remote, local, strict=True)]


def layout_of(layers: int) -> KVLayout:
    return KVLayout(16, (KVGroup(layers, 2, 16, "float32"),))


@pytest.fixture(scope="module", params=TRANSPORTS)
def module_rig(request: pytest.FixtureRequest) -> Iterator[Rig]:
    """An agent takes half a second to open, so the tests of one kind share theirs."""
    kind = str(request.param)
    layout = layout_of(LAYERS)
    opened: list[Transport] = []

    def new_transport() -> tuple[Transport, Bytes]:
        memory = np.zeros((NUM_BLOCKS, layout.block_bytes), np.uint8)
        pool = memory_pool(memory.ctypes.data, NUM_BLOCKS, layout, keepalive=memory)
        transport = TRANSPORTS[kind](pool, agent_name(WorkerId(f"reader{len(opened)}"), Incarnation(1)))
        opened.append(transport)
        return transport, memory

    transport, memory = new_transport()
    yield Rig(kind, layout, transport, memory, new_transport)
    for each in opened:
        each.close()


@pytest.fixture
def rig(module_rig: Rig) -> Iterator[Rig]:
    module_rig.memory[:] = 0
    yield module_rig
    module_rig.reap()


@pytest.fixture(scope="module")
def good_peer(module_rig: Rig) -> Iterator[Peer]:
    """A peer that no test harms."""
    peer = spawn_peer(module_rig.kind, "good", 1, 7, LAYERS)
    yield peer
    module_rig.transport.disconnect(peer.handshake)
    peer.kill()


def reference(name: str, incarnation: int = 1) -> WorkerRef:
    return WorkerRef(WorkerId(name), Incarnation(incarnation), "127.0.0.1:1")
