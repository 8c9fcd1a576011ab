"""How fast KV moves between two workers, learned from pulls that have ended; never moves any and reads no clock."""

from __future__ import annotations

from dataclasses import dataclass

from tandem.core.ids import WorkerRef
from tandem.core.topology import Distance
from tandem.routing.worker_view import Pair, WorkerView

PRIOR_BANDWIDTH = {Distance.HOST: 40e9, Distance.RACK: 20e9, Distance.ZONE: 10e9, Distance.FAR: 5e9}
"""Bytes per second while nothing was measured. The order counts; the numbers are replaced by the first pulls."""
MEMORY_BYTES = 1 << 30
"""Of about so many last bytes a measured bandwidth is the mean; so a probe of one block hardly counts."""
PRIOR_BYTES = 64 << 20
"""What a belief weighs against the first bytes that are measured."""


@dataclass(slots=True)
class _Measured:
    num_bytes: float = 0.0
    busy_s: float = 0.0

    def add(self, num_bytes: int, busy_s: float) -> None:
        keep = MEMORY_BYTES / (MEMORY_BYTES + num_bytes)
        self.num_bytes = self.num_bytes * keep + num_bytes
        self.busy_s = self.busy_s * keep + busy_s

    def bandwidth(self, believed: float) -> float:
        """Bytes per second; `believed` before anything was measured."""
        return (self.num_bytes + PRIOR_BYTES) / (self.busy_s + PRIOR_BYTES / believed)


class LinkBandwidth:
    """A pair that has not moved anything is believed to be like others as far apart, and those like the prior."""

    def __init__(self) -> None:
        self._pairs: dict[Pair, _Measured] = {}
        self._distances: dict[Distance, _Measured] = {}

    def observe(self, producer: WorkerView, consumer: WorkerView, num_bytes: int, busy_s: float) -> None:
        """A pull has ended: so many bytes in the seconds in which at least one read was under way."""
        if num_bytes <= 0 or busy_s <= 0:
            return
        distance = producer.topology.distance(consumer.topology)
        for measured in (
            self._pairs.setdefault((producer.ref, consumer.ref), _Measured()),
            self._distances.setdefault(distance, _Measured()),
        ):
            measured.add(num_bytes, busy_s)

    def bandwidth(self, producer: WorkerView, consumer: WorkerView) -> float:
        """Bytes per second."""
        distance = producer.topology.distance(consumer.topology)
        common, pair = self._distances.get(distance), self._pairs.get((producer.ref, consumer.ref))
        believed = PRIOR_BANDWIDTH[distance]
        if common is not None:
            believed = common.bandwidth(believed)
        return believed if pair is None else pair.bandwidth(believed)

    def forget(self, worker: WorkerRef) -> None:
        """A worker is gone, and with it what was known of its pairs."""
        self._pairs = {pair: measured for pair, measured in self._pairs.items() if worker not in pair}

    def __repr__(self) -> str:
        return f"<links of {len(self._pairs)} pairs>"
