"""Define the interfaces that the engine's drivers need: executor, KV transport and step observer."""

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
    """Run plans on a model. Own weights and KV storage; sequences and jobs stay outside.

    Called from one thread at a time. Plans are executed in the order of their numbers.
    """

    @property
    def layout(self) -> KVLayout: ...

    @property
    def num_blocks(self) -> int: ...

    @property
    def num_host_slots(self) -> int:
        """Number of blocks that fit into host memory beside the pool; plans copy to them and back."""
        ...

    @property
    def vocab_size(self) -> int:
        """Upper bound of token ids, exclusive."""
        ...

    def execute(self, plan: StepPlan) -> StepResult:
        """Run one plan to its end. A slice that cannot be computed reports `error`; others are unaffected. Raises
        DeviceLost."""
        ...


class Pipeline(Protocol):
    """Run plans while the next one is being made. Called from one thread at a time.

    Plans are collected in the order in which they were launched, each once. As many plans may be launched ahead as the
    engine keeps open.
    """

    def launch(self, plan: StepPlan) -> None:
        """Start a plan; return before it has ended where the device computes asynchronously."""
        ...

    def collect(self) -> StepResult:
        """Wait for the oldest launched plan and return its result; what it wrote is then visible to all, transports
        included.

        Raises DeviceLost, and any other error of the plan as a whole; the plan is over then.
        """
        ...


class DeviceLost(Exception):
    """Raised when the device cannot compute any more: neither this plan nor a later one."""


class StepObserver(Protocol):
    """Receive records of steps that have run. Called on the driver's thread; must not block and must not raise."""

    def observe(self, record: StepRecord) -> None: ...


@dataclass(frozen=True, slots=True)
class TransportRank:
    """How one tensor-parallel rank of a worker is read.

    `agent`: name of its transport agent, unique to the incarnation. `metadata`: the transport's own handshake data.
    `region`: its pool.
    """

    agent: str
    metadata: bytes
    region: KVRegion


@dataclass(frozen=True, slots=True)
class TransportPeer:
    """What a worker sends to others so that they can read its blocks; `layout` is the layout of the whole model.

    A block has the same number in the pools of all ranks; each pool holds the KV heads that its region names.
    """

    worker: WorkerRef
    layout: KVLayout
    ranks: tuple[TransportRank, ...]

    @property
    def life(self) -> tuple[WorkerId, Incarnation]:
        """Return worker id and incarnation. They identify the peer; its address may be written in several ways."""
        return self.worker.id, self.worker.incarnation


@dataclass(frozen=True, slots=True)
class BlockCopy:
    """Read the peer's block `remote` into the local block `local`: all heads that the local pool holds of it."""

    remote: BlockId
    local: BlockId


class ReadState(Enum):
    """State of a read. FAILED means that the transport has proven that the read does not touch local memory any
    more."""

    PENDING = "pending"
    DONE = "done"
    FAILED = "failed"


class PeerError(Exception):
    """Raised when the peer is gone, refuses the connection, or is another incarnation than before."""


class KVTransport(Protocol):
    """Read blocks of peers' pools into the local pool. All calls come from the one thread that owns the transport.

    No worker writes into another worker's memory. A read cannot be aborted: memory is safe to reuse only once `poll`
    returned DONE or FAILED, or `disconnect` returned True.
    """

    def describe(self, worker: WorkerRef) -> TransportPeer:
        """Return the local side of the handshake."""
        ...

    def connect(self, peer: TransportPeer) -> None:
        """Make a peer readable; an earlier incarnation under the same worker id is dropped first.

        Raises PeerError when the peer cannot be reached or its layout cannot be read.
        """
        ...

    def disconnect(self, peer: TransportPeer) -> bool:
        """Tear down a peer with all its reads; return True if it is proven that none of them touches local memory any
        more."""
        ...

    def post_read(self, peer: TransportPeer, copies: Sequence[BlockCopy]) -> int:
        """Start a read and return its handle. May block as long as a copy of these bytes takes. Raises PeerError."""
        ...

    def poll(self, handle: int) -> ReadState:
        """Progress one read and return its state; the handle is invalid after DONE or FAILED."""
        ...

    def progress(self) -> None:
        """Serve peers that read from this worker; called at least every 20 ms, every 0.5 ms while a lease or read is
        open."""
        ...

    def close(self) -> None: ...
