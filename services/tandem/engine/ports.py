"""Define the interfaces that the engine's drivers need: executor, pipeline, host memory and step observer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from tandem.core.ids import HostSlot
from tandem.kv.layout import KVLayout
from tandem.sched.state.schedule_result import StepRecord
from tandem.sched.state.step_plan import StepPlan, StepResult


class Executor(Protocol):
    """Compute step plans on a model; owns the model's weights and the KV storage, and knows no jobs or sequences.

    Called from one thread at a time, with plans in the order of their numbers.
    """

    @property
    def layout(self) -> KVLayout: ...

    @property
    def num_blocks(self) -> int: ...

    @property
    def num_host_slots(self) -> int:
        """Number of slots of host memory, each for one block besides those of the pool; plans copy blocks into slots
        and back."""
        ...

    @property
    def vocab_size(self) -> int:
        """Number of token ids; every id is below it."""
        ...

    def execute(self, plan: StepPlan) -> StepResult:
        """Compute one plan, and return its result when it has ended.

        Where a single slice cannot be computed, its result has `error` set, and the other slices are unaffected. Raises
        DeviceLost when the device cannot compute any more.
        """
        ...


class Pipeline(Protocol):
    """Compute step plans asynchronously, so that the next plan can be made while one runs.

    Called from one thread at a time. Every launched plan is collected once, in the order of launching. Up to the
    engine's `plan_depth` plans may be launched and not collected.
    """

    def launch(self, plan: StepPlan) -> None:
        """Start a plan; return without waiting for its end where the device computes asynchronously."""
        ...

    def collect(self) -> StepResult:
        """Wait for the oldest launched plan and return its result; transports can then read the KV that it wrote.

        Raises DeviceLost, or any other error that failed the plan as a whole; the plan then counts as collected.
        """
        ...


class HostBlocks(Protocol):
    """Give access to the host memory that holds evicted blocks. Any thread may call it, for slots that no plan and no
    other caller uses."""

    def host_view(self, slot: HostSlot) -> memoryview:
        """Return a writable view of the bytes of a slot."""
        ...

    def digest_host(self, slots: Sequence[HostSlot]) -> list[tuple[int, ...]]:
        """Return the digests of the blocks in `slots`: for each slot one unsigned 64-bit number per KV head. Each block
        is digested as if it were the first of a prompt."""
        ...


class DeviceLost(Exception):
    """Raised when the device can compute neither the current plan nor any later one."""


class StepObserver(Protocol):
    """Receive the record of each measured step, for metrics and logs.

    `observe` is called on the driver's thread, so it must not block and must not raise.
    """

    def observe(self, record: StepRecord) -> None: ...
