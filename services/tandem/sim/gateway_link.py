"""What a simulated gateway knows of one worker, and which pairs it tries; never sends anything."""

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
class GatewayLink:
    """`placed`: prompt tokens to compute of requests that were placed there and not taken yet, `decoding`: requests
    placed there to decode of which it has not answered; `coming` are steps that the worker has taken, some of which the
    gateway has not heard of yet."""

    worker: SimWorker
    load: Load
    placed: dict[RequestId, int] = field(default_factory=dict)
    decoding: set[RequestId] = field(default_factory=set)
    coming: deque[Stretch] = field(default_factory=deque)

    def forget(self, request: RequestId) -> bool:
        """It does not come, whatever it was to do. Whether that is news."""
        is_news = request in self.placed or request in self.decoding
        self.placed.pop(request, None)
        self.decoding.discard(request)
        return is_news

    def view(self, num_free: int) -> WorkerView:
        worker, load = self.worker, self.load
        if num_free != load.num_free_blocks:
            load = replace(load, num_free_blocks=num_free)
        cost = worker.engine.pacer.model.published
        layout = worker.spec.layout
        return WorkerView(
            worker.ref, worker.spec.pool, MODEL, FINGERPRINT, load, tuple(self.placed.values()), cost,
            num_coming=len(self.decoding), block_size=layout.block_size, block_bytes=layout.block_bytes,
        )  # fmt: skip


def tried_pairs(workers: Sequence[SimWorker], config: GatewayConfig) -> frozenset[tuple[WorkerRef, WorkerRef]]:
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
