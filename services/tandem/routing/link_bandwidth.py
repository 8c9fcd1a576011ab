"""Estimate the bandwidth between two workers from completed pulls."""

from __future__ import annotations

from dataclasses import dataclass

from tandem.core.ids import WorkerRef
from tandem.core.topology import Distance
from tandem.routing.worker_view import Pair, WorkerView

PRIOR_BANDWIDTH = {Distance.HOST: 40e9, Distance.RACK: 20e9, Distance.ZONE: 10e9, Distance.FAR: 5e9}
"""Bytes per second before anything was measured. Only the order matters; the first pulls replace the numbers."""
MEMORY_BYTES = 1 << 30
"""A measured bandwidth averages over about this many last bytes, so a probe of one block hardly counts."""
PRIOR_BYTES = 64 << 20
"""Weight of the prior against measured bytes."""


@dataclass(slots=True)
class _Measured:
    num_bytes: float = 0.0
    busy_s: float = 0.0

    def add(self, num_bytes: int, busy_s: float) -> None:
        keep = MEMORY_BYTES / (MEMORY_BYTES + num_bytes)
        self.num_bytes = self.num_bytes * keep + num_bytes
        self.busy_s = self.busy_s * keep + busy_s

    def bandwidth(self, prior: float) -> float:
        """Return bytes per second; `prior` before anything was measured."""
        return (self.num_bytes + PRIOR_BYTES) / (self.busy_s + PRIOR_BYTES / prior)


class LinkBandwidth:
    """Estimate the bandwidth with which one worker reads KV from another, from the completed reads of that pair.

    A pair that has not read yet gets the estimate for its distance (same host, rack, zone, or further), and a distance
    without measurements the constant in `PRIOR_BANDWIDTH`.
    """

    def __init__(self) -> None:
        self._pairs: dict[Pair, _Measured] = {}
        self._distances: dict[Distance, _Measured] = {}

    def observe(self, producer: WorkerView, consumer: WorkerView, num_bytes: int, busy_s: float) -> None:
        """Record that `consumer` has read `num_bytes` from `producer`; `busy_s` are the seconds during which a read was
        in flight. Does nothing unless both numbers are positive."""
        if num_bytes <= 0 or busy_s <= 0:
            return
        distance = producer.topology.distance(consumer.topology)
        for measured in (
            self._pairs.setdefault((producer.ref, consumer.ref), _Measured()),
            self._distances.setdefault(distance, _Measured()),
        ):
            measured.add(num_bytes, busy_s)

    def bandwidth(self, producer: WorkerView, consumer: WorkerView) -> float:
        """Return the estimated bytes per second at which `consumer` reads from `producer`."""
        distance = producer.topology.distance(consumer.topology)
        common = self._distances.get(distance)
        pair = self._pairs.get((producer.ref, consumer.ref))
        prior = PRIOR_BANDWIDTH[distance]
        if common is not None:
            prior = common.bandwidth(prior)
        return prior if pair is None else pair.bandwidth(prior)

    def forget(self, worker: WorkerRef) -> None:
        """Drop the estimates of all pairs of a worker that no longer exists; those of distances stay."""
        self._pairs = {pair: measured for pair, measured in self._pairs.items() if worker not in pair}

    def __repr__(self) -> str:
        return f"<links of {len(self._pairs)} pairs>"
