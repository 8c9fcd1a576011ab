"""Run workers with fake models in this process, over real gRPC and the local transport."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import pytest

from tandem.core.config import (
    ClusterConfig,
    Config,
    EngineConfig,
    HandoffConfig,
    RedisConfig,
    TransferConfig,
    WorkerConfig,
)
from tandem.core.ids import Incarnation, JobKey, WorkerId, WorkerRef
from tandem.engine import kv_consumer
from tandem.engine.transfer_messages import Command, Event, TransportPeer
from tandem.transfer.interface import BlockCopy, KVTransfer, PostedRead, ReadState
from tandem.transfer.memory_pool import MemoryPool
from tandem.transfer.process_vm_transport import ProcessVmTransport
from tandem.wire.peer_auth import PeerAuth
from tandem.worker.engine import calibrate
from tandem.worker.worker import Worker, start_worker
from tests.e2e.client import PATIENCE_S, Client, new_request
from tests.unit.worker.fake_model import MODEL, FakeExecutor, fake_model

PATIENT_S = 4.0
SECRET = "s" * 64


def ref(name: str, life: int = 1) -> WorkerRef:
    return WorkerRef(WorkerId(name), Incarnation(life), f"{name}:1")


class HeldRead:
    """A read that is posted once the gate of its transport is open; until then it is pending."""

    def __init__(self, gate: threading.Event, post: Callable[[], PostedRead]) -> None:
        self._gate = gate
        self._post = post

    def poll(self) -> ReadState:
        return self._post().poll() if self._gate.is_set() else ReadState.PENDING


class HeldTransport(ProcessVmTransport):
    """Posts a read only while `gate` is open; until then it is pending."""

    def __init__(self, pool: MemoryPool, agent: str) -> None:
        super().__init__(pool, agent)
        self.gate = threading.Event()
        self.gate.set()
        self.num_held = 0

    def post_read(self, peer: TransportPeer, copies: Sequence[BlockCopy]) -> PostedRead:
        if self.gate.is_set():
            return super().post_read(peer, copies)
        self.num_held += 1
        return HeldRead(self.gate, partial(super().post_read, peer, copies))


class RecordingTransfer(KVTransfer):
    """Record the commands of a transfer in which nothing runs."""

    def __init__(self, on_event: Callable[[Event], None] = lambda event: None) -> None:
        self.on_event = on_event
        self.commands: list[Command] = []
        self.num_halts = 0

    def start(self) -> None:
        """Nothing runs."""

    def send(self, command: Command) -> None:
        if self.num_halts:
            raise RuntimeError("halted")
        self.commands.append(command)

    def halt(self) -> None:
        self.num_halts += 1

    def join(self, timeout_s: float) -> bool:
        return self.num_halts > 0


@dataclass(slots=True)
class Node:
    """Own a worker, its executor and transport, and a gateway's client of it."""

    worker: Worker
    executor: FakeExecutor
    transport: HeldTransport
    client: Client
    extra: AsyncExitStack = field(default_factory=AsyncExitStack)

    async def other_gateway(self, name: str) -> Client:
        return await self.extra.enter_async_context(Client(self.worker.me, name))


class Nodes:
    """Start workers; the fixture stops them and checks what they left behind."""

    def __init__(self) -> None:
        self.nodes: list[Node] = []

    async def start(
        self,
        *,
        num_blocks: int = 512,
        num_host_slots: int = 0,
        fingerprint: str = "f00d",
        engine: EngineConfig | None = None,
        handoff: HandoffConfig | None = None,
        worker: WorkerConfig | None = None,
        redis: RedisConfig | None = None,
        cluster: ClusterConfig | None = None,
        transfer: TransferConfig | None = None,
    ) -> Node:
        model, executor = fake_model(num_blocks, fingerprint, num_host_slots)
        transports: list[HeldTransport] = []

        def open_transport(config: Config, pool: MemoryPool, agent: str) -> HeldTransport:
            transports.append(HeldTransport(pool, agent))
            return transports[-1]

        name = f"w{len(self.nodes)}"
        config = Config(
            engine=engine or EngineConfig(block_size=4, max_num_batched_tokens=8, max_num_seqs=8),
            handoff=handoff or HandoffConfig(),
            # Jobs arrive here without a gateway in which they could be queued.
            worker=replace(worker or WorkerConfig(), id=name, queue_horizon_ms=1e6),
            redis=redis or RedisConfig(),
            cluster=cluster or ClusterConfig(),
            transfer=replace(transfer or TransferConfig(), backend="local"),
        )
        started = await start_worker(config, model, open_transport=open_transport)
        client = await Client(started.me, trust=PeerAuth.of("g", config.cluster)).__aenter__()
        node = Node(started, executor, transports[0], client)
        self.nodes.append(node)
        return node

    async def stop(self) -> None:
        for node in self.nodes:
            await node.client.__aexit__(None, None, None)
            await node.extra.aclose()
            await node.worker.stop()


@pytest.fixture
async def nodes(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Nodes]:
    """Check after the test that no thread and no task of a worker is left."""
    # The step costs of a fake model are calibrated quickly.
    monkeypatch.setattr(calibrate, "NUM_TOKENS", 16)
    started = Nodes()
    yield started
    await started.stop()
    names = [thread.name for thread in threading.enumerate() if thread.name.startswith("tandem-")]
    assert not names, f"threads left: {names}"
    mine = asyncio.current_task()
    left = [task for task in asyncio.all_tasks() if task is not mine and not task.done()]
    ours = [task for task in left if "tandem" in repr(task.get_coro()) and "worker" in repr(task.get_coro())]
    assert not ours, f"tasks left: {ours}"


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    """The file of a cluster's secret."""
    file = tmp_path / "secret"
    file.write_text(f"{SECRET}\n")
    return file


async def settled(*nodes: Node) -> None:
    """Wait until none of the workers holds anything."""
    for node in nodes:
        await node.client.settled()


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not condition():
            await asyncio.sleep(0.001)


def pace(executor: FakeExecutor, step_s: float = 0.01) -> None:
    """Make steps slow enough that a long job is still running when a test looks at it."""
    executor.before_step = lambda plan: time.sleep(step_s)


class Gate:
    """Hold an executor in its steps until opened."""

    def __init__(self, executor: FakeExecutor, only: Callable[[object], bool] = lambda plan: True) -> None:
        self._opened = threading.Event()
        self.entered = threading.Event()
        self._only = only
        executor.before_step = self._wait

    def _wait(self, plan: object) -> None:
        if self._only(plan):
            self.entered.set()
            assert self._opened.wait(30), "nobody opened the gate"

    def open(self) -> None:
        self._opened.set()


async def held_in_a_step(node: Node) -> tuple[Gate, JobKey]:
    """Start a job of two tokens, and wait until the worker is held in its first step."""
    gate = Gate(node.executor)
    key = await node.client.generate(new_request(MODEL, [1, 2, 3], 2))
    await asyncio.to_thread(gate.entered.wait)
    return gate, key


@pytest.fixture
def patient_fetches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Raise the least time of a remote prefix fetch: a fake model computes prompts at once, so the fetch would be given
    up sooner than two workers in one process on a busy machine can serve it."""
    monkeypatch.setattr(kv_consumer, "MIN_PREFIX_FETCH_S", PATIENT_S)
    monkeypatch.setattr(kv_consumer, "MAX_PREFIX_FETCH_S", PATIENT_S)
