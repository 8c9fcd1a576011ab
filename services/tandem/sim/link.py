"""What a simulated gateway knows of one worker, and which pairs of workers it may use; never sends anything."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from tandem.core.config import GatewayConfig
from tandem.core.ids import RequestId, WorkerRef
from tandem.core.load import Load
from tandem.routing.view import WorkerView
from tandem.sim.stretch import Stretch
from tandem.sim.worker import FINGERPRINT, SimWorker
from tandem.workload.ask import MODEL


@dataclass(slots=True)
class Link:
    """What a gateway knows of a worker. `placed`: prompt tokens to compute of requests that were placed
    there and not taken yet; `coming` are steps that the worker has taken, some of which it has not heard of yet."""

    worker: SimWorker
    load: Load
    placed: dict[RequestId, int] = field(default_factory=dict)
    coming: deque[Stretch] = field(default_factory=deque)

    def view(self, num_free: int) -> WorkerView:
        worker, load = self.worker, self.load
        if num_free != load.num_free_blocks:
            load = replace(load, num_free_blocks=num_free)
        cost = worker.engine.pacer.model.published
        return WorkerView(worker.ref, worker.spec.pool, MODEL, FINGERPRINT, load, tuple(self.placed.values()), cost)


def pairs(workers: Sequence[SimWorker], config: GatewayConfig) -> frozenset[tuple[WorkerRef, WorkerRef]]:
    """Those that a gateway tries: none without a split, and two mixed workers only where every request is split."""
    if config.disaggregation == "off":
        return frozenset()
    pools = [(w.ref, w.spec.pool) for w in workers]
    return frozenset(
        (giver, taker)
        for giver, gives in pools
        for taker, takes in pools
        if giver != taker
        and gives != "decode"
        and takes != "prefill"
        and (gives != takes or config.disaggregation == "strict")
    )
