"""What the engine's drivers need from the outside: executor, KV transport, observer; owns no implementation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from tandem.core.ids import BlockId, Incarnation, WorkerId, WorkerRef
from tandem.kv.layout import KVLayout, KVRegion
from tandem.sched.state.schedule_result import StepRecord
from tandem.sched.state.step_plan import StepPlan, StepResult


class Executor(Protocol):
    """Runs plans on a model. Owns weights and KV storage; knows neither sequences nor jobs.

    Called from one thread at a time. Plans are executed in the order of their numbers.
    """

    @property
    def layout(self) -> KVLayout: ...

    @property
    def num_blocks(self) -> int: ...

    @property
    def num_host_slots(self) -> int:
        """Blocks that host memory has room for beside the pool; plans copy to it and back."""
        ...

    @property
    def vocab_size(self) -> int:
        """Token ids are below it."""
        ...

    def execute(self, plan: StepPlan) -> StepResult:
        """Run one plan to its end. A slice that cannot be computed reports `error`; others are unaffected. Raises
        DeviceLost."""
        ...


class Pipeline(Protocol):
    """Runs plans while the next is being made. Called from one thread at a time.

    Plans are collected in the order in which they were launched, each once, and as many may be launched ahead as the
    engine that makes them keeps open.
    """

    def launch(self, plan: StepPlan) -> None:
        """Begin a plan; returns before it has ended, where the device computes by itself."""
        ...

    def collect(self) -> StepResult:
        """Wait for the oldest plan that was launched. What it wrote is there for everybody, transports too.

        Raises DeviceLost, and whatever else the plan as a whole failed with; it is over then.
        """
        ...


class DeviceLost(Exception):
    """The device computes nothing any more: neither this plan nor a later one."""


class StepObserver(Protocol):
    """Whoever looks at steps that have run. Called on the driver's thread; must not block and must not raise."""

    def observe(self, record: StepRecord) -> None: ...


@dataclass(frozen=True, slots=True)
class TransportRank:
    """How one tensor-parallel rank of a worker is read: its agent, unique to the incarnation, what the transport says
    of it, and its pool."""

    agent: str
    metadata: bytes
    region: KVRegion


@dataclass(frozen=True, slots=True)
class TransportPeer:
    """What one worker tells another so that its blocks can be read; `layout` is the whole model's.

    A block is in the pools of all ranks under one number, in each those of its KV heads that the region names.
    """

    worker: WorkerRef
    layout: KVLayout
    ranks: tuple[TransportRank, ...]

    @property
    def life(self) -> tuple[WorkerId, Incarnation]:
        """Whose life it is; its address may be written in two ways."""
        return self.worker.id, self.worker.incarnation


@dataclass(frozen=True, slots=True)
class BlockCopy:
    """Read the peer's block `remote` into our block `local`: all that our pool holds of it."""

    remote: BlockId
    local: BlockId


class ReadState(Enum):
    """FAILED means that the transport has proven that it touches our memory no more."""

    PENDING = "pending"
    DONE = "done"
    FAILED = "failed"


class PeerError(Exception):
    """The peer is gone, refuses, or is not who it was."""


class KVTransport(Protocol):
    """Reads blocks of peers' pools into our own. All calls come from the one thread that owns it.

    Nobody ever writes into another worker's memory. A read cannot be aborted: memory is safe to reuse only once
    `poll` said DONE or FAILED, or `disconnect` returned True.
    """

    def describe(self, worker: WorkerRef) -> TransportPeer:
        """Our side of the handshake."""
        ...

    def connect(self, peer: TransportPeer) -> None:
        """Make a peer readable; an earlier incarnation under the same worker id is dropped first.

        Raises PeerError when the peer cannot be reached or its layout cannot be read.
        """
        ...

    def disconnect(self, peer: TransportPeer) -> bool:
        """Tear the peer down with all its reads. True when it is proven that none touches our memory any more."""
        ...

    def post_read(self, peer: TransportPeer, copies: Sequence[BlockCopy]) -> int:
        """Start a read and return its handle. May block as long as a copy of these bytes takes. Raises PeerError."""
        ...

    def poll(self, handle: int) -> ReadState:
        """Progress and report one read; after DONE or FAILED the handle is forgotten."""
        ...

    def progress(self) -> None:
        """Serve peers that read from us; called at least every 20 ms, every 0.5 ms while a lease or read is open."""
        ...

    def close(self) -> None: ...
