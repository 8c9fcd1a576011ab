"""Define what the planner knows about one worker."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from tandem.core.ids import WorkerRef
from tandem.core.step_cost import StepFeatures
from tandem.core.worker_load import WorkerLoad
from tandem.scaling.cluster_state import WorkerCapacity

_TYPICAL = StepFeatures(num_prefill_tokens=256, num_decode_seqs=8, decode_context=8192, num_prefill_pairs=131_072)


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerState:
    """What the planner knows about one worker.

    `pool`: role for which it was started. `role`: role in which routers use it now. `load`: running and waiting work as
    the worker reports it; None if it did not answer, for the reason in `problem`. `capability`: its measured step times
    and its limits; None if it did not answer or has not measured its step times yet."""

    ref: WorkerRef
    model: str
    pool: str
    role: str
    load: WorkerLoad | None = None
    capability: WorkerCapacity | None = None
    problem: str = ""

    @property
    def is_draining(self) -> bool:
        """Return whether the worker has reported that it drains; False for a worker that does not answer."""
        return self.load is not None and self.load.draining

    @property
    def num_jobs(self) -> int:
        return 0 if self.load is None else self.load.num_running + self.load.num_waiting


def typical(workers: Iterable[WorkerState]) -> WorkerCapacity | None:
    """Return the median of the workers' capacities, ordered by step time; None if no worker has reported one."""
    capacities = [worker.capability for worker in workers if worker.capability is not None]
    capacities.sort(key=lambda capability: capability.cost.predict(_TYPICAL))
    return capacities[len(capacities) // 2] if capacities else None
