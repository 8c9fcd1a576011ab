"""Define the interfaces that the engine's drivers need: executor and step observer."""

from __future__ import annotations

from typing import Protocol

from tandem.kv.layout import KVLayout
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
