"""Hold what a simulated gateway knows of one worker, and select the pairs of workers that it uses."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from tandem.core.config import GatewayConfig
from tandem.core.ids import RequestId
from tandem.core.request import Job, PrefillJob, ResumeJob
from tandem.core.worker_load import WorkerLoad
from tandem.routing.worker_view import Pair, WorkerView
from tandem.sim.cluster.lookahead import StepRun
from tandem.sim.cluster.worker import FINGERPRINT, SimWorker
from tandem.workload.scheduled_request import MODEL


@dataclass(slots=True)
class GatewayLink:
    """A gateway's state of one worker.

    `placed`: prompt tokens to compute, by request that was placed there and not accepted yet.
    `decoding`: requests that were sent there to decode and not answered yet.
    `coming`: ended steps whose reports may not have reached the gateway yet.
    `is_live`: whether the worker's stream is up."""

    worker: SimWorker
    load: WorkerLoad
    placed: dict[RequestId, int] = field(default_factory=dict)
    decoding: set[RequestId] = field(default_factory=set)
    coming: deque[StepRun] = field(default_factory=deque)
    is_live: bool = True

    def answered(self, job: Job) -> None:
        """Remove a job from the unanswered ones, because the worker has accepted or refused it."""
        if not isinstance(job, ResumeJob):
            self.placed.pop(job.request.id, None)
        if not isinstance(job, PrefillJob):
            self.decoding.discard(job.request.id)

    def view(self, num_free: int) -> WorkerView:
        worker, load = self.worker, self.load
        if num_free != load.num_free_blocks:
            load = replace(load, num_free_blocks=num_free)
        layout = worker.spec.layout
        return WorkerView(
            worker.ref, worker.spec.pool, MODEL, FINGERPRINT, load, tuple(self.placed.values()), worker.step_cost,
            num_inflight=len(self.decoding), block_size=layout.block_size, block_bytes=layout.block_bytes,
        )  # fmt: skip


def pairs(worker: SimWorker, others: Sequence[SimWorker], config: GatewayConfig) -> set[Pair]:
    """Return the (producer, consumer) pairs of a worker with others that a gateway uses.

    There are none without disaggregation; two workers of one pool are a pair only where every request is split."""
    if config.disaggregation == "off":
        return set()
    both = [pair for other in others for pair in ((worker, other), (other, worker))]
    return {
        (producer.ref, consumer.ref)
        for producer, consumer in both
        if producer.spec.pool != "decode"
        and consumer.spec.pool != "prefill"
        and (producer.spec.pool != consumer.spec.pool or config.disaggregation == "strict")
    }
