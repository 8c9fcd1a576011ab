"""Pools of known content and peers in processes of their own, for the transport contract; asserts nothing."""

from __future__ import annotations

import base64
import os
import pickle
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import pytest

from tandem.core.ids import Incarnation, WorkerId, WorkerRef
from tandem.engine.transfer_messages import TransportPeer
from tandem.kv.layout import KVGroup, KVLayout
from tandem.transfer.auto_transport import AutoTransport
from tandem.transfer.interface import PostedRead, ReadState, Transport
from tandem.transfer.memory_pool import MemoryPool, agent_name
from tandem.transfer.nixl_transport import NixlTransport
from tandem.transfer.process_vm_transport import ProcessVmTransport
from tandem.transfer.tcp_transport import TcpTransport
from tests.memory_pools import memory_pool

Bytes = npt.NDArray[np.uint8]
T = TypeVar("T")


def open_auto(pool: MemoryPool, agent: str) -> Transport:
    """Return a transport that chooses TCP for each peer, as for a worker on another machine."""
    return AutoTransport(TcpTransport(pool, agent), None, "", machine=agent, has_rdma=False)


TRANSPORTS: dict[str, Callable[[MemoryPool, str], Transport]] = {
    "local": ProcessVmTransport,
    "nixl": NixlTransport,
    "tcp": TcpTransport,
    "auto": open_auto,
}
NUM_BLOCKS = 256
LAYERS = 8
GUARD_S = 60.0
"""Only ends a test that hangs."""
PEER_ENVIRONMENT = {"UCX_MEM_EVENTS": "n"}
"""UCX watches for memory that is given back, which takes half of the time in which it starts: a peer gives none back
while it lives."""


def known_content(seed: int, num_blocks: int, layout: KVLayout) -> Bytes:
    """What `peer_process.py --seed` holds: uint8 [num_blocks, block_bytes]."""
    words = num_blocks * layout.block_bytes // 8
    content = np.random.default_rng(seed).integers(0, 2**63, words, dtype=np.int64)
    return content.view(np.uint8).reshape(num_blocks, -1)


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
    return Peer(process, handshake_of(process), known_content(seed, NUM_BLOCKS, layout))


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
    group = layout.group
    share = group.heads // num_ranks
    return subprocess.Popen(
        [
            *(sys.executable, str(Path(__file__).with_name("peer_process.py")), "--transport", kind),
            *("--worker", worker, "--incarnation", str(incarnation), "--num-blocks", str(NUM_BLOCKS)),
            *("--layers", str(group.layers), "--heads", str(group.heads), "--dtype", group.dtype, "--seed", str(seed)),
            *("--rank", str(rank), "--head-start", str(rank * share), "--head-stop", str((rank + 1) * share)),
            *("--device", device),
        ],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, **PEER_ENVIRONMENT, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
    )


def handshake_of(process: subprocess.Popen[str]) -> TransportPeer:
    """What a process that was spawned says first."""
    assert process.stdout is not None
    return pickle.loads(base64.b64decode(process.stdout.readline()))


def open_transport(kind: str, name: str, content: Bytes, layout: KVLayout) -> Transport:
    pool = memory_pool(content.ctypes.data, len(content), layout, keepalive=content)
    agent = agent_name(WorkerId(name), Incarnation(1))
    return TRANSPORTS[kind](pool, agent)


def connect(transport: Transport, peer: TransportPeer) -> None:
    """Connect a peer that may be connected already, as the transfer engine does: by a teardown before."""
    transport.disconnect(peer)
    transport.connect(peer)


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
        transport = open_transport(kind, f"reader{len(opened)}", memory, layout)
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
