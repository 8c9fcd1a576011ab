"""What a router may know of the cluster, frozen at one moment; never asks a worker."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from tandem.core.ids import WorkerRef
from tandem.core.load import Load
from tandem.core.step_cost import StepCost

Pool = Literal["prefill", "decode", "mixed"]


@dataclass(frozen=True, slots=True)
class WorkerView:
    """One live worker. `load` is its own last word; `num_unreported_tokens` are prompt tokens that this gateway has
    sent to it since, so that a burst does not herd onto one worker. `step_cost`: how long its steps take, once told."""

    ref: WorkerRef
    pool: Pool
    model: str
    fingerprint: str
    load: Load
    num_unreported_tokens: int = 0
    step_cost: StepCost | None = None

    @property
    def prefills(self) -> bool:
        return self.pool != "decode"

    @property
    def decodes(self) -> bool:
        return self.pool != "prefill"

    @property
    def queued_tokens(self) -> int:
        return self.load.num_queued_tokens + self.num_unreported_tokens


@dataclass(frozen=True, slots=True)
class ClusterView:
    """`linked` holds the (prefill, decode) pairs between which a block has moved; `unlinked` those where it was tried
    and failed. A pair in neither is being tried."""

    workers: tuple[WorkerView, ...] = ()
    linked: frozenset[tuple[WorkerRef, WorkerRef]] = frozenset()
    unlinked: frozenset[tuple[WorkerRef, WorkerRef]] = frozenset()
