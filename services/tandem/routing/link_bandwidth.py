"""Estimate the bandwidth between two workers from completed pulls."""

from __future__ import annotations

from dataclasses import dataclass

from tandem.core.ids import WorkerRef
from tandem.core.topology import Distance
from tandem.routing.worker_view import Pair, WorkerView

PRIOR_BANDWIDTH = {Distance.HOST: 40e9, Distance.RACK: 20e9, Distance.ZONE: 10e9, Distance.FAR: 5e9}
"""Bytes per second that are assumed before anything was measured. Only their order matters; the first pulls replace the
numbers."""
MEMORY_BYTES = 1 << 30
"""A measured bandwidth is an average over about this many last bytes, so a probe of one block hardly counts."""
MEMORY_S = 1.0
"""A measured bandwidth is an average over at most about this many last seconds of reading, so a few reads show that a
link has become slow."""
PRIOR_BYTES = 64 << 20
"""The prior, which is the bandwidth assumed without measurements, counts like at most this many measured bytes."""
PRIOR_S = 0.05
"""After this many seconds of reading, the weight of the prior has fallen by half, because a slow link moves few bytes.
The prior never counts for more bytes than a link of this bandwidth moves in this time."""
SMALL_BYTES = 256 << 10
"""Reads below this size measure the latency of a link."""
LATENCY_GROWTH = 1.02
"""The estimated latency rises by at most this factor per small read."""
LEAST_SHARE = 0.05
"""Least fraction of a read's time that counts after the latency was subtracted."""
MOST_TIMES = 4.0
"""In the estimate for a distance, a read counts as at most so many times slower than usual, so that one slow link does
not stand for all."""


@dataclass(slots=True)
class _Measured:
    """Decaying sums of the bytes and seconds of reads. `latency_s`: least seconds of a recent small read, which do not
    depend on the bandwidth and are not part of `busy_s`."""

    num_bytes: float = 0.0
    busy_s: float = 0.0
    latency_s: float = 0.0

    def net_s(self, num_bytes: int, busy_s: float) -> float:
        """Return the seconds of a read, `busy_s`, minus the latency of the link, but at least the fraction
        `LEAST_SHARE` of them. A read of less than `SMALL_BYTES` bytes updates the latency first."""
        if num_bytes < SMALL_BYTES:
            self.latency_s = busy_s if not self.latency_s else min(busy_s, LATENCY_GROWTH * self.latency_s)
        return max(busy_s - self.latency_s, LEAST_SHARE * busy_s)

    def add(self, num_bytes: int, busy_s: float) -> None:
        keep = min(MEMORY_BYTES / (MEMORY_BYTES + num_bytes), MEMORY_S / (MEMORY_S + busy_s))
        self.num_bytes = self.num_bytes * keep + num_bytes
        self.busy_s = self.busy_s * keep + busy_s

    def bandwidth(self, prior: float) -> float:
        """Return bytes per second; `prior` before anything was measured."""
        prior_bytes = min(PRIOR_BYTES, prior * PRIOR_S) * PRIOR_S / (PRIOR_S + self.busy_s)
        return (self.num_bytes + prior_bytes) / (self.busy_s + prior_bytes / prior)


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
        pair = self._pairs.setdefault((producer.ref, consumer.ref), _Measured())
        net_s = pair.net_s(num_bytes, busy_s)
        pair.add(num_bytes, net_s)
        common = self._distances.setdefault(distance, _Measured())
        usual_s = num_bytes / common.bandwidth(PRIOR_BANDWIDTH[distance])
        common.add(num_bytes, min(net_s, MOST_TIMES * usual_s) if common.num_bytes else net_s)

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
        """Drop the estimates of all pairs with a worker that no longer exists; the estimates for distances stay."""
        self._pairs = {pair: measured for pair, measured in self._pairs.items() if worker not in pair}

    def __repr__(self) -> str:
        return f"<links of {len(self._pairs)} pairs>"
