"""What a planner knows of one worker, as a frozen value; never asks it."""

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
    """`pool` is the role that it was started for, `role` what routers take it for. `load` and `capability` are None
    where it did not answer, whose reason is `problem`, or does not know its step times yet."""

    ref: WorkerRef
    model: str
    pool: str
    role: str
    load: WorkerLoad | None = None
    capability: WorkerCapacity | None = None
    problem: str = ""

    @property
    def is_draining(self) -> bool:
        """One that does not answer may serve nevertheless."""
        return self.load is not None and self.load.draining

    @property
    def num_jobs(self) -> int:
        return 0 if self.load is None else self.load.num_running + self.load.num_waiting


def typical(workers: Iterable[WorkerState]) -> WorkerCapacity | None:
    """Of the worker in the middle, by how long a step takes; None where none has told it."""
    told = [worker.capability for worker in workers if worker.capability is not None]
    told.sort(key=lambda capability: capability.cost.predict(_TYPICAL))
    return told[len(told) // 2] if told else None
