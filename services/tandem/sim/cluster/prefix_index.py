"""What simulated gateways know of workers' prefix caches, some time after the fact; never how it is carried."""

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
    """The `Prefixes` of every line: all gateways hear the same at the same time, as from one stream. `delay_s` passes
    from when facts are collected, which is now and then as real workers batch them, until they are seen."""

    def __init__(self, agenda: SimEventQueue, delay_s: float) -> None:
        self._agenda = agenda
        self._delay_s = delay_s
        self._table = PrefixTable()
        self.accuracy = PrefixAccuracy()
        self._coming: deque[tuple[float, WorkerRef, list[KVFact]]] = deque()

    def collect(self, workers: Iterable[SimWorker]) -> None:
        """Facts of all steps that have ended."""
        for worker in workers:
            worker.settle()
            facts = worker.engine.take_events()
            if facts:
                self._coming.append((self._agenda.now + self._delay_s, worker.ref, facts))

    def match(self, hashes: Sequence[BlockHash]) -> Mapping[WorkerRef, PrefixHit]:
        while self._coming and self._coming[0][0] <= self._agenda.now:
            _, worker, facts = self._coming.popleft()
            self._table.apply(worker, facts)
        return self._table.match(hashes)

    def reported(self, predicted: Prediction, num_cached: int) -> None:
        """Count a prediction. The table is late and never wrong, so nothing is loaded again."""
        self.accuracy.reported(predicted, num_cached)

    def __repr__(self) -> str:
        return f"<{self._table!r}, {len(self._coming)} batches on their way>"
