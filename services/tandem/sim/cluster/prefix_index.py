"""Keep one prefix index for all simulated gateways, which see changes of workers' caches with a delay."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence

from tandem.core.events import KVFact
from tandem.core.ids import BlockHash, WorkerRef
from tandem.routing.prefix_accuracy import Prediction, PrefixAccuracy
from tandem.routing.prefix_index import PrefixHit, PrefixTable
from tandem.sim.cluster.worker import SimWorker
from tandem.sim.kernel.event_queue import SimEventQueue


class SimIndex:
    """Give all gateways the same table of which worker holds which cached blocks, with a delay.

    `delay_s`: seconds from the collection of a worker's stored and evicted blocks until gateways see them."""

    def __init__(self, agenda: SimEventQueue, delay_s: float) -> None:
        self._agenda = agenda
        self._delay_s = delay_s
        self._table = PrefixTable()
        self.accuracy = PrefixAccuracy()
        self._pending: deque[tuple[float, WorkerRef, list[KVFact]]] = deque()

    def collect(self, workers: Iterable[SimWorker]) -> None:
        """Collect what the workers' prefix caches stored and evicted in all steps that have ended."""
        for worker in workers:
            worker.settle()
            facts = worker.engine.take_events()
            if facts:
                self._pending.append((self._agenda.now + self._delay_s, worker.ref, facts))

    def match(self, hashes: Sequence[BlockHash]) -> Mapping[WorkerRef, PrefixHit]:
        while self._pending and self._pending[0][0] <= self._agenda.now:
            _, worker, facts = self._pending.popleft()
            self._table.apply(worker, facts)
        return self._table.match(hashes)

    def reported(self, predicted: Prediction, num_cached: int) -> None:
        """Compare a prediction with `num_cached`, the number of prompt tokens that the worker found in its cache, and
        count the difference in `accuracy`."""
        self.accuracy.reported(predicted, num_cached)

    def __repr__(self) -> str:
        return f"<{self._table!r}, {len(self._pending)} batches on their way>"
