"""Compute how long KV reads take between workers whose links are shared by several reads.

Each worker has a link with the same bandwidth out and in. A read gets an equal part of its source's outgoing and of its
consumer's incoming bandwidth, and runs at the smaller of the two. Bandwidth that a read leaves unused is not given to
others, so contention is overestimated rather than underestimated.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial

from tandem.core.ids import WorkerRef
from tandem.sim.kernel.event_queue import Action, Actor, SimEvent, SimEventQueue


@dataclass(eq=False, slots=True)
class _Read:
    source: WorkerRef
    consumer: WorkerRef
    num_left: float
    on_done: Action
    on_lost: Action
    rate: float = 0.0
    since: float = 0.0
    next: SimEvent | None = None


@dataclass(eq=False, slots=True)
class _Link:
    """Link of one worker with its running reads, in dictionaries because they are ordered. Bytes count ended reads."""

    bandwidth: float
    party: Actor
    num_bytes_out: int = 0
    num_bytes_in: int = 0
    out: dict[_Read, None] = field(default_factory=dict)
    into: dict[_Read, None] = field(default_factory=dict)


class Fabric:
    """Compute when KV reads between workers end, from the bandwidth of their shared links.

    `latency_s`: seconds before the first byte of a read. `num_bytes`: bytes of all reads that have ended."""

    def __init__(self, agenda: SimEventQueue, latency_s: float) -> None:
        self._agenda = agenda
        self._latency_s = latency_s
        self._links: dict[WorkerRef, _Link] = {}
        self._reads: dict[_Read, None] = {}
        self._cut: set[tuple[WorkerRef, WorkerRef]] = set()
        self.num_bytes = 0

    def add(self, worker: WorkerRef, bandwidth: float, party: Actor) -> None:
        """Add a worker whose link carries `bandwidth` bytes per second in each direction. Raises ValueError unless
        `bandwidth` is above 0."""
        if bandwidth <= 0:
            raise ValueError(f"{worker} has a link of {bandwidth} bytes per second")
        self._links[worker] = _Link(bandwidth, party)

    def read(
        self, source: WorkerRef, consumer: WorkerRef, num_bytes: int, on_done: Action, on_lost: Action = lambda: None
    ) -> None:
        """Start a read of `num_bytes` bytes; call `on_done` when they have arrived, or `on_lost` when the source is
        gone.

        Both functions are called in an event of the consumer.
        """

        def done() -> None:
            self.num_bytes += num_bytes
            self._links[source].num_bytes_out += num_bytes
            self._links[consumer].num_bytes_in += num_bytes
            on_done()

        read = _Read(source, consumer, num_bytes, done, on_lost)
        self._reads[read] = None
        label = f"read {source.id} > {consumer.id} {num_bytes}"
        party = self._links[consumer].party
        read.next = self._agenda.after(self._latency_s, label, lambda: self._begin(read), by=party)

    def cut(self, source: WorkerRef, consumer: WorkerRef) -> None:
        """Cancel all reads of `consumer` from `source`; neither `on_done` nor `on_lost` is called for them."""
        for read in [r for r in self._reads if (r.source, r.consumer) == (source, consumer)]:
            self._remove(read)

    def lose(self, worker: WorkerRef) -> None:
        """Cancel all reads by a worker that is gone, and all reads from it; `on_lost` is called for each read from it
        by another worker."""
        for read in [r for r in self._reads if worker in (r.source, r.consumer)]:
            self._remove(read)
            if read.source == worker:
                self._agenda.after(0.0, "", read.on_lost, by=self._links[read.consumer].party)

    def stop(self, source: WorkerRef, consumer: WorkerRef) -> None:
        """Stop the transfer of bytes from source to consumer until `resume`; neither of them is notified."""
        self._cut.add((source, consumer))
        self._update_pair_rates(source, consumer)

    def resume(self, source: WorkerRef, consumer: WorkerRef) -> None:
        self._cut.discard((source, consumer))
        self._update_pair_rates(source, consumer)

    def set_bandwidth(self, worker: WorkerRef, bandwidth: float) -> None:
        """Set the bandwidth of a worker's link from now on, in bytes per second in each direction."""
        self._links[worker].bandwidth = bandwidth
        for read in [r for r in self._reads if worker in (r.source, r.consumer)]:
            self._update_rates(read)

    @property
    def busiest_s(self) -> float:
        """Return the least seconds in which the busiest link could have carried the bytes of all ended reads, in the
        direction that carried more."""
        return max(
            (max(link.num_bytes_out, link.num_bytes_in) / link.bandwidth for link in self._links.values()), default=0.0
        )

    @property
    def num_reads(self) -> int:
        return len(self._reads)

    def _begin(self, read: _Read) -> None:
        read.since, read.next = self._agenda.now, None
        self._links[read.source].out[read] = None
        self._links[read.consumer].into[read] = None
        self._update_rates(read)

    def _end(self, read: _Read) -> None:
        self._remove(read)
        read.on_done()

    def _remove(self, read: _Read) -> None:
        self._agenda.cancel(read.next)
        del self._reads[read]
        self._links[read.source].out.pop(read, None)
        self._links[read.consumer].into.pop(read, None)
        self._update_rates(read)

    def _update_pair_rates(self, source: WorkerRef, consumer: WorkerRef) -> None:
        for read in [r for r in self._links[source].out if r.consumer == consumer]:
            self._update_rates(read)

    def _update_rates(self, changed: _Read) -> None:
        """Recompute the rate and the end of every read that shares a link with a read that began or ended."""
        affected = {**self._links[changed.source].out, **self._links[changed.consumer].into}
        now = self._agenda.now
        for read in affected:
            source, consumer = self._links[read.source], self._links[read.consumer]
            is_cut = (read.source, read.consumer) in self._cut
            rate = 0.0 if is_cut else min(source.bandwidth / len(source.out), consumer.bandwidth / len(consumer.into))
            if rate == read.rate:
                continue
            self._agenda.cancel(read.next)
            read.num_left = max(0.0, read.num_left - read.rate * (now - read.since))
            read.rate, read.since, read.next = rate, now, None
            if rate == 0.0:
                continue
            label = f"read {read.source.id} > {read.consumer.id} ends"
            read.next = self._agenda.after(read.num_left / rate, label, partial(self._end, read), by=consumer.party)
