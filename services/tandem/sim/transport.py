"""How long bytes take between workers that share their links; never moves any.

Each worker has a link with so many bytes per second out and as many in. A read gets an equal part of its source's way
out and of its taker's way in, and goes at the smaller of the two; what it leaves unused is not given to others, which
makes contention rather too strong than too weak.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from tandem.core.ids import WorkerRef
from tandem.sim.agenda import Action, Agenda, Event


@dataclass(eq=False, slots=True)
class _Read:
    source: WorkerRef
    taker: WorkerRef
    num_left: float
    on_done: Action
    rate: float = 0.0
    since: float = 0.0
    end: Event | None = None


@dataclass(eq=False, slots=True)
class _Link:
    """Dictionaries, because they keep an order."""

    bandwidth: float
    out: dict[_Read, None] = field(default_factory=dict)
    into: dict[_Read, None] = field(default_factory=dict)


class Fabric:
    """`latency_s` passes before the first byte of a read. `num_bytes` counts those of all reads that have ended."""

    def __init__(self, agenda: Agenda, latency_s: float) -> None:
        self._agenda = agenda
        self._latency_s = latency_s
        self._links: dict[WorkerRef, _Link] = {}
        self.num_bytes = 0

    def add(self, worker: WorkerRef, bandwidth: float) -> None:
        """A worker whose link carries so many bytes per second, each way."""
        if bandwidth <= 0:
            raise ValueError(f"{worker} has a link of {bandwidth} bytes per second")
        self._links[worker] = _Link(bandwidth)

    def read(self, source: WorkerRef, taker: WorkerRef, num_bytes: int, on_done: Action) -> None:
        """Call `on_done` when the bytes have arrived."""

        def done() -> None:
            self.num_bytes += num_bytes
            on_done()

        read = _Read(source, taker, num_bytes, done)
        self._agenda.after(self._latency_s, f"read {source.id} > {taker.id} {num_bytes}", lambda: self._begin(read))

    @property
    def num_reads(self) -> int:
        """Reads whose bytes are moving."""
        return sum(len(link.out) for link in self._links.values())

    def _begin(self, read: _Read) -> None:
        read.since = self._agenda.now
        self._links[read.source].out[read] = None
        self._links[read.taker].into[read] = None
        self._share(read)

    def _end(self, read: _Read) -> None:
        del self._links[read.source].out[read]
        del self._links[read.taker].into[read]
        self._share(read)
        read.on_done()

    def _share(self, changed: _Read) -> None:
        """Give those beside a read that came or went their new rate; others keep the end that they have."""
        beside = {**self._links[changed.source].out, **self._links[changed.taker].into}
        now = self._agenda.now
        for read in beside:
            source, taker = self._links[read.source], self._links[read.taker]
            rate = min(source.bandwidth / len(source.out), taker.bandwidth / len(taker.into))
            if rate == read.rate:
                continue
            if read.end is not None:
                self._agenda.cancel(read.end)
            read.num_left = max(0.0, read.num_left - read.rate * (now - read.since))
            read.rate, read.since = rate, now
            label = f"read {read.source.id} > {read.taker.id} ends"
            read.end = self._agenda.after(read.num_left / rate, label, lambda r=read: self._end(r))  # type: ignore[misc]
